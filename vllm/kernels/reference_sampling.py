# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens in plain torch, for any device; contracts and letters are those of ``kernels.ops``.

The vocabulary is reduced in blocks, and only the block that holds the answer is looked at token by token: a plain
argmax or cumulative sum over all of it costs several times as much on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

_BLOCK = 256
# So many of the largest logits are looked at first: nearly always they hold the mass that top_p asks for.
_SELECT = 512
# Rows of log-probabilities worked on at once: bounds the memory beside the result at a few [64, V] fp32.
LOGPROB_ROWS = 64


def _real(x: Tensor) -> torch.dtype:
    """What probabilities are summed in. Some devices have no fp64."""
    return torch.float64 if x.is_cpu else torch.float32


# --- random numbers ---------------------------------------------------------------------------------------------------

_Ints = TypeVar("_Ints", Tensor, np.ndarray)  # int64: holds 64 bits, and wraps
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64


def _shifted(z: _Ints, by: int) -> _Ints:
    """To the right, as if without a sign."""
    return (z >> by) & (2 ** (64 - by) - 1)


def _mix(z: _Ints) -> _Ints:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014)."""
    z = (z ^ _shifted(z, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    z = (z ^ _shifted(z, 27)) * (0x94D049BB133111EB - 2**64)
    return z ^ _shifted(z, 31)


def random_bits(seeds: _Ints, positions: _Ints) -> _Ints:
    """64 random bits for each seed and position, all int64 and of one shape [R].

    The SplitMix64 stream of the mixed seed, read at ``position``: with no state to carry, a request gets the same
    numbers in any batch, after any preemption, on every rank and every device.
    """
    return _mix(_mix(seeds) + (positions + 1) * _GOLDEN)


def uniform_noise(seeds: Tensor, positions: Tensor, real: torch.dtype = torch.float64) -> Tensor:
    """The first bits of ``random_bits``, as many as ``real`` holds, as numbers in [0, 1)."""
    bits = 53 if real == torch.float64 else 24
    if seeds.is_cpu:  # numpy takes far less time than torch for few numbers
        first = torch.from_numpy(_shifted(random_bits(seeds.numpy(), positions.numpy()), 64 - bits))
    else:
        first = _shifted(random_bits(seeds, positions), 64 - bits)
    return first.to(real) * 2.0**-bits


# --- maximum, limits and random choice over the vocabulary ------------------------------------------------------------


def _reduce_blocks(x: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
    """[R, V] -> [R, ceil(V / block)]; the last block may be short."""
    whole = x.shape[1] // _BLOCK
    blocks = reduce(x[:, : whole * _BLOCK].unflatten(1, (whole, _BLOCK)), dim=-1)
    if whole * _BLOCK == x.shape[1]:
        return blocks
    return torch.cat((blocks, reduce(x[:, whole * _BLOCK :], dim=-1, keepdim=True)), dim=1)


def _block_sums(weights: Tensor) -> Tensor:
    """Sums [R, blocks] of ``weights`` [R, V]."""
    return _reduce_blocks(weights, torch.sum)


def _token_ids_of(block: Tensor) -> Tensor:
    """The token ids [R, block size] of each row's block [R, 1]; the last block's run past the vocabulary."""
    return block * _BLOCK + torch.arange(_BLOCK, device=block.device)


def row_max(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    values, block = _reduce_blocks(logits_RV, torch.amax).max(dim=1, keepdim=True)
    token_ids = _token_ids_of(block).clamp_(max=logits_RV.shape[1] - 1)
    within = logits_RV.gather(1, token_ids).argmax(dim=1, keepdim=True)
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    return values[:, 0], token_ids.gather(1, within)[:, 0]


def _keep_from(threshold: Tensor, logits: Tensor, weights: Tensor) -> None:
    """Set ``weights`` [R, V] to 0, in place, where ``logits`` [R, V] are below ``threshold`` [R, 1].

    The comparison is written as a number: on a CPU that is several times faster than to multiply by booleans.
    """
    weights *= torch.ge(logits, threshold, out=torch.empty_like(weights))


def _largest(logits: Tensor, width: int) -> Tensor:
    """The ``width`` largest values of each row, descending. numpy sorts fp32 several times faster than torch."""
    if width < logits.shape[1]:
        return logits.topk(width, dim=1).values
    if logits.is_cpu:
        return torch.from_numpy(np.sort(logits.numpy(), axis=1)).flip(1)
    return logits.sort(dim=1, descending=True).values


def _widths(logits: Tensor, top_k: Tensor | None) -> tuple[int, ...]:
    """How many of the largest logits to look at, one after the other until all limits are found in them. A device would
    make the host wait for that answer, so there it is what is sure to suffice."""
    vocab_size = logits.shape[1]
    if not logits.is_cpu:
        return (vocab_size,)
    limited = 0 if top_k is None else int(top_k.masked_fill(top_k >= vocab_size, 0).max())
    return min(vocab_size, max(_SELECT, limited)), vocab_size


def _limit_threshold(
    logits: Tensor, total: Tensor, top_k: Tensor | None, top_p: Tensor | None, floor: Tensor | None
) -> Tensor:
    """The value [R, 1] that a logit must reach to be sampled; -inf for a row without limits.

    ``logits`` [R, V] after the temperature. What is below ``floor`` [R, 1] is out. ``total`` [R, 1] is the sum of
    exp(logit - largest logit) from the floor on.
    """
    vocab_size = logits.shape[1]
    k = torch.full_like(total, vocab_size, dtype=torch.int64) if top_k is None else top_k[:, None]
    for width in _widths(logits, top_k):
        largest = _largest(logits, width)
        last = k - 1
        if top_p is not None:
            p = top_p[:, None]
            mass = (largest - largest[:, :1]).exp_()
            if floor is not None:
                _keep_from(floor, largest, mass)
            mass = mass.cumsum(dim=1, dtype=total.dtype)
            needed = p * torch.where(k < vocab_size, mass.gather(1, last.clamp(max=width - 1)), total)
            reached = torch.searchsorted(mass, needed)
            last = torch.where(p < 1, torch.minimum(last, reached), last)
        if width == vocab_size or bool(((last < width) | (last == vocab_size - 1)).all()):
            break
    threshold = largest.gather(1, last.clamp(max=width - 1))
    return torch.where(last < vocab_size - 1, threshold, -torch.inf)


def random_choice(weights: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Choose token i of row r with probability ``weights[r, i] / weights[r].sum()``.

    ``weights`` [R, V] >= 0, ``noise`` [R] in [0, 1), of the type that sums are taken in. Inverse of the cumulative
    distribution, so that one number decides a row. Returns the tokens [R] int64 and whether the row had any finite
    weight, [R] bool.
    """
    blocks = _block_sums(weights).cumsum(dim=1, dtype=noise.dtype)
    total = blocks[:, -1:]
    block, target = _pick(blocks, noise[:, None] * total)
    before = torch.where(block > 0, blocks.gather(1, (block - 1).clamp_(min=0)), 0.0)
    token_ids = _token_ids_of(block)
    vocab_size = weights.shape[1]
    within = weights.gather(1, token_ids.clamp(max=vocab_size - 1)) * (token_ids < vocab_size)
    index, _ = _pick(within.cumsum(dim=1, dtype=noise.dtype), target - before)
    return token_ids.gather(1, index)[:, 0], (total[:, 0] > 0) & total[:, 0].isfinite()


