# SPDX-License-Identifier: Apache-2.0
"""Penalties on tokens that a request has seen."""

from __future__ import annotations

import torch

from vllm.v1.sample.metadata import Penalties


def apply_penalties(logits: torch.Tensor, penalties: Penalties) -> None:
    """Change ``logits`` [R, V] fp32 in place at the entries of ``penalties``.

    Repetition (arXiv:1909.05858): a positive logit is divided, a negative one multiplied. Then the presence penalty is
    subtracted once, and the frequency penalty once per occurrence, where the token is in the output.
    """
    rows, tokens = penalties.entries
    values = logits[rows, tokens]
    values = torch.where(values > 0, values / penalties.repetition, values * penalties.repetition)
    counts = penalties.output_counts
    values -= penalties.frequency * counts + penalties.presence * (counts > 0)
    logits[rows, tokens] = values
