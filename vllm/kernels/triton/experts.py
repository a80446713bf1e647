# SPDX-License-Identifier: Apache-2.0
"""SwiGLU experts of the rows that chose them, in five launches whose shapes follow from T, S and E alone.

Shape letters: T tokens (rows), S experts of a token, P = T * S pairs (row, slot), E experts, D model width, I an
expert's intermediate size, N output and K input features of one product.

1. ``_order``: the pairs of each expert, one expert's run after the other, in the pairs' own order within a run.
2. ``_cut``: tiles of at most ROWS pairs of one run each. The grids below have as many tiles as the worst routing
   needs; what is too many ends at once, so that a rank without rows does no work.
3. ``_product`` gated: h = silu(gate) * up of every pair, in the runs' order.
4. ``_product``: y = w2 h of every pair, back at the pair's own place.
5. ``_combine``: the weighted sum of a row's slots, in their order.

The kernels have been proven in Triton's interpreter and compiled for CUDA and XPU; no hardware has run them yet.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.quantized import QuantizedWeight
from vllm.kernels.triton.cards import shared_memory
from vllm.kernels.weights import PackedExperts


@triton.jit(do_not_specialize=["P"])
def _order(ids_ptr, order_ptr, starts_ptr, P, E, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """starts[e]: how many pairs chose an expert before e, for e = E any; e's pairs stand from order[starts[e]] on."""
    experts = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    lane = tl.arange(0, BLOCK)
    before = tl.full((BLOCK, EXPERTS), 0, tl.int32)
    for base in range(0, P, BLOCK):
        ids = tl.load(ids_ptr + base + lane, mask=base + lane < P, other=-1)
        tl.device_assert((ids >= -1) & (ids < E), "an expert id is outside [-1, E)")
        before += ((ids >= 0)[:, None] & (ids[:, None] < experts[None, :])).to(tl.int32)
    at = tl.sum(before, axis=0)
    tl.store(starts_ptr + experts, at, mask=experts <= E)
    for base in range(0, P, BLOCK):
        ids = tl.load(ids_ptr + base + lane, mask=base + lane < P, other=-1)
        mine = (ids[:, None] == experts[None, :]) & (experts < E)[None, :]
        passed = tl.cumsum(mine.to(tl.int32), axis=0)
        tl.store(order_ptr + at[None, :] + passed - 1, (base + lane)[:, None], mask=mine)
        at += tl.sum(mine.to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["num_tiles"])
def _cut(starts_ptr, tiles_ptr, num_tiles, E, ROWS: tl.constexpr, EXPERTS: tl.constexpr, TILES: tl.constexpr):
    """tiles[t] = (expert, first, end): up to ROWS places from first on, before end; expert -1: there is no tile t."""
    experts = tl.arange(0, EXPERTS)
    start = tl.load(starts_ptr + experts, mask=experts < E, other=0)
    end = tl.load(starts_ptr + experts + 1, mask=experts < E, other=0)
    needed = (end - start + ROWS - 1) // ROWS
    passed = tl.cumsum(needed, axis=0)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    done = passed[None, :] <= tile[:, None]
    expert = tl.sum(done.to(tl.int32), axis=1)
    some = expert < E
    nth = tile - tl.sum(tl.where(done, needed[None, :], 0), axis=1)
    first = tl.load(starts_ptr + expert, mask=some, other=0) + nth * ROWS
    last = tl.load(starts_ptr + expert + 1, mask=some, other=0)
    real = tile < num_tiles
    tl.store(tiles_ptr + 3 * tile, tl.where(some, expert, -1), mask=real)
    tl.store(tiles_ptr + 3 * tile + 1, first, mask=real)
    tl.store(tiles_ptr + 3 * tile + 2, last, mask=real)


@triton.jit
def glu(gate, up, CLAMPED: tl.constexpr):
    if CLAMPED:
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        y = gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    else:
        y = gate / (1.0 + tl.exp(-gate)) * up
    return y


