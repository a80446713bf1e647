# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch

from vllm.kernels import ops
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.metadata import SamplingMetadata

_ROWS_AT_ONCE = 32  # of the bits of a grammar, each of which takes some bytes for a time


@dataclass(frozen=True)
class SamplerOutput:
    """``sampled_token_ids`` [R] int64; ``logprobs_tensors`` of the raw logits, if a row asked; ``largest`` [R] fp32:
    the largest raw logit, and where it is not finite the token means nothing; ``undrawable`` [R] bool: other rows of
    which bans and penalties leave no token with a finite logit (None where no row has any), whose token means nothing
    either."""

    sampled_token_ids: torch.Tensor
    logprobs_tensors: LogprobsTensors | None
    largest: torch.Tensor
    undrawable: torch.Tensor | None = None

    def nan_rows(self) -> list[bool]:
        """Rows whose largest raw logit is not finite, once that is on the host."""
        return [not isfinite(value) for value in self.largest.tolist()]


class Sampler:
    """Chooses a token for each row; no row's result depends on another row. ``logprobs_mode``: see ``EngineArgs``."""

    def __init__(self, logprobs_mode: str = "raw_logprobs") -> None:
        self.processed = logprobs_mode.startswith("processed")
        self.normalise = logprobs_mode.endswith("logprobs")

    def __call__(self, logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """``logits`` [R, V] of any float dtype, not changed. Equal largest logits: the lowest token id is greedy."""
        largest_raw, token_ids = ops.row_max(logits)
        largest, processed = largest_raw, logits
        undrawable = None
        if metadata.changes_logits:
            processed = process_logits(logits, metadata)
            largest, token_ids = ops.row_max(processed)
            undrawable = ~largest.isfinite() & largest_raw.isfinite()
        shown = processed if self.processed else logits
        if not metadata.all_greedy:
            assert metadata.temperature is not None
            assert metadata.seeds is not None
            assert metadata.positions is not None
            token_ids, lowest = ops.sample(
                processed, largest, token_ids, metadata.temperature, metadata.seeds, metadata.positions,
                metadata.top_k, metadata.top_p, metadata.log_min_p,
            )  # fmt: skip
            if self.processed and metadata.max_num_logprobs is not None:
                shown = processed / metadata.temperature.masked_fill(metadata.temperature == 0, 1)[:, None]
                shown = shown.masked_fill_(shown < lowest[:, None], -torch.inf)
        logprobs = None
        if metadata.max_num_logprobs is not None:
            logprobs = self.gather_logprobs(shown, metadata.max_num_logprobs, token_ids, self.normalise)
        return SamplerOutput(token_ids, logprobs, largest_raw, undrawable)

    @staticmethod
    def gather_logprobs(
        logits: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor, normalise: bool = True
    ) -> LogprobsTensors:
        """``ops.log_probabilities``; -1: of the whole vocabulary."""
        vocab_size = logits.shape[1]
        width = vocab_size if num_logprobs == -1 else min(num_logprobs, vocab_size)
        return LogprobsTensors(*ops.log_probabilities(logits, width, token_ids, normalise))


def process_logits(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """A changed fp32 copy of ``logits`` [R, V]: allowed tokens, banned ones, bias, then penalties."""
    logits = logits.to(torch.float32, copy=True)
    for row, token_ids in metadata.allowed:
        kept = logits[row, token_ids]
        logits[row] = -torch.inf
        logits[row, token_ids] = kept
    if metadata.grammar is not None:
        masks = 1 << torch.arange(8, dtype=torch.uint8, device=logits.device)
        for rows, words in zip(*(part.split(_ROWS_AT_ONCE) for part in metadata.grammar), strict=True):
            forbidden = (words.view(torch.uint8)[:, :, None] & masks == 0).flatten(1)[:, : logits.shape[1]]
            logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)
    if metadata.banned is not None:
        logits[metadata.banned] = -torch.inf
    if metadata.bias is not None:
        assert metadata.bias_values is not None
        logits[metadata.bias] += metadata.bias_values
    if metadata.penalties is not None:
        ops.apply_penalties(logits, *metadata.penalties)
    return logits