def _pick(cumulative: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """First column [R, 1] whose cumulative weight exceeds ``target`` [R, 1], rounding never picking weight 0."""
    below_total = torch.nextafter(cumulative[:, -1:], torch.zeros_like(target))
    target = torch.minimum(target, below_total)
    column = torch.searchsorted(cumulative, target, right=True)
    return column.clamp_(max=cumulative.shape[1] - 1), target


def sample(
    logits_RV: Tensor,
    largest_R: Tensor,
    likeliest_R: Tensor,
    temperature_R: Tensor,
    seeds_R: Tensor,
    positions_R: Tensor,
    top_k_R: Tensor | None = None,
    top_p_R: Tensor | None = None,
    log_min_p_R: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    noise = uniform_noise(seeds_R, positions_R, _real(logits_RV))
    greedy = temperature_R == 0
    temperature = temperature_R.masked_fill(greedy, 1)[:, None]
    scaled = logits_RV / temperature
    top = largest_R[:, None] / temperature
    weights = (scaled - top).exp_()
    lowest = torch.full_like(top, -torch.inf)
    if log_min_p_R is not None:
        lowest = top + log_min_p_R[:, None]
        _keep_from(lowest, scaled, weights)
    if top_k_R is not None or top_p_R is not None:
        total = _block_sums(weights).sum(dim=1, keepdim=True, dtype=noise.dtype)
        floor = None if log_min_p_R is None else lowest
        threshold = _limit_threshold(scaled, total, top_k_R, top_p_R, floor)
        _keep_from(threshold, scaled, weights)
        lowest = torch.maximum(lowest, threshold)
    token_ids, found = random_choice(weights, noise)
    undrawn = greedy | ~found
    return torch.where(undrawn, likeliest_R, token_ids), lowest[:, 0].masked_fill(undrawn, -torch.inf)


# --- penalties and log-probabilities ----------------------------------------------------------------------------------


def apply_penalties(
    logits_RV: Tensor,
    starts: Tensor,
    tokens_P: Tensor,
    counts_P: Tensor,
    repetition_R: Tensor,
    frequency_R: Tensor,
    presence_R: Tensor,
) -> None:
    entries = torch.arange(tokens_P.shape[0], dtype=starts.dtype, device=starts.device)
    rows = torch.searchsorted(starts[1:], entries, right=True)
    values, repetition = logits_RV[rows, tokens_P], repetition_R[rows]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency_R[rows] * counts_P + presence_R[rows] * (counts_P > 0)
    logits_RV[rows, tokens_P] = values


def log_probabilities(
    logits_RV: Tensor, num_logprobs: int, token_ids_R: Tensor, normalise: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    R, width = len(logits_RV), num_logprobs
    ids = torch.empty(R, width + 1, dtype=torch.int32, device=logits_RV.device)
    logprobs = torch.empty(R, width + 1, dtype=torch.float32, device=logits_RV.device)
    ranks = torch.empty(R, dtype=torch.int32, device=logits_RV.device)
    for start in range(0, R, LOGPROB_ROWS):
        part = slice(start, start + LOGPROB_ROWS)
        values = logits_RV[part].to(torch.promote_types(logits_RV.dtype, torch.float32), copy=True)
        chosen_ids = token_ids_R[part, None]
        chosen = values.gather(1, chosen_ids)
        top = values.topk(width, dim=1)
        ids[part] = torch.cat((chosen_ids, top.indices), dim=1)
        shown = torch.cat((chosen, top.values), dim=1)
        logprobs[part] = shown - values.logsumexp(dim=1, keepdim=True) if normalise else shown
        # Comparing into a number is exact and several times faster than summing booleans.
        ranks[part] = values.gt_(chosen).sum(dim=1) + 1
    return ids, logprobs, ranks
