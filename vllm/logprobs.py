# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities as the client gets them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Logprob:
    """``logprob`` natural, of the raw logits; ``rank`` 1 = likeliest; ``decoded_token`` None without a tokenizer."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PromptLogprobs = list[dict[int, Logprob] | None]
SampleLogprobs = list[dict[int, Logprob]]