@triton.jit
def turn(num_tiles, columns, GROUP: tl.constexpr):
    """(tile of rows, tile of columns) of a program. Tiles of a group take turns within a column: those of one expert
    run side by side and share its weights in cache."""
    program = tl.program_id(0)
    start = program // (GROUP * columns) * GROUP
    size = tl.minimum(num_tiles - start, GROUP)
    within = program % (GROUP * columns)
    return start + within % size, within // size


@triton.jit(do_not_specialize=["num_tiles"])
def _product(
    a_ptr,
    w_ptr,
    out_ptr,
    order_ptr,
    tiles_ptr,
    num_tiles,
    columns,
    S,
    N,
    K,
    stride_a,
    stride_we,
    stride_wn,
    half,
    bias_ptr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    WIDE: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One tile of rows by COLUMNS outputs. GATED: a is read at the pair's row and out written in the runs' order, and w
    is [gate; up], ``half`` apart; else the other way round. CLAMPED: gpt-oss's activation. WIDE: multiply in fp32;
    WHOLE: K is a multiple of DEPTH."""
    tile, column = turn(num_tiles, columns, GROUP)
    n = column * COLUMNS + tl.arange(0, COLUMNS)
    expert = tl.load(tiles_ptr + 3 * tile)
    if expert < 0:
        return
    place = tl.load(tiles_ptr + 3 * tile + 1) + tl.arange(0, ROWS)
    real = place < tl.load(tiles_ptr + 3 * tile + 2)
    pair = tl.load(order_ptr + place, mask=real, other=0)
    if GATED:
        source, target = pair // S, place
    else:
        source, target = place, pair
    k = tl.arange(0, DEPTH)
    a = a_ptr + source.to(tl.int64)[:, None] * stride_a + k[None, :]
    w = w_ptr + expert.to(tl.int64) * stride_we + tl.where(n < N, n, 0).to(tl.int64)[None, :] * stride_wn + k[:, None]
    total = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    total_up = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for begin in range(0, K, DEPTH):
        if WHOLE:
            rows = tl.load(a, mask=real[:, None], other=0.0)
            weights = tl.load(w)
        else:
            rest = k < K - begin
            rows = tl.load(a, mask=real[:, None] & rest[None, :], other=0.0)
            weights = tl.load(w, mask=rest[:, None], other=0.0)
        if WIDE:
            rows, weights = rows.to(tl.float32), weights.to(tl.float32)
        total = tl.dot(rows, weights, total, input_precision="ieee")
        if GATED:
            if WHOLE:
                weights = tl.load(w + half)
            else:
                weights = tl.load(w + half, mask=rest[:, None], other=0.0)
            if WIDE:
                weights = weights.to(tl.float32)
            total_up = tl.dot(rows, weights, total_up, input_precision="ieee")
        a += DEPTH
        w += DEPTH
    if bias_ptr is not None:
        bias = bias_ptr + expert.to(tl.int64) * (2 * N if GATED else N) + n
        total += tl.load(bias, mask=n < N, other=0.0)[None, :]
        if GATED:
            total_up += tl.load(bias + N, mask=n < N, other=0.0)[None, :]
    if GATED:
        total = glu(total, total_up, CLAMPED)
    out = out_ptr + target.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=real[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["T"])
def _combine(
    y_ptr,
    ids_ptr,
    weights_ptr,
    out_ptr,
    T,
    E,
    D,
    stride_out,
    S: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for s in range(S):
        pair = t * S + s
        ids = tl.load(ids_ptr + pair, mask=t < T, other=-1)
        real = (ids >= 0) & (ids < E)
        weight = tl.load(weights_ptr + pair, mask=real, other=0.0)
        y = tl.load(
            y_ptr + pair.to(tl.int64)[:, None] * D + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0
        )
        total += weight[:, None] * y.to(tl.float32)
    out = out_ptr + t.to(tl.int64)[:, None] * stride_out + d[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=(t < T)[:, None] & (d < D)[None, :])


class Tiles(NamedTuple):
    """What a program of ``_product`` computes: ``rows`` pairs by ``columns`` weight rows, ``depth`` of K at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def _tiles(T: int, S: int, E: int, dtype: torch.dtype, interpreted: bool) -> Tiles:
    """By the mean number of rows of an expert: few are bound by reading the weights, many by multiplying. float32 has
    one kind of tile only, and with it one order of every sum whatever T is. The interpreter is slow by the program and
    the step, hardly by the element."""
    if interpreted:
        return Tiles(16, 128, 64, 1, 1)
    if dtype is torch.float32:
        return Tiles(32, 64, 32, 4, 2)
    mean = T * S / E
    if mean <= 8:
        return Tiles(16, 64, 128, 4, 4)
    if mean <= 40:
        return Tiles(64, 128, 64, 4, 4)
    return Tiles(128, 256, 64, 8, 4)


def _order_block(P: int) -> int:
    """Of ``P`` pairs those that are ordered at a time."""
    return 512 if P <= 4096 else 4096


def fused_experts_forms(num_tokens: int, S: int, E: int, dtype: torch.dtype) -> list[int]:
    firsts: dict[tuple[Tiles, int], int] = {}
    for T in range(1, num_tokens + 1):
        firsts.setdefault((_tiles(T, S, E, dtype, triton.knobs.runtime.interpret), _order_block(T * S)), T)
    return list(firsts.values())


def checked(
    x_TD: Tensor,
    w13: PackedExperts | QuantizedWeight,
    w2: PackedExperts | QuantizedWeight,
    topk_ids_TS: Tensor,
    topk_weights_TS: Tensor,
    out: Tensor | None,
    b13: Tensor | None,
    b2: Tensor | None,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, weights, out), contiguous and made, of arguments that fit one another."""
    (T, D), dtype = x_TD.shape, x_TD.dtype
    S, E, I = topk_ids_TS.shape[1], w13.E, w2.K
    assert w13.gated and not w2.gated, f"w13 gated {w13.gated}, w2 gated {w2.gated}"  # noqa: PT018
    assert (w13.N, w13.K, w2.E, w2.N, w13.dtype, w2.dtype) == (2 * I, D, E, D, dtype, dtype), (
        f"x {x_TD.shape} {dtype}, w13 {(w13.E, w13.N, w13.K)} {w13.dtype}, w2 {(w2.E, w2.N, w2.K)} {w2.dtype}"
    )
    assert topk_ids_TS.shape == topk_weights_TS.shape == (T, S), f"{topk_ids_TS.shape}, {topk_weights_TS.shape}, T {T}"
    kinds = (topk_ids_TS.dtype, topk_weights_TS.dtype)
    assert kinds in ((torch.int32, torch.float32), (torch.int64, torch.float32)), f"ids and weights are {kinds}"
    if out is None:
        out = x_TD.new_empty(T, D)
    assert out.shape == (T, D), f"out is {out.shape}, needed {(T, D)}"
    assert out.dtype is dtype, f"out is {out.dtype}, x {dtype}"
    last = x_TD.stride(1), out.stride(1)
    assert last == (1, 1), f"last strides of x and out are {last}, needed 1"
    assert activation in ("silu", "swigluoai"), f"there is no activation {activation!r}"
    for bias, width in ((b13, 2 * I), (b2, D)):
        fits = bias is None or (bias.shape == (E, width) and bias.dtype is torch.float32 and bias.is_contiguous())
        assert fits, f"bias {None if bias is None else (bias.shape, bias.dtype)}, needed contiguous float32 {E, width}"
    return topk_ids_TS.contiguous(), topk_weights_TS.contiguous(), out


def arranged(ids: Tensor, E: int, rows: int) -> tuple[Tensor, Tensor, int]:
    """(order, tiles, number of tiles) of at most ``rows`` pairs of one expert each."""
    P = ids.numel()
    # Every expert with pairs has one tile that may not be full; the rest of the pairs fill theirs.
    num_tiles = min(P, E) + (P - min(P, E)) // rows
    order, starts, cut = (ids.new_empty(n, dtype=torch.int32) for n in (P, E + 1, 3 * num_tiles))
    together = triton.next_power_of_2(E + 1) if triton.knobs.runtime.interpret else 1
    _order[(triton.cdiv(E + 1, together),)](ids, order, starts, P, E, BLOCK=_order_block(P), EXPERTS=together)
    _cut[(triton.cdiv(num_tiles, 16),)](
        starts, cut, num_tiles, E, ROWS=rows, EXPERTS=triton.next_power_of_2(E), TILES=16
    )
    return order, cut, num_tiles


def combined(y: Tensor, ids: Tensor, weights: Tensor, out: Tensor, E: int) -> Tensor:
    """The weighted sum of each row's slots, y [P, D], into ``out``."""
    (T, S), D = ids.shape, y.shape[1]
    rows, columns = (16, 128) if triton.knobs.runtime.interpret else (1, min(1024, triton.next_power_of_2(D)))
    _combine[(triton.cdiv(T, rows), triton.cdiv(D, columns))](
        y, ids, weights, out, T, E, D, out.stride(0), S=S, ROWS=rows, COLUMNS=columns
    )
    return out


def fused_experts(
    x_TD: Tensor,
    w13: PackedExperts,
    w2: PackedExperts,
    topk_ids_TS: Tensor,
    topk_weights_TS: Tensor,
    out: Tensor | None = None,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """The operator for "plain" weights, contiguous in K. An id outside [-1, E) is skipped as -1 is (an assertion
    under TRITON_DEBUG=1): to look would be to wait for the device.

    The products h and y are rounded to x's dtype, what lies between in float32. A row's result is bitwise its own
    among calls that get the same tiles (``_tiles``: always in float32), and else within rounding.

    Raises:
        NotImplementedError: a dtype other than float32, bfloat16 and float16, weights in another order of memory.
    """
    (T, D), dtype = x_TD.shape, x_TD.dtype
    S, E, I = topk_ids_TS.shape[1], w13.E, w2.K
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise NotImplementedError(f"experts of {dtype}: the kernel knows float32, bfloat16 and float16")
    if (last := (w13.data.stride(-1), w2.data.stride(-1))) != (1, 1):
        raise NotImplementedError(f"weights of last strides {last}, needed 1: they are in another kernel's order")
    assert w13.kind == w2.kind == "plain", f"w13 is packed as {w13.kind}, w2 as {w2.kind}; needed plain"
    ids, weights, out = checked(x_TD, w13, w2, topk_ids_TS, topk_weights_TS, out, b13, b2, activation)
    P = T * S
    if not P * E:
        return out.zero_()
    interpreted = triton.knobs.runtime.interpret
    tiles = _tiles(T, S, E, dtype, interpreted)
    staged = (tiles.rows + tiles.columns) * tiles.depth * dtype.itemsize
    stages = max(2, min(tiles.stages, shared_memory(x_TD.device) // staged))
    order, cut, num_tiles = arranged(ids, E, tiles.rows)

    def product(a: Tensor, packed: PackedExperts, N: int, gated: bool, bias: Tensor | None) -> Tensor:
        result = a.new_empty(P, N)
        width = tiles.columns // (1 + gated)
        columns = triton.cdiv(N, width)
        w = packed.data
        _product[(num_tiles * columns,)](
            a, w, result, order, cut, num_tiles, columns, S, N, packed.K, a.stride(0), w.stride(0), w.stride(1),
            N * w.stride(1), bias, GATED=gated, CLAMPED=activation == "swigluoai", WIDE=interpreted,
            WHOLE=packed.K % tiles.depth == 0,
            ROWS=tiles.rows, COLUMNS=width, DEPTH=tiles.depth, GROUP=8, num_warps=tiles.warps, num_stages=stages,
        )  # fmt: skip
        return result

    y = product(product(x_TD, w13, I, True, b13), w2, D, False, b2)
    return combined(y, ids, weights, out, E)
