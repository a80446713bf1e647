# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens, a program a row. It ran in Triton's interpreter, not yet on hardware.

A token's weight exp(logit - largest) is a whole number of 2^-42ths, so that sums are exact in any order: which tokens
top-p keeps and which one the noise picks does not depend on tiles. Limits are found without a sort, by halving the
range of the logits' bits, which as integers are in the order of the logits, between values that occur.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.triton.rows import fits, refuse_other_dtypes

_TILE = 4096
_MOST_TOKENS = 1 << 20  # the weights of so many fit 63 bits


@triton.jit
def _row_max_kernel(logits, l0, values, ids, V, TILE: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE)
    best, at = tl.full([TILE], float("-inf"), tl.float32), lane
    any_nan = tl.zeros([TILE], tl.int32)
    for start in range(0, V, TILE):
        token = start + lane
        x = tl.load(logits + r * l0 + token, token < V, float("-inf")).to(tl.float32)
        any_nan |= (x != x).to(tl.int32)  # noqa: PLR0124
        at = tl.where(x > best, token, at)
        best = tl.where(x > best, x, best)
    largest = tl.max(best, axis=0)
    tl.store(ids + r, tl.min(tl.where(best == largest, at, V - 1), axis=0).to(tl.int64))
    tl.store(values + r, tl.where(tl.max(any_nan, axis=0) > 0, float("nan"), largest))


@triton.jit
def _in_order(x):
    """fp32 as integers in the same order, or back from those when given as fp32's bits; -0 is below 0."""
    return x ^ ((x >> 31) & 0x7FFFFFFF)


@triton.jit
def _key(x):
    return _in_order(x.to(tl.int32, bitcast=True))


@triton.jit
def _without_sign_of_zero(x):
    return tl.where(x == 0, 0.0, x)


@triton.jit
def _scaled(row, token, V, temperature):
    """Logits after the temperature, in the twin's rounding; -inf past the vocabulary."""
    x = tl.load(row + token, token < V, float("-inf")).to(tl.float32)
    return _without_sign_of_zero(tl.div_rn(x, temperature))


@triton.jit
def _weight(x, top):
    return (tl.exp(x - top) * 4398046511104.0).to(tl.int64)


@triton.jit
def _threshold(row, V, temperature, top, low, held, needed, COUNT: tl.constexpr, TILE: tl.constexpr):
    """The largest logit from which on there are ``needed`` tokens or, without COUNT, weights, and how many there are.

    From the key ``low`` on there are enough, ``held``; the result is not below it.
    """
    high = _key(top).to(tl.int64) + 1
    while high - low > 1:
        middle = ((low + high) >> 1).to(tl.int32)
        reached = tl.zeros([TILE], tl.int64)
        above, below = tl.full([TILE], 0x7FFFFFFF, tl.int32), tl.full([TILE], -0x7FFFFFFF, tl.int32)
        for start in range(0, V, TILE):
            x = _scaled(row, start + tl.arange(0, TILE), V, temperature)
            key = _key(x)
            if COUNT:
                reached += (key >= middle).to(tl.int64)
            else:
                reached += tl.where(key >= middle, _weight(x, top), 0)
            above = tl.where(key >= middle, tl.minimum(above, key), above)
            below = tl.where(key >= middle, below, tl.maximum(below, key))
        found = tl.sum(reached, axis=0)
        if found >= needed:
            low, held = tl.min(above, axis=0).to(tl.int64), found
        else:
            high = tl.max(below, axis=0).to(tl.int64) + 1
    return _in_order(low.to(tl.int32)).to(tl.float32, bitcast=True), held


@triton.jit
def _mass(row, V, temperature, top, lowest, TILE: tl.constexpr):
    mass = tl.zeros([TILE], tl.int64)
    for start in range(0, V, TILE):
        x = _scaled(row, start + tl.arange(0, TILE), V, temperature)
        mass += tl.where(x >= lowest, _weight(x, top), 0)
    return tl.sum(mass, axis=0)


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _random_bits(seed, position):
    """``reference_sampling.random_bits`` as uint64."""
    seed, position = seed.to(tl.uint64, bitcast=True), position.to(tl.uint64, bitcast=True)
    return _mix(_mix(seed) + (position + 1) * 0x9E3779B97F4A7C15)


