# SPDX-License-Identifier: Apache-2.0
"""Maximum, limits and random choice over the vocabulary.

The vocabulary is reduced in blocks, and only the block that holds the answer is looked at token by token: a plain
argmax or cumulative sum over all of it costs several times as much on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.transfers import is_host

_BLOCK = 256
# So many of the largest logits are looked at first: nearly always they hold the mass that top_p asks for.
_SELECT = 512


def _reduce_blocks(x: torch.Tensor, reduce: Callable[..., torch.Tensor]) -> torch.Tensor:
    """[R, V] -> [R, ceil(V / block)]; the last block may be short."""
    whole = x.shape[1] // _BLOCK
    blocks = reduce(x[:, : whole * _BLOCK].unflatten(1, (whole, _BLOCK)), dim=-1)
    if whole * _BLOCK == x.shape[1]:
        return blocks
    return torch.cat((blocks, reduce(x[:, whole * _BLOCK :], dim=-1, keepdim=True)), dim=1)


def block_sums(weights: torch.Tensor) -> torch.Tensor:
    """Sums [R, blocks] of ``weights`` [R, V]."""
    return _reduce_blocks(weights, torch.sum)


def _token_ids_of(block: torch.Tensor) -> torch.Tensor:
    """The token ids [R, block size] of each row's block [R, 1]; the last block's run past the vocabulary."""
    return block * _BLOCK + torch.arange(_BLOCK, device=block.device)


def row_max(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest value [R] of each row of ``logits`` [R, V] and its token id [R] int64, the lowest among equals.

    A row that holds a NaN has the value NaN.
    """
    values, block = _reduce_blocks(logits, torch.amax).max(dim=1, keepdim=True)
    token_ids = _token_ids_of(block).clamp_(max=logits.shape[1] - 1)
    within = logits.gather(1, token_ids).argmax(dim=1, keepdim=True)
    return values[:, 0], token_ids.gather(1, within)[:, 0]


def keep_from(threshold: torch.Tensor, logits: torch.Tensor, weights: torch.Tensor) -> None:
    """Set ``weights`` [R, V] fp32 to 0, in place, where ``logits`` [R, V] are below ``threshold`` [R, 1].

    The comparison is written as fp32: on a CPU that is several times faster than to multiply by booleans.
    """
    weights *= torch.ge(logits, threshold, out=torch.empty_like(weights))


def _largest(logits: torch.Tensor, width: int) -> torch.Tensor:
    """The ``width`` largest values of each row, descending. numpy sorts fp32 several times faster than torch."""
    if width < logits.shape[1]:
        return logits.topk(width, dim=1).values
    if is_host(logits.device):
        return torch.from_numpy(np.sort(logits.numpy(), axis=1)).flip(1)
    return logits.sort(dim=1, descending=True).values


def _widths(vocab_size: int, metadata: SamplingMetadata, device: torch.device) -> tuple[int, ...]:
    """How many of the largest logits to look at, one after the other until all limits are found in them. A device would
    make the host wait for that answer, so there it is what is sure to suffice."""
    if is_host(device):
        return min(vocab_size, max(_SELECT, metadata.max_top_k)), vocab_size
    return (vocab_size if metadata.top_p_alone else min(vocab_size, metadata.max_top_k),)


def limit_threshold(
    logits: torch.Tensor, total: torch.Tensor, metadata: SamplingMetadata, floor: torch.Tensor | None
) -> torch.Tensor:
    """The value [R, 1] that a logit must reach to be sampled; -inf for a row without limits.

    ``logits`` [R, V] fp32, after the temperature. What is below ``floor`` [R, 1] is out. Of the rest the ``top_k``
    largest are kept, and of those the fewest likeliest whose share is at least ``top_p``, never none. ``total`` [R, 1]
    is the sum of exp(logit - largest logit) from the floor on. Being a value, the threshold treats equal logits alike
    and is the same whatever other rows need.
    """
    vocab_size, top_k, top_p = logits.shape[1], metadata.top_k, metadata.top_p
    k = torch.full_like(total, vocab_size, dtype=torch.int64) if top_k is None else top_k[:, None]
    for width in _widths(vocab_size, metadata, logits.device):
        largest = _largest(logits, width)
        last = k - 1
        if top_p is not None:
            p = top_p[:, None]
            mass = (largest - largest[:, :1]).exp_()
            if floor is not None:
                keep_from(floor, largest, mass)
            mass = mass.cumsum(dim=1, dtype=total.dtype)
            needed = p * torch.where(k < vocab_size, mass.gather(1, last.clamp(max=width - 1)), total)
            reached = torch.searchsorted(mass, needed)
            last = torch.where(p < 1, torch.minimum(last, reached), last)
        if not is_host(logits.device) or width == vocab_size or bool(((last < width) | (last == vocab_size - 1)).all()):
            break
    threshold = largest.gather(1, last.clamp(max=width - 1))
    return torch.where(last < vocab_size - 1, threshold, -torch.inf)


def random_choice(weights: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose token i of row r with probability ``weights[r, i] / weights[r].sum()``.

    ``weights`` [R, V] fp32 >= 0, ``noise`` [R] in [0, 1), of the type that sums are taken in. Inverse of the cumulative
    distribution, so that one number decides a row. Returns the tokens [R] int64 and whether the row had any finite
    weight, [R] bool.
    """
    blocks = block_sums(weights).cumsum(dim=1, dtype=noise.dtype)
    total = blocks[:, -1:]
    block, target = _pick(blocks, noise[:, None] * total)
    before = torch.where(block > 0, blocks.gather(1, (block - 1).clamp_(min=0)), 0.0)
    token_ids = _token_ids_of(block)
    vocab_size = weights.shape[1]
    within = weights.gather(1, token_ids.clamp(max=vocab_size - 1)) * (token_ids < vocab_size)
    index, _ = _pick(within.cumsum(dim=1, dtype=noise.dtype), target - before)
    return token_ids.gather(1, index)[:, 0], (total[:, 0] > 0) & total[:, 0].isfinite()


def _pick(cumulative: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First column [R, 1] whose cumulative weight exceeds ``target`` [R, 1], rounding never picking weight 0."""
    below_total = torch.nextafter(cumulative[:, -1:], torch.zeros_like(target))
    target = torch.minimum(target, below_total)
    column = torch.searchsorted(cumulative, target, right=True)
    return column.clamp_(max=cumulative.shape[1] - 1), target
