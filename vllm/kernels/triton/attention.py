# SPDX-License-Identifier: Apache-2.0
"""Attention over the paged cache: prefill, chunked prefill and decode of one batch.

Letters beside those of ``kernels.ops``: G query heads of a KV head, DV head size of the values.

A *tile* is up to QUERIES consecutive queries of one request, each with up to HEADS heads of one group, so that keys
and values are read once for all of them. The grid has as many tiles as the worst cut of T rows into R requests needs;
a program finds its request in ``query_start_loc``, and one that is too many ends at once. Keys are taken KEYS at a
time, cut at absolute positions (online softmax: Milakov and Gimelshein 2018; tiled: Dao et al. 2022). Requests of few
queries may split their keys over programs, whose sums ``_merge`` adds in rising order. How often they may is fixed by
shapes alone; how many of these programs have work, by the request's own length.

The kernels have been proven in Triton's interpreter and compiled for CUDA and XPU; no hardware has run them yet.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.triton.cards import has_fp8, shared_memory
from vllm.kernels.triton.quantized import e4m3

LOG2_E = math.log2(math.e)
ANY = 2**31 - 1
FP8 = torch.float8_e4m3fn
MAX_HEAD_SIZE, MAX_VALUE_SIZE = 576, 512


@triton.jit
def _request(starts_ptr, tile, R, QUERIES: tl.constexpr, SCAN: tl.constexpr):
    """(request, first query) of a tile. Request r has the tiles from ``starts[r] // QUERIES + r`` on: more than enough
    before those of r + 1 begin."""
    count = tl.full([], 0, tl.int32)
    first = tl.full([], 0, tl.int32)
    for base in range(0, R, SCAN):
        r = base + tl.arange(0, SCAN)
        start = tl.load(starts_ptr + r, mask=r < R, other=0)
        mine = (r < R) & (start // QUERIES + r <= tile)
        count += tl.sum(mine.to(tl.int32), 0)
        first = tl.maximum(first, tl.max(tl.where(mine, start // QUERIES + r, 0), 0))
    return count - 1, (tile - first) * QUERIES


@triton.jit
def _share(first_position, last_position, window, WINDOW: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
           LEAST: tl.constexpr):  # fmt: skip
    """(first step of KEYS that a tile sees, number of steps, steps of one split)"""
    begin = 0
    if WINDOW:
        begin = tl.maximum(first_position - window + 1, 0) // KEYS
    steps = last_position // KEYS + 1 - begin
    return begin, steps, tl.maximum((steps + SPLITS - 1) // SPLITS, LEAST)


@triton.jit
def _load(pointers, some, inside, MASKED: tl.constexpr, RAGGED: tl.constexpr, WIDE: tl.constexpr):
    if MASKED and RAGGED:
        x = tl.load(pointers, mask=some & inside, other=0.0)
    elif MASKED:
        x = tl.load(pointers, mask=some, other=0.0)
    elif RAGGED:
        x = tl.load(pointers, mask=inside, other=0.0)
    else:
        x = tl.load(pointers)
    if WIDE:
        x = x.to(tl.float32)
    return x


@triton.jit
def _cached(pointers, some, inside, q, MASKED: tl.constexpr, RAGGED: tl.constexpr, WIDE: tl.constexpr,
            CODES: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """Part of a cache of q's type, or of e4m3 as bytes."""
    if CODES:
        x = e4m3(_load(pointers, some, inside, MASKED, RAGGED, False), NATIVE).to(q.dtype)
    else:
        x = _load(pointers, some, inside, MASKED, RAGGED, WIDE)
    return x