@triton.jit(do_not_specialize=["limits"])
def _sample_kernel(
    logits, l0, largest, likeliest, temperatures, seeds, positions, top_k, top_p, log_min_p, limits, tokens, lowests, V,
    TILE: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    row = logits + r * l0
    given = tl.load(temperatures + r)
    temperature = tl.where(given > 0, given, 1.0)
    top = _without_sign_of_zero(tl.div_rn(tl.load(largest + r), temperature))
    lowest = tl.full((), float("-inf"), tl.float32)
    chosen = tl.load(likeliest + r)
    if (given > 0) & (tl.abs(top) < float("inf")):
        if limits & 4:
            lowest = _without_sign_of_zero(top + tl.load(log_min_p + r))
        surplus, k = tl.zeros((), tl.int64), tl.full((), 0, tl.int64) + V
        if limits & 1:
            k = tl.load(top_k + r)
        if k < V:
            low = _key(tl.full((), float("-inf"), tl.float32)).to(tl.int64)
            kth, count = _threshold(row, V, temperature, top, low, k, k, True, TILE)
            if kth >= lowest:
                lowest, surplus = kth, count - k
        mass = _mass(row, V, temperature, top, lowest, TILE)
        p = tl.full((), 1, tl.float32)
        if limits & 2:
            p = tl.load(top_p + r)
        if p < 1:
            # Of tokens that equal the last of top-k, all may be sampled, and top-p's share is of k tokens.
            of_k = mass - surplus * _weight(lowest, top)
            share = (p * 4294967296.0).to(tl.int64) << 32
            needed = tl.umulhi(of_k.to(tl.uint64, bitcast=True), share.to(tl.uint64, bitcast=True))
            needed = tl.maximum(needed.to(tl.int64, bitcast=True), 1)
            low = _key(lowest).to(tl.int64)
            lowest, mass = _threshold(row, V, temperature, top, low, mass, needed, False, TILE)
        noise = _random_bits(tl.load(seeds + r), tl.load(positions + r))
        target = tl.umulhi(noise, mass.to(tl.uint64, bitcast=True)).to(tl.int64, bitcast=True)
        before = tl.zeros((), tl.int64)
        for start in range(0, V, TILE):
            token = start + tl.arange(0, TILE)
            x = _scaled(row, token, V, temperature)
            weight = tl.where(x >= lowest, _weight(x, top), 0)
            after = before + tl.sum(weight, axis=0)
            if (before <= target) & (target < after):
                reached = before + tl.cumsum(weight, axis=0)
                chosen = tl.min(tl.where(reached > target, token, V), axis=0).to(tl.int64)
            before = after
    tl.store(tokens + r, chosen)
    tl.store(lowests + r, lowest)


@triton.jit
def _penalties_kernel(logits, l0, starts, tokens, counts, repetition, frequency, presence, TILE: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    repeated, frequent, present = tl.load(repetition + r), tl.load(frequency + r), tl.load(presence + r)
    begin, end = tl.load(starts + r), tl.load(starts + r + 1)
    for start in range(begin, end, TILE):
        p = start + tl.arange(0, TILE)
        at = logits + r * l0 + tl.load(tokens + p, p < end, 0)
        x, count = tl.load(at, p < end, 0), tl.load(counts + p, p < end, 0)
        x = tl.where(x > 0, tl.div_rn(x, repeated), x * repeated)
        tl.store(at, x - (frequent * count + tl.where(count > 0, present, 0.0)), p < end)


@triton.jit
def _logprobs_kernel(logits, l0, token_ids, chosen, largest_R, sums, ranks, V, TILE: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    row = logits + r * l0
    of_chosen = tl.load(row + tl.load(token_ids + r)).to(tl.float32)
    best, likelier = tl.full([TILE], float("-inf"), tl.float32), tl.zeros([TILE], tl.int32)
    for start in range(0, V, TILE):
        token = start + tl.arange(0, TILE)
        x = tl.load(row + token, token < V, float("-inf")).to(tl.float32)
        best = tl.maximum(best, x)
        likelier += (x > of_chosen).to(tl.int32)
    largest = tl.max(best, axis=0)
    total = tl.zeros([TILE], tl.float32)
    for start in range(0, V, TILE):
        token = start + tl.arange(0, TILE)
        x = tl.load(row + token, token < V, float("-inf")).to(tl.float32)
        total += tl.exp(x - largest)
    tl.store(chosen + r, of_chosen)
    tl.store(largest_R + r, largest)
    tl.store(sums + r, tl.log(tl.sum(total, axis=0)))
    tl.store(ranks + r, tl.sum(likelier, axis=0) + 1)


def _tile(width: int) -> dict[str, int]:
    columns = min(triton.next_power_of_2(width), _TILE)
    return {"TILE": columns, "num_warps": min(max(columns // 256, 4), 16)}


def _check(logits_RV: Tensor, **of_rows: tuple[Tensor | None, torch.dtype]) -> tuple[int, int]:
    refuse_other_dtypes(logits_RV)
    R, V = logits_RV.shape
    if V > _MOST_TOKENS:
        raise NotImplementedError(f"a vocabulary of {V}, the most is {_MOST_TOKENS}")
    fits("logits", logits_RV, (R, V), logits_RV.dtype)
    for name, (x, dtype) in of_rows.items():
        if x is not None:
            fits(name, x, (R,), dtype)
    return R, V


def row_max(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    R, V = _check(logits_RV)
    values, ids = (logits_RV.new_empty(R, dtype=dtype) for dtype in (torch.float32, torch.int64))
    if R:
        _row_max_kernel[(R,)](logits_RV, logits_RV.stride(0), values, ids, V, **_tile(V))
    return values, ids


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
    real, whole = torch.float32, torch.int64
    R, V = _check(
        logits_RV, largest=(largest_R, real), likeliest=(likeliest_R, whole), temperature=(temperature_R, real),
        seeds=(seeds_R, whole), positions=(positions_R, whole), top_k=(top_k_R, whole), top_p=(top_p_R, real),
        log_min_p=(log_min_p_R, real),
    )  # fmt: skip
    # A limit that no row has is not read, and is no other kernel to compile.
    limits = sum(bit for bit, x in ((1, top_k_R), (2, top_p_R), (4, log_min_p_R)) if x is not None)
    k = seeds_R if top_k_R is None else top_k_R
    p, min_p = (largest_R if x is None else x for x in (top_p_R, log_min_p_R))
    tokens, lowest = torch.empty_like(likeliest_R), torch.empty_like(largest_R)
    if R:
        _sample_kernel[(R,)](
            logits_RV, logits_RV.stride(0), largest_R, likeliest_R, temperature_R, seeds_R, positions_R, k, p, min_p,
            limits, tokens, lowest, V, **_tile(V),
        )  # fmt: skip
    return tokens, lowest


def apply_penalties(
    logits_RV: Tensor,
    starts: Tensor,
    tokens_P: Tensor,
    counts_P: Tensor,
    repetition_R: Tensor,
    frequency_R: Tensor,
    presence_R: Tensor,
) -> None:
    rates = {"repetition": repetition_R, "frequency": frequency_R, "presence": presence_R}
    R, _ = _check(logits_RV, **{name: (x, torch.float32) for name, x in rates.items()})
    fits("logits", logits_RV, logits_RV.shape, torch.float32)
    fits("starts", starts, (R + 1,), torch.int32)
    fits("tokens", tokens_P, tokens_P.shape, torch.int64)
    fits("counts", counts_P, tokens_P.shape, torch.float32)
    if R:
        _penalties_kernel[(R,)](
            logits_RV, logits_RV.stride(0), starts, tokens_P, counts_P, repetition_R, frequency_R, presence_R,
            **_tile(min(_TILE, 512)),
        )  # fmt: skip


def log_probabilities(
    logits_RV: Tensor, num_logprobs: int, token_ids_R: Tensor, normalise: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    R, V = _check(logits_RV, token_ids=(token_ids_R, torch.int64))
    chosen, largest, sums = (logits_RV.new_empty(R, 1, dtype=torch.float32) for _ in range(3))
    ranks = logits_RV.new_empty(R, dtype=torch.int32)
    if R:
        _logprobs_kernel[(R,)](logits_RV, logits_RV.stride(0), token_ids_R, chosen, largest, sums, ranks, V, **_tile(V))
    top = logits_RV.topk(num_logprobs, dim=1)
    ids = torch.cat((token_ids_R[:, None], top.indices), dim=1).int()
    logprobs = torch.cat((chosen, top.values.float()), dim=1)
    return ids, logprobs - largest - sums if normalise else logprobs, ranks
