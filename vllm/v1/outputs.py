# SPDX-License-Identifier: Apache-2.0
"""What a step gives back: sampled tokens and log-probabilities, rows in the order of the scheduler's requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import torch


class LogprobsTensors(NamedTuple):
    """Log-probabilities of R positions: column 0 is the sampled (or given) token, then the k likeliest.

    ``token_ids`` [R, k+1] int32, ``logprobs`` [R, k+1] fp32, ``ranks`` [R] int32 (1 = likeliest) of column 0.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor


class LogprobsLists(NamedTuple):
    """``LogprobsTensors`` as Python lists."""

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    ranks: list[int]


@dataclass
class ModelRunnerOutput:
    """``sampled_token_ids[i]`` is empty where request i only prefilled a part of its prompt in this step.

    ``logprobs[req_id]`` holds one row for the sampled token; ``prompt_logprobs[req_id]`` a row for each prompt
    position whose *next* prompt token was scored in this step, in order. ``nan_req_ids`` had NaN logits;
    ``undrawable[req_id]`` says why no token could be drawn for that request, whose sampled token means nothing.
    """

    sampled_token_ids: list[list[int]] = field(default_factory=list)
    logprobs: dict[str, LogprobsLists] = field(default_factory=dict)
    prompt_logprobs: dict[str, LogprobsLists] = field(default_factory=dict)
    nan_req_ids: frozenset[str] = frozenset()
    undrawable: dict[str, str] = field(default_factory=dict)


class EngineCoreOutput(msgspec.Struct, array_like=True):
    """What one request got out of one step. ``queued_seconds``: it waited for its first step.

    On the wire it is its values in order: there is one for each token.
    """

    request_id: str
    new_token_ids: list[int]
    new_logprobs: LogprobsLists | None = None
    new_prompt_logprobs: LogprobsLists | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    queued_seconds: float = 0.0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
