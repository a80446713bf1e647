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


class AllowedTokens(NamedTuple):
    """``rows`` [S] int64, each at most once, of which only tokens with their bit set are sampled: bit t % 32 of word
    t // 32 of ``words`` [S, ceil(V / 32)] int32."""

    rows: torch.Tensor
    words: torch.Tensor


class Penalties(NamedTuple):
    """The arguments of ``ops.apply_penalties`` beside the logits: rows without penalties have seen nothing."""

    starts: torch.Tensor
    tokens: torch.Tensor
    output_counts: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor


@dataclass(frozen=True)
class SamplingMetadata:
    """R rows; a field that no row uses is None, so that the default is a greedy step of any number of rows.

    - ``temperature`` [R] fp32, 0 for greedy rows; ``seeds`` and output ``positions`` [R] int64, which pick a random
      row's token; None when all rows are greedy.
    - ``top_k`` [R] int64, V where off; ``top_p`` [R] fp32, 1 where off; ``log_min_p`` [R] fp32, -inf where off.
    - ``max_num_logprobs``: the most a row asks for; -1: the whole vocabulary.
    - ``allowed``: (row, token ids) pairs; ``banned``: entries never sampled; ``bias``: entries to which
      ``bias_values`` [P] fp32 are added; ``grammar``: rows that a grammar holds.
    """

    temperature: torch.Tensor | None = None
    seeds: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    log_min_p: torch.Tensor | None = None
    max_num_logprobs: int | None = None
    allowed: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    banned: TokenEntries | None = None
    bias: TokenEntries | None = None
    bias_values: torch.Tensor | None = None
    penalties: Penalties | None = None
    grammar: AllowedTokens | None = None

    @property
    def all_greedy(self) -> bool:
        return self.temperature is None

    @property
    def changes_logits(self) -> bool:
        """Whether a row's logits are changed before the temperature."""
        changes = (self.banned, self.bias, self.penalties, self.grammar)
        return bool(self.allowed) or any(change is not None for change in changes)
