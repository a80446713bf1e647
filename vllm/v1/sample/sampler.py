# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.penalties import apply_penalties
from vllm.v1.sample.ops.topk_topp_sampler import block_sums, keep_from, limit_threshold, random_choice, row_max

# Rows of log-probabilities worked on at once: bounds the memory beside the result at a few [64, V] fp32.
LOGPROB_ROWS = 64


@dataclass(frozen=True)
class SamplerOutput:
    """``sampled_token_ids`` [R] int64; ``logprobs_tensors`` of the raw logits, if a row asked; ``nan_rows`` [R] bool:
    rows whose largest raw logit is not finite, and whose token 0 means nothing; ``undrawable`` [R] bool: other rows of
    which bans and penalties leave no token with a finite logit (None where no row has any), token 0 again."""

    sampled_token_ids: torch.Tensor
    logprobs_tensors: LogprobsTensors | None
    nan_rows: torch.Tensor
    undrawable: torch.Tensor | None = None


class Sampler:
    """Chooses a token for each row; no row's result depends on another row. ``logprobs_mode``: see ``EngineArgs``."""

    def __init__(self, logprobs_mode: str = "raw_logprobs") -> None:
        self.processed = logprobs_mode.startswith("processed")
        self.normalise = logprobs_mode.endswith("logprobs")

    def __call__(self, logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """``logits`` [R, V] of any float dtype, not changed. Equal largest logits: the lowest token id is greedy."""
        largest, token_ids = row_max(logits)
        nan_rows = ~largest.isfinite()
        processed = logits
        undrawable = None
        if metadata.changes_logits:
            processed = process_logits(logits, metadata)
            largest, token_ids = row_max(processed)
            undrawable = ~largest.isfinite() & ~nan_rows
        keep = self.processed and metadata.max_num_logprobs is not None
        if not metadata.all_greedy:
            token_ids, processed = self._sample(processed, largest, token_ids, metadata, keep)
        token_ids = token_ids.masked_fill(nan_rows if undrawable is None else nan_rows | undrawable, 0)
        logprobs = None
        if metadata.max_num_logprobs is not None:
            shown = processed if self.processed else logits
            logprobs = self.gather_logprobs(shown, metadata.max_num_logprobs, token_ids, self.normalise)
        return SamplerOutput(token_ids, logprobs, nan_rows, undrawable)

    @staticmethod
    def _sample(
        logits: torch.Tensor,
        largest: torch.Tensor,
        greedy_token_ids: torch.Tensor,
        metadata: SamplingMetadata,
        keep: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens and, if ``keep``, the logits that they were drawn from: -inf where a filter forbids a token."""
        assert metadata.temperature is not None
        assert metadata.noise is not None
        temperature = metadata.temperature[:, None]
        scaled = logits / temperature
        top = largest.float()[:, None] / temperature
        weights = (scaled - top).exp_()
        floor = lowest = None
        if metadata.min_p is not None:
            floor = top + metadata.min_p[:, None].log()
            keep_from(floor, scaled, weights)
            lowest = floor
        if metadata.top_k is not None or metadata.top_p is not None:
            total = block_sums(weights).sum(dim=1, keepdim=True, dtype=metadata.noise.dtype)
            threshold = limit_threshold(scaled, total, metadata, floor)
            keep_from(threshold, scaled, weights)
            lowest = threshold if lowest is None else torch.maximum(lowest, threshold)
        token_ids, found = random_choice(weights, metadata.noise)
        if metadata.greedy is not None:
            found = found & ~metadata.greedy
        if keep and lowest is not None:
            scaled = scaled.masked_fill(scaled < lowest, -torch.inf)
        return torch.where(found, token_ids, greedy_token_ids), scaled

    @staticmethod
    def gather_logprobs(
        logits: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor, normalise: bool = True
    ) -> LogprobsTensors:
        """Log-probabilities of ``token_ids`` [R] and of the ``num_logprobs`` likeliest tokens (-1: all) of each row.

        ``logits`` [R, V] of any float dtype, given themselves without ``normalise``. The rank of a token is 1 + the
        number of strictly likelier ones.
        """
        num_rows, vocab_size = logits.shape
        width = vocab_size if num_logprobs == -1 else min(num_logprobs, vocab_size)
        ids = torch.empty(num_rows, width + 1, dtype=torch.int32, device=logits.device)
        logprobs = torch.empty(num_rows, width + 1, dtype=torch.float32, device=logits.device)
        ranks = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
        for start in range(0, num_rows, LOGPROB_ROWS):
            part = slice(start, start + LOGPROB_ROWS)
            values = logits[part].to(torch.float32, copy=True)
            chosen_ids = token_ids[part, None].to(torch.int64)
            chosen = values.gather(1, chosen_ids)
            top = values.topk(width, dim=1)
            ids[part] = torch.cat((chosen_ids, top.indices), dim=1)
            logprobs[part] = torch.cat((chosen, top.values), dim=1)
            if normalise:
                logprobs[part] -= values.logsumexp(dim=1, keepdim=True)
            # Comparing into fp32 is exact and several times faster than summing booleans.
            ranks[part] = values.gt_(chosen).sum(dim=1) + 1
        return LogprobsTensors(ids, logprobs, ranks)


def process_logits(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """A changed fp32 copy of ``logits`` [R, V]: allowed and banned tokens, bias, then penalties."""
    logits = logits.to(torch.float32, copy=True)
    for row, token_ids in metadata.allowed:
        kept = logits[row, token_ids]
        logits[row] = -torch.inf
        logits[row, token_ids] = kept
    if metadata.banned is not None:
        logits[metadata.banned] = -torch.inf
    if metadata.bias is not None:
        assert metadata.bias_values is not None
        logits[metadata.bias] += metadata.bias_values
    if metadata.penalties is not None:
        apply_penalties(logits, metadata.penalties)
    return logits