@triton.jit
def _add_keys(
    acc, top, total, q, q_rest, k_ptr, v_ptr, table_ptr, begin, lo, hi, position, scale, soft_cap, window, stride_kb,
    stride_kn, stride_vb, stride_vn, MASKED: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, WIDE: tl.constexpr,
    CODES: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr,
    D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
):  # fmt: skip
    """The keys [begin, begin + KEYS) into the softmax of the tile's rows: weighted values, maximum and sum of weights.
    MASKED: some rows do not see all of them; those outside [lo, hi) no row sees, and they are not read."""
    key = begin + tl.arange(0, KEYS)
    some = (key >= lo) & (key < hi)
    if MASKED:
        block = tl.load(table_ptr + key // BLOCK, mask=some, other=0).to(tl.int64)
    else:
        block = tl.load(table_ptr + key // BLOCK).to(tl.int64)
    k = k_ptr + (block * stride_kb + key % BLOCK * stride_kn)
    d = tl.arange(0, D1)
    k_DN = _cached(k[None, :] + d[:, None], some[None, :], (d < D)[:, None], q, MASKED, D1 > D, WIDE, CODES, NATIVE)
    scores = tl.dot(q, k_DN, input_precision="ieee")
    if D2 > 0:
        d2 = D1 + tl.arange(0, D2)
        inside = (d2 < D)[:, None]
        k_DN = _cached(k[None, :] + d2[:, None], some[None, :], inside, q, MASKED, D1 + D2 > D, WIDE, CODES, NATIVE)
        scores = tl.dot(q_rest, k_DN, scores, input_precision="ieee")
    scores *= scale
    if CAP:  # the tangent of the magnitude: exp2 of a positive number could overflow
        decay = tl.exp2(tl.abs(scores) * -2.8853900817779268)
        capped = soft_cap * (1.0 - decay) / (1.0 + decay)
        scores = tl.where(scores < 0.0, -capped, capped)
    if MASKED:
        seen = some[None, :] & (key[None, :] <= position[:, None])
        if WINDOW:
            seen = seen & (key[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    peak = tl.maximum(top, tl.max(scores, 1))
    origin = peak
    if MASKED:  # a row that has seen no key yet: -inf - -inf is NaN
        origin = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp2(scores - origin[:, None])
    decay = tl.exp2(top - origin)
    total = total * decay + tl.sum(weights, 1)
    d_v = tl.arange(0, DVP)
    v = v_ptr + (block * stride_vb + key % BLOCK * stride_vn)
    v_ND = _cached(
        v[:, None] + d_v[None, :], some[:, None], (d_v < DV)[None, :], q, MASKED, DVP > DV, WIDE, CODES, NATIVE
    )
    acc = tl.dot(weights.to(v_ND.dtype), v_ND, acc * decay[:, None], input_precision="ieee")
    return acc, peak, total


@triton.jit(do_not_specialize=["T", "R", "least", "most", "window"])
def _attend(
    q_ptr, k_ptr, v_ptr, out_ptr, sums_ptr, peaks_ptr, table_ptr, starts_ptr, lens_ptr, sinks_ptr, T, R, least, most,
    scale, soft_cap, v_scale, window, stride_qt, stride_qh, stride_kb, stride_kj, stride_kn, stride_vb, stride_vj,
    stride_vn, stride_ot, stride_oh, stride_table, SEARCH: tl.constexpr, SINKS: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, WIDE: tl.constexpr, CODES: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr,
    G: tl.constexpr, HEADS: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    SPLITS: tl.constexpr, LEAST: tl.constexpr, SCAN: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr,
):  # fmt: skip
    """One split of one tile, of a request of ``least`` to ``most`` queries. Without SEARCH tile r is request r's, which
    has one. Into out when the split is the only one that has keys, else into sums and peaks."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles see the most keys: they begin first
    group = tl.program_id(1)
    split = tl.program_id(2)
    parts = (G + HEADS - 1) // HEADS
    j = group // parts
    row = tl.arange(0, ROWS)
    in_group = group % parts * HEADS + row % HEADS
    head = j * G + in_group
    used = (row // HEADS < QUERIES) & (in_group < G)
    d_v = tl.arange(0, DVP)
    out = out_ptr + head[:, None].to(tl.int64) * stride_oh + d_v[None, :]
    if SEARCH:
        end = tl.load(starts_ptr + R)
        if (split == 0) & (tile * QUERIES + QUERIES > end):
            pad = tile * QUERIES + row // HEADS
            padding = used & (pad >= end) & (pad < T)
            zeros = tl.full((ROWS, DVP), 0.0, tl.float32).to(out_ptr.dtype.element_ty)
            tl.store(out + pad[:, None].to(tl.int64) * stride_ot, zeros, mask=padding[:, None] & (d_v < DV)[None, :])
        request, first = _request(starts_ptr, tile, R, QUERIES, SCAN)
    else:
        request, first = tile, 0
    start = tl.load(starts_ptr + request)
    queries = tl.load(starts_ptr + request + 1) - start
    length = tl.load(lens_ptr + request)
    if (length == 0) | (first >= queries) | (queries < least) | (queries > most):
        return
    query = first + row // HEADS
    real = used & (query < queries)
    position = length - queries + query
    first_position = length - queries + first
    last_position = length - queries + tl.minimum(first + QUERIES, queries) - 1
    first_step, steps, share = _share(first_position, last_position, window, WINDOW, KEYS, SPLITS, LEAST)
    if split * share >= steps:
        return
    begin = (first_step + split * share) * KEYS
    end = (first_step + tl.minimum(split * share + share, steps)) * KEYS
    lo = 0
    whole_from = begin  # between here and whole_to every row sees every key
    if WINDOW:
        lo = tl.maximum(first_position - window + 1, 0)
        whole_from = tl.maximum(last_position - window + KEYS, 0) // KEYS * KEYS
        whole_from = tl.minimum(tl.maximum(whole_from, begin), end)
    hi = last_position + 1
    whole_to = tl.maximum(tl.minimum((first_position + 1) // KEYS * KEYS, end), whole_from)

    d = tl.arange(0, D1)
    q = q_ptr + (start + query).to(tl.int64) * stride_qt + head.to(tl.int64) * stride_qh
    q_MD = _load(q[:, None] + d[None, :], real[:, None], (d < D)[None, :], True, D1 > D, WIDE)
    q_rest = q_MD
    if D2 > 0:
        d2 = D1 + tl.arange(0, D2)
        q_rest = _load(q[:, None] + d2[None, :], real[:, None], (d2 < D)[None, :], True, D1 + D2 > D, WIDE)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.full((ROWS,), 0.0, tl.float32)
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.where(split == 0, sink, top)
        total = tl.where(split == 0, 1.0, total)
    acc = tl.full((ROWS, DVP), 0.0, tl.float32)
    k_ptr += j.to(tl.int64) * stride_kj
    v_ptr += j.to(tl.int64) * stride_vj
    table_ptr += request.to(tl.int64) * stride_table
    if WINDOW:
        for at in range(begin, whole_from, KEYS):
            acc, top, total = _add_keys(
                acc, top, total, q_MD, q_rest, k_ptr, v_ptr, table_ptr, at, lo, hi, position, scale, soft_cap, window,
                stride_kb, stride_kn, stride_vb, stride_vn,
                True, WINDOW, CAP, WIDE, CODES, NATIVE, BLOCK, KEYS, D, D1, D2, DV, DVP,
            )  # fmt: skip
    for at in range(whole_from, whole_to, KEYS):
        acc, top, total = _add_keys(
            acc, top, total, q_MD, q_rest, k_ptr, v_ptr, table_ptr, at, lo, hi, position, scale, soft_cap, window,
            stride_kb, stride_kn, stride_vb, stride_vn,
            False, WINDOW, CAP, WIDE, CODES, NATIVE, BLOCK, KEYS, D, D1, D2, DV, DVP,
        )  # fmt: skip
    for at in range(whole_to, end, KEYS):
        acc, top, total = _add_keys(
            acc, top, total, q_MD, q_rest, k_ptr, v_ptr, table_ptr, at, lo, hi, position, scale, soft_cap, window,
            stride_kb, stride_kn, stride_vb, stride_vn,
            True, WINDOW, CAP, WIDE, CODES, NATIVE, BLOCK, KEYS, D, D1, D2, DV, DVP,
        )  # fmt: skip
    if share >= steps:
        out += (start + query)[:, None].to(tl.int64) * stride_ot
        result = (acc / total[:, None] * v_scale).to(out_ptr.dtype.element_ty)
        tl.store(out, result, mask=real[:, None] & (d_v < DV)[None, :])
    else:
        part = ((tile.to(tl.int64) * tl.num_programs(1) + group) * SPLITS + split) * ROWS + row
        tl.store(peaks_ptr + 2 * part, top, mask=real)
        tl.store(peaks_ptr + 2 * part + 1, total, mask=real)
        tl.store(sums_ptr + part[:, None] * DVP + d_v[None, :], acc, mask=real[:, None])


@triton.jit(do_not_specialize=["R", "most", "window"])
def _merge(
    out_ptr, sums_ptr, peaks_ptr, starts_ptr, lens_ptr, R, most, v_scale, window, stride_ot, stride_oh,
    SEARCH: tl.constexpr, WINDOW: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, QUERIES: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, SCAN: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """COLUMNS values of a row whose keys several splits have shared."""
    tile = tl.program_id(0)
    chunks = DVP // COLUMNS
    group = tl.program_id(1) // chunks
    row = tl.program_id(2)
    d = tl.program_id(1) % chunks * COLUMNS + tl.arange(0, COLUMNS)
    parts = (G + HEADS - 1) // HEADS
    in_group = group % parts * HEADS + row % HEADS
    if SEARCH:
        request, first = _request(starts_ptr, tile, R, QUERIES, SCAN)
    else:
        request, first = tile, 0
    start = tl.load(starts_ptr + request)
    queries = tl.load(starts_ptr + request + 1) - start
    length = tl.load(lens_ptr + request)
    query = first + row // HEADS
    if (length == 0) | (query >= queries) | (queries > most) | (in_group >= G):
        return
    first_position = length - queries + first
    last_position = length - queries + tl.minimum(first + QUERIES, queries) - 1
    _, steps, share = _share(first_position, last_position, window, WINDOW, KEYS, SPLITS, LEAST)
    if share >= steps:
        return
    split = tl.arange(0, SPLITS)
    written = split * share < steps
    part = ((tile.to(tl.int64) * (tl.num_programs(1) // chunks) + group) * SPLITS + split) * ROWS + row
    top = tl.load(peaks_ptr + 2 * part, mask=written, other=float("-inf"))
    total = tl.load(peaks_ptr + 2 * part + 1, mask=written, other=0.0)
    sums = tl.load(sums_ptr + part[:, None] * DVP + d[None, :], mask=written[:, None], other=0.0)
    weight = tl.exp2(top - tl.max(top, 0))
    result = tl.sum(sums * weight[:, None], 0) / tl.sum(total * weight, 0) * v_scale
    head = group // parts * G + in_group
    out = out_ptr + (start + query).to(tl.int64) * stride_ot + head.to(tl.int64) * stride_oh + d
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=d < DV)


class Plan(NamedTuple):
    """A program takes ``rows`` (query, head) rows and ``keys`` keys at a time. A split has ``least`` steps of so many
    keys or more; there are at most ``splits``, a power of two."""

    rows: int
    keys: int
    warps: int
    stages: int
    splits: int = 1
    least: int = 1


# How many programs keep a card busy, and of how many splits' sums a merge is made at once.
PROGRAMS, MAX_SPLITS = 1024, 64


def _widths(size: int) -> tuple[int, int]:
    """Two powers of two, the second may be 0, that cover a head of ``size`` and are wide enough for a product."""
    first = max(1 << (size.bit_length() - 1), 16)
    return first, max(triton.next_power_of_2(size - first), 16) if size > first else 0


def _few_rows(G: int, DV: int) -> int:
    return min(max(triton.next_power_of_2(G), 16), 64 if DV <= 256 else 32)


def _plan_few(R: int, G: int, J: int, D: int, DV: int, dtype: torch.dtype, longest: int, interpreted: bool) -> Plan:
    """For requests of so few queries that reading the cache takes the time: each may be split, the fewer requests
    there are the more, and a step of 32 KiB leaves room for several programs beside each other."""
    rows = _few_rows(G, DV)
    if interpreted:
        return Plan(rows, 64, 1, 1)
    keys = min(max((1 << 15) // (triton.next_power_of_2(D + DV) * dtype.itemsize), 16), 128)
    splits = min(PROGRAMS // (R * J * -(-G // rows)), MAX_SPLITS, longest // 256)
    warps = 8 if DV > 256 or dtype is torch.float32 else 4
    return Plan(rows, keys, warps, 3, 1 << max(splits.bit_length() - 1, 0), 256 // keys)


def _plan_many(D: int, DV: int, dtype: torch.dtype, interpreted: bool) -> Plan:
    """For requests of many queries, where the products take the time: what the registers hold of a program's sums."""
    size = max(D, DV)
    if interpreted:
        return Plan(64, 64, 1, 1)
    if dtype is torch.float32:
        return Plan(32, 32 if size <= 128 else 16, 8, 2)
    if size <= 64:
        return Plan(128, 64, 4, 3)
    if size <= 128:
        return Plan(128, 128, 8, 3)
    return Plan(64, 64, 8, 2) if DV <= 256 else Plan(32, 16, 8, 2)


def _fitting(plan: Plan, D: int, DV: int, itemsize: int, memory: int) -> Plan:
    """With as many keys as a program has memory for: the queries, and keys and values of this step and of the next."""
    wide, keys, stages = sum(_widths(D)), plan.keys, plan.stages
    while (plan.rows * wide + min(stages, 2) * keys * (wide + triton.next_power_of_2(DV))) * itemsize > memory:
        if keys > 16:
            keys //= 2
        elif stages > 1:
            stages = 1
        else:
            break
    return plan._replace(keys=keys, stages=stages)


class Cut(NamedTuple):
    """A launch for the requests of ``fewest`` to ``most`` queries. ``search``: their tiles are looked for among those
    of all requests, else each request has one."""

    plan: Plan
    search: bool
    fewest: int
    most: int
    tiles: int
    groups: int
    heads: int
    queries: int

    @property
    def parts(self) -> int:
        """Rows of float32 sums that are kept for the merge."""
        return self.tiles * self.groups * self.plan.splits * self.plan.rows if self.plan.splits > 1 else 0


def _cuts(T: int, R: int, G: int, J: int, few: Plan, many: Plan) -> list[Cut]:
    """One launch where all requests may have few queries each, or where there is one request, else one for those with
    few and one for the others."""

    def cut(plan: Plan, search: bool, fewest: int, most: int) -> Cut:
        heads = min(G, plan.rows)
        queries = plan.rows // heads
        tiles = T // queries + R if search else R
        return Cut(plan, search, fewest, most, tiles, J * -(-G // heads), heads, queries)

    together = few.rows // min(G, few.rows)  # queries of a request that make one tile of the plan for few
    if R * together >= T:
        return [cut(few, True, 0, ANY)]
    if R == 1:
        return [cut(many, True, 0, ANY)]
    return [cut(few, False, 0, together), cut(many, True, together + 1, ANY)]


def paged_attention(
    q_THD: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    out_THD: Tensor,
    sliding_window: int = 0,
    num_reqs: int | None = None,
    sinks: Tensor | None = None,
    soft_cap: float = 0.0,
    query_start_loc_cpu: Tensor | None = None,
    seq_lens_cpu: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """The operator for any block size. The value cache may be a view of the key cache.

    A NaN among a request's own keys or values may reach those rows of the same request that do not see it. A row's
    result is bitwise its own among calls of as many requests, as wide a table and the same tiles.

    Raises:
        NotImplementedError: a dtype other than float32, bfloat16 and float16, or a head above 576 (values: 512).
    """
    T, H, D = q_THD.shape
    blocks, J, block_size, _ = key_cache.shape
    DV, dtype = value_cache.shape[3], q_THD.dtype
    R = query_start_loc.shape[0] - 1 if num_reqs is None else num_reqs
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise NotImplementedError(f"attention in {dtype}: the kernel knows float32, bfloat16 and float16")
    if D > MAX_HEAD_SIZE or DV > MAX_VALUE_SIZE:
        raise NotImplementedError(
            f"heads of {D} with values of {DV}: the kernel knows up to {MAX_HEAD_SIZE} with {MAX_VALUE_SIZE}"
        )
    assert H % J == 0, f"{H} query heads are no multiple of {J} key-value heads"
    assert key_cache.shape == (blocks, J, block_size, D), f"key cache is {key_cache.shape}, q {q_THD.shape}"
    assert value_cache.shape == (blocks, J, block_size, DV), f"caches are {key_cache.shape}, {value_cache.shape}"
    assert out_THD.shape == (T, H, DV), f"out is {out_THD.shape}, needed {(T, H, DV)}"
    kinds, codes = (key_cache.dtype, value_cache.dtype, out_THD.dtype), key_cache.dtype is FP8
    assert kinds == (FP8 if codes else dtype,) * 2 + (dtype,), f"caches and out are {kinds}, q {dtype}"
    if codes:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    last = tuple(t.stride(-1) for t in (q_THD, key_cache, value_cache, out_THD))
    assert last == (1,) * 4, f"last strides of q, caches, out are {last}, needed 1"
    tables = (block_table.dtype, query_start_loc.dtype, seq_lens.dtype)
    assert tables == (torch.int32,) * 3, f"tables are {tables}, needed int32"
    last = (block_table.stride(1), query_start_loc.stride(0), seq_lens.stride(0))
    assert last == (1,) * 3, f"strides of tables are {last}, needed 1"
    assert block_table.shape[0] >= R < query_start_loc.shape[0] and seq_lens.shape[0] >= R, (  # noqa: PT018
        f"{R} requests, tables for {block_table.shape[0]}, {query_start_loc.shape[0] - 1}, {seq_lens.shape[0]}"
    )
    if sinks is not None:
        assert sinks.shape == (H,), f"sinks are {sinks.shape}, needed {(H,)}"
        sinks = sinks.contiguous()
    if not T * H * DV:
        return
    if not R:
        out_THD.zero_()
        return
    scale *= k_scale
    G, interpreted = H // J, triton.knobs.runtime.interpret
    longest = block_table.shape[1] * block_size
    few = _plan_few(R, G, J, D, DV, dtype, min(longest, sliding_window or longest), interpreted)
    many = _plan_many(D, DV, dtype, interpreted)
    memory = shared_memory(q_THD.device)
    few, many = (_fitting(plan, D, DV, dtype.itemsize, memory) for plan in (few, many))
    d1, d2 = _widths(D)
    dvp = max(triton.next_power_of_2(DV), 16)
    cap = soft_cap > 0
    for cut in _cuts(T, R, G, J, few, many):
        plan = cut.plan
        sums = peaks = q_THD
        if cut.parts:
            sums, peaks = (q_THD.new_empty(cut.parts * width, dtype=torch.float32) for width in (dvp, 2))
        common = {
            "SEARCH": cut.search, "WINDOW": sliding_window > 0, "G": G, "HEADS": cut.heads, "QUERIES": cut.queries,
            "ROWS": plan.rows, "KEYS": plan.keys, "SPLITS": plan.splits, "LEAST": plan.least, "SCAN": 128, "DV": DV,
            "DVP": dvp,
        }  # fmt: skip
        _attend[(cut.tiles, cut.groups, plan.splits)](
            q_THD, key_cache, value_cache, out_THD, sums, peaks, block_table, query_start_loc, seq_lens,
            q_THD if sinks is None else sinks, T, R, cut.fewest, cut.most,
            scale / soft_cap if cap else scale * LOG2_E, soft_cap * LOG2_E, v_scale, sliding_window,
            *q_THD.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3], *out_THD.stride()[:2],
            block_table.stride(0), SINKS=sinks is not None, CAP=cap, WIDE=interpreted, CODES=codes,
            NATIVE=has_fp8(q_THD.device), BLOCK=block_size, D=D, D1=d1, D2=d2, num_warps=plan.warps,
            num_stages=plan.stages, **common,
        )  # fmt: skip
        if cut.parts:
            columns = min(dvp, 128)
            _merge[(cut.tiles, cut.groups * (dvp // columns), cut.queries * cut.heads)](
                out_THD, sums, peaks, query_start_loc, seq_lens, R, cut.most, v_scale, sliding_window,
                *out_THD.stride()[:2], COLUMNS=columns, num_warps=1 if plan.splits <= 8 else 4, **common,
            )  # fmt: skip


def paged_attention_forms(num_tokens: int, num_reqs: int, max_model_len: int) -> list[tuple[int, int, int]]:
    """Splits double with the context up to their limit, which is highest for the fewest requests; 33 rows of two
    requests are more than a tile for few queries takes of each, whatever the heads."""
    contexts = sorted({min(256 << i, max_model_len) for i in range(MAX_SPLITS.bit_length())})
    rows = [(1, 1)] + [(min(num_tokens, 33), 2)] * (num_reqs > 1 and num_tokens > 1)
    return [(T, R, context) for T, R in rows for context in contexts]


def paged_attention_workspace(
    num_tokens: int, max_model_len: int, num_heads: int, num_kv_heads: int, head_size: int, dtype: torch.dtype
) -> int:
    G = num_heads // num_kv_heads
    rows = _few_rows(G, head_size)
    programs = num_kv_heads * -(-G // rows)
    # R requests have R * programs * splits of their sums kept, for up to 2 R tiles: PROGRAMS at most, where any are.
    parts = 2 * min(PROGRAMS, num_tokens * programs * MAX_SPLITS) if 2 * programs <= PROGRAMS else 0
    return parts * rows * (max(triton.next_power_of_2(head_size), 16) + 2) * 4
