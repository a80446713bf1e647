# SPDX-License-Identifier: Apache-2.0
"""What the sampler needs to know about the rows of one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class TokenEntries(NamedTuple):
    """Entries (row, token) of a [R, V] matrix, each at most once: ``rows`` and ``tokens`` [P] int64."""

    rows: torch.Tensor
    tokens: torch.Tensor


class Penalties(NamedTuple):
    """The tokens each penalised row has seen. ``output_counts`` [P] fp32; the penalties [P] fp32 are the row's."""

    entries: TokenEntries
    output_counts: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor


@dataclass(frozen=True)
class SamplingMetadata:
    """R rows; a field that no row uses is None, so that the default is a greedy step of any number of rows.

    - ``noise`` [R] in [0, 1): the number that picks a random row's token; None when all rows are greedy. fp64, as
      ``top_p``, or fp32 on a device that has no fp64: sums of probabilities are taken in that type.
    - ``temperature`` [R] fp32, 1 for greedy rows; ``greedy`` [R] bool, None when no row is.
    - ``top_k`` [R] int64, V where off; ``max_top_k``: the largest of the others. ``top_p`` [R] fp64, 1 where off;
      ``top_p_alone``: whether a row has it without ``top_k``. ``min_p`` [R] fp32.
    - ``max_num_logprobs``: the most a row asks for; -1: the whole vocabulary.
    - ``allowed``: (row, token ids) pairs; ``banned``: entries never sampled; ``bias``: entries to which
      ``bias_values`` [P] fp32 are added.
    """

    noise: torch.Tensor | None = None
    temperature: torch.Tensor | None = None
    greedy: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    max_top_k: int = 0
    top_p: torch.Tensor | None = None
    top_p_alone: bool = False
    min_p: torch.Tensor | None = None
    max_num_logprobs: int | None = None
    allowed: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    banned: TokenEntries | None = None
    bias: TokenEntries | None = None
    bias_values: torch.Tensor | None = None
    penalties: Penalties | None = None

    @property
    def all_greedy(self) -> bool:
        return self.temperature is None

    @property
    def all_random(self) -> bool:
        return self.temperature is not None and self.greedy is None

    @property
    def changes_logits(self) -> bool:
        """Whether a row's logits are changed before the temperature."""
        return bool(self.allowed) or not (self.banned is None and self.bias is None and self.penalties is None)
