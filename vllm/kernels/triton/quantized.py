# SPDX-License-Identifier: Apache-2.0
"""Products with weights that stay quantised: codes become values in registers, a tile at a time.

Letters as in ``experts``; G columns share a scale. A step of the sums lies within one group, so the codes' values,
which a 16-bit operand holds exactly, are multiplied and the group's scale is applied to the float32 sum: nothing is
rounded before the result. Rounded activations ("int8", "fp8") are made by a launch of their own, once a row; integers
are multiplied as such, fp8 where the card has the product, and else the same numbers in 16 bits. Of GGUF's blocks, read
as they are, a step has one scale, and one minimum, which the sum of the inputs is multiplied with.

It ran in Triton's interpreter and was compiled for CUDA; no hardware has run it yet.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.blocks import UNITS
from vllm.kernels.quantized import FORMATS, QuantizedWeight
from vllm.kernels.triton import experts
from vllm.kernels.triton.cards import has_fp8, shared_memory
from vllm.kernels.triton.experts import Tiles, glu, turn
from vllm.kernels.triton.rows import DTYPES, fits, refuse_other_dtypes, tile

KNOWN = ("int4", "int8", "fp8", "mxfp4", *UNITS)


@triton.jit
def _e2m1(code):
    """Twice the number, an integer from -12 to 12."""
    twice = (0xC8643210 >> ((code & 7).to(tl.uint32) * 4)).to(tl.int32) & 15
    return tl.where(code >= 8, -twice, twice).to(tl.int8)


@triton.jit
def e4m3(code, NATIVE: tl.constexpr):
    if NATIVE:
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:  # sign, exponent and mantissa stand at float16's places; the exponents' biases differ by 8
        half = ((code & 0x80).to(tl.uint16) << 8) | ((code & 0x7F).to(tl.uint16) << 7)
        value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        value = tl.where((code & 0x7F) == 0x7F, float("nan"), value)
    return value


@triton.jit
def _unpacked(codes, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """uint8 [rows, bytes] -> values [rows, columns], of mxfp4 twice the values: int8, or float32 of fp8."""
    if FORMAT == "int8":
        values = codes.to(tl.int8, bitcast=True)
    elif FORMAT == "fp8":
        values = e4m3(codes, NATIVE)
    else:
        values = tl.interleave(codes & 15, codes >> 4)
        if FORMAT == "mxfp4":
            values = _e2m1(values)
        else:
            values = values.to(tl.int8)
    return values


@triton.jit
def _half(at):
    """float16 numbers, which may lie anywhere."""
    bits = tl.load(at).to(tl.uint16) | (tl.load(at + 1).to(tl.uint16) << 8)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _line_of_blocks(row, k, FORMAT: tl.constexpr, BLOCK: tl.constexpr, BYTES: tl.constexpr):
    """(scales, minima) of columns k of rows that begin at ``row``, as ``kernels.blocks`` has them."""
    block = row + k // BLOCK * BYTES
    part = k % BLOCK
    if FORMAT == "q6_k":
        scale = _half(block + 208) * tl.load(block + 192 + part // 16).to(tl.int8, bitcast=True).to(tl.float32)
        least = scale * 0
    elif BLOCK == 256:
        at = block + 4 + part // 32 % 4
        low, high, both = tl.load(at), tl.load(at + 4), tl.load(at + 8)
        first = part < 128
        factor = tl.where(first, low & 63, (both & 15) | (low >> 6 << 4)).to(tl.float32)
        minimum = tl.where(first, high & 63, (both >> 4) | (high >> 6 << 4)).to(tl.float32)
        scale, least = _half(block) * factor, _half(block + 2) * minimum
    else:
        scale = _half(block)
        if FORMAT == "q5_0":
            least = scale * 0
        else:
            least = -_half(block + 2)
    return scale, least


@triton.jit
def _codes_of_blocks(row, k, FORMAT: tl.constexpr, BLOCK: tl.constexpr, BYTES: tl.constexpr):
    """As above: the codes, less what stands for 0, int32."""
    block = row + k // BLOCK * BYTES
    part = k % BLOCK
    if FORMAT == "q6_k":
        at = part % 128
        low = tl.load(block + part // 128 * 64 + at % 64).to(tl.int32) >> (at // 64 * 4)
        high = tl.load(block + 128 + part // 128 * 32 + at % 32).to(tl.int32) >> (at // 32 * 2)
        code = (low & 15 | (high & 3) << 4) - 32
    elif BLOCK == 256:
        code = tl.load(block + BYTES - 128 + part // 64 * 32 + part % 32).to(tl.int32) >> (part // 32 % 2 * 4) & 15
        if FORMAT == "q5_k":
            code |= (tl.load(block + 16 + part % 32).to(tl.int32) >> (part // 32) & 1) << 4
    else:
        code = tl.load(block + BYTES - 16 + part % 16).to(tl.int32) >> (part // 16 * 4) & 15
        if FORMAT != "q4_1":
            code |= (tl.load(block + BYTES - 20 + part // 8).to(tl.int32) >> (part % 8) & 1) << 4
        if FORMAT == "q5_0":
            code -= 16
    return code


@triton.jit
def _times_blocks(
    rows,
    codes,
    begin,
    FORMAT: tl.constexpr,
    OPERAND: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BYTES: tl.constexpr,
):
    """As ``_times``, of rows of blocks that begin at ``codes`` the columns from ``begin`` on, which have one scale."""
    k = begin + tl.arange(0, DEPTH)
    values = _codes_of_blocks(codes[:, None], k[None, :], FORMAT, BLOCK, BYTES).to(tl.float32).to(OPERAND)
    scale, least = _line_of_blocks(codes, begin, FORMAT, BLOCK, BYTES)
    product = tl.dot(rows, tl.trans(values), input_precision="ieee").to(tl.float32) * scale[None, :]
    if not (FORMAT == "q6_k" or FORMAT == "q5_0"):  # noqa: PLR1714
        product -= tl.sum(rows.to(tl.float32), axis=1)[:, None] * least[None, :]
    return product


@triton.jit
def _times(
    rows,
    codes,
    scales,
    zeros,
    rest,
    FORMAT: tl.constexpr,
    ZERO: tl.constexpr,
    PRODUCT: tl.constexpr,
    OPERAND: tl.constexpr,
    NATIVE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """[ROWS, DEPTH] times the columns of one group: codes' addresses [COLUMNS, bytes], ``rest`` of which are real."""
    if WHOLE:
        packed = tl.load(codes)
    else:
        packed = tl.load(codes, mask=rest, other=0)
    if PRODUCT == "fp8":
        values = packed.to(tl.float8e4nv, bitcast=True)
    else:
        values = _unpacked(packed, FORMAT, NATIVE)
        if zeros is not None:
            values = values.to(tl.int32) - tl.load(zeros).to(tl.int32)[:, None]
        elif ZERO != 0:
            values = values - ZERO
        if PRODUCT != "int8":
            values = values.to(tl.float32).to(OPERAND)
        else:
            values = values.to(tl.int8)
    product = tl.dot(rows, tl.trans(values), input_precision="ieee")
    return product.to(tl.float32) * tl.load(scales).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["T", "num_tiles"])
def _product(
    a_ptr,
    a_scale_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    order_ptr,
    tiles_ptr,
    T,
    num_tiles,
    columns,
    S,
    N,
    K,
    G,
    stride_a,
    stride_ce,
    stride_cn,
    stride_se,
    stride_sn,
    stride_sg,
    stride_ze,
    stride_zn,
    stride_zg,
    stride_out,
    GROUPED: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    FORMAT: tl.constexpr,
    ZERO: tl.constexpr,
    PER_BYTE: tl.constexpr,
    PRODUCT: tl.constexpr,
    OPERAND: tl.constexpr,
    NATIVE: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    BYTES: tl.constexpr,
):
    """One tile of rows by COLUMNS outputs. GROUPED: of the expert's rows that ``experts`` arranged, where GATED says as
    there which of a and out are in the runs' order. Else of rows side by side, [T, K] times one matrix."""
    tile, column = turn(num_tiles, columns, GROUP)
    n = column * COLUMNS + tl.arange(0, COLUMNS)
    if GROUPED:
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
        expert = expert.to(tl.int64)
        codes_ptr += expert * stride_ce
        if scales_ptr is not None:
            scales_ptr += expert * stride_se
        if zeros_ptr is not None:
            zeros_ptr += expert * stride_ze
        if bias_ptr is not None:
            bias_ptr += expert * (2 * N if GATED else N)
    else:
        source = tile * ROWS + tl.arange(0, ROWS)
        target = source
        real = source < T
    k = tl.arange(0, DEPTH)
    a = a_ptr + source.to(tl.int64)[:, None] * stride_a + k[None, :]
    row = tl.where(n < N, n, 0).to(tl.int64)
    byte = tl.arange(0, DEPTH // PER_BYTE)
    of_row = codes_ptr + row * stride_cn
    codes = of_row[:, None] + byte[None, :]
    scales = None if scales_ptr is None else scales_ptr + row * stride_sn
    zeros = None if zeros_ptr is None else zeros_ptr + row * stride_zn
    zeros_up = None if zeros_ptr is None else zeros + N * stride_zn
    total = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    total_up = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for begin in range(0, K, DEPTH):
        if WHOLE:
            rows = tl.load(a, mask=real[:, None], other=0.0)
        else:
            rows = tl.load(a, mask=real[:, None] & (k < K - begin)[None, :], other=0.0)
        rest = (byte * PER_BYTE < K - begin)[None, :]
        if PRODUCT == "values":
            rows = rows.to(tl.float32).to(OPERAND)
        if BLOCK > 0:
            total += _times_blocks(rows, of_row, begin, FORMAT, OPERAND, DEPTH, BLOCK, BYTES)
            if GATED:
                total_up += _times_blocks(rows, of_row + N * stride_cn, begin, FORMAT, OPERAND, DEPTH, BLOCK, BYTES)
        else:
            group = begin // G
            at = group * stride_sg
            of = None if zeros_ptr is None else zeros + group * stride_zg
            total += _times(rows, codes, scales + at, of, rest, FORMAT, ZERO, PRODUCT, OPERAND, NATIVE, WHOLE)
            if GATED:
                up, at = codes + N * stride_cn, at + N * stride_sn
                of = None if zeros_ptr is None else zeros_up + group * stride_zg
                total_up += _times(rows, up, scales + at, of, rest, FORMAT, ZERO, PRODUCT, OPERAND, NATIVE, WHOLE)
        a += DEPTH
        codes += DEPTH // PER_BYTE
    unit = tl.full((ROWS,), 0.5 if FORMAT == "mxfp4" else 1.0, tl.float32)
    if a_scale_ptr is not None:
        unit *= tl.load(a_scale_ptr + source, mask=real, other=0.0)
    total *= unit[:, None]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + row).to(tl.float32)[None, :]
    if GATED:
        total_up *= unit[:, None]
        if bias_ptr is not None:
            total_up += tl.load(bias_ptr + N + row).to(tl.float32)[None, :]
        total = glu(total, total_up, CLAMPED)
    out = out_ptr + target.to(tl.int64)[:, None] * stride_out + n[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=real[:, None] & (n < N)[None, :])


@triton.jit
def _whole(x):
    """The nearest whole number, of two the even one: below 2 ** 22, float32 has no place for more beside this."""
    return (x + 12582912.0) - 12582912.0


@triton.jit(do_not_specialize=["T"])
def _round_kernel(
    x, out, scales, T, K, x0, MOST: tl.constexpr, FP8: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live, column = t < T, tl.arange(0, WIDTH)
    most = tl.full((ROWS,), 1e-12, tl.float32)
    strange = tl.full((ROWS,), 0.0, tl.float32)  # NaN for a row that holds a NaN or an infinity, which ``max`` skips
    for begin in range(0, K, WIDTH):
        some = live[:, None] & (begin + column < K)[None, :]
        values = tl.load(x + t[:, None] * x0 + begin + column[None, :], some, 0).to(tl.float32)
        most = tl.maximum(most, tl.max(tl.abs(values), axis=1))
        strange += tl.sum(values * 0.0, axis=1)
    scale = tl.div_rn(most, tl.full((ROWS,), MOST, tl.float32)) + strange
    tl.store(scales + t, scale, live)
    scale = tl.where(strange == 0.0, scale, 1.0)
    for begin in range(0, K, WIDTH):
        some = live[:, None] & (begin + column < K)[None, :]
        values = tl.load(x + t[:, None] * x0 + begin + column[None, :], some, 0).to(tl.float32)
        values = tl.where((strange == 0.0)[:, None], values, 0.0)
        values = tl.div_rn(values, tl.broadcast_to(scale[:, None], (ROWS, WIDTH)))
        if FP8:  # steps of an eighth of the power of two below, none finer than those of the subnormal numbers
            power = (values.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
            step = tl.maximum(power * 0.125, 0.001953125)
            values = _whole(values / step) * step
        else:
            values = _whole(values)
        tl.store(out + t[:, None] * K + begin + column[None, :], values.to(out.dtype.element_ty), some)


@triton.jit(do_not_specialize=["T", "first", "last"])
def _rows_kernel(
    ids,
    codes,
    scales,
    zeros,
    out,
    T,
    K,
    G,
    first,
    last,
    c0,
    s0,
    s1,
    z0,
    z1,
    FORMAT: tl.constexpr,
    ZERO: tl.constexpr,
    PER_BYTE: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BYTES: tl.constexpr,
):
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    live = (t < T) & (k < K)
    row = tl.load(ids + t, t < T, 0).to(tl.int64)
    held = live & (row >= first) & (row < last)
    row = tl.where(held, row - first, 0)
    if BLOCK > 0:
        column = tl.where(k < K, k, 0)
        scale, least = _line_of_blocks(codes + row * c0, column, FORMAT, BLOCK, BYTES)
        values = _codes_of_blocks(codes + row * c0, column, FORMAT, BLOCK, BYTES).to(tl.float32) * scale - least
    else:
        if PER_BYTE == 1:
            values = _unpacked(tl.load(codes + row * c0 + k, held, 0), FORMAT, NATIVE).to(tl.float32)
        else:
            code = (tl.load(codes + row * c0 + k // 2, held, 0) >> (k % 2 * 4).to(tl.uint8)) & 15
            values = _e2m1(code).to(tl.float32) * 0.5 if FORMAT == "mxfp4" else code.to(tl.float32)
        zero = ZERO if zeros is None else tl.load(zeros + row * z0 + k // G * z1, held, 0).to(tl.float32)
        values = (values - zero) * tl.load(scales + row * s0 + k // G * s1, held, 0).to(tl.float32)
    tl.store(out + t * K + k, tl.where(held, values, 0.0).to(out.dtype.element_ty), live)


def _refuse(weight: QuantizedWeight) -> None:
    """
    Raises:
        NotImplementedError: a weight that no kernel here reads.
    """
    G, K = weight.group_size, weight.K
    if weight.kind != "plain" or weight.format not in KNOWN:
        raise NotImplementedError(f"{weight.kind} {weight.format}: the kernels read plain {', '.join(KNOWN)}")
    if G < K and G % 16:
        raise NotImplementedError(f"groups of {G} columns: the kernels need multiples of 16, or one for all {K}")
    packed = FORMATS[weight.format]
    assert (weight.scales is not None) == packed.scaled, f"{weight.format}, scales {weight.scales}"
    refuse_other_dtypes(*([] if weight.scales is None else [weight.scales]), torch.empty(0, dtype=weight.dtype))
    if weight.codes.stride(-1) != 1:
        raise NotImplementedError(f"codes of strides {weight.codes.stride()}: those of a row must be neighbours")
    if not packed.scaled and (weight.activations is not None or K % packed.columns):
        raise NotImplementedError(f"{weight.format} of {K} columns for inputs rounded to {weight.activations}")
    some = weight.codes.shape[:-2]
    needed = (*some, weight.N, -(-K // packed.columns) * packed.bytes), (*some, weight.N, -(-K // G))
    found = weight.codes.shape, needed[1] if weight.scales is None else weight.scales.shape
    assert found == needed, f"{found}: {needed}"
    if weight.zeros is not None:
        assert weight.zeros.shape == needed[1], f"zeros are {weight.zeros.shape}, scales {needed[1]}"
        if weight.format not in ("int4", "int8"):
            raise NotImplementedError(f"{weight.format} with zeros")


def _depth(weight: QuantizedWeight, most: int) -> int:
    """Columns of a step: of one scale."""
    if not FORMATS[weight.format].scaled:
        return min(most, 16 if weight.format == "q6_k" else 32)
    return most if weight.group_size >= weight.K else min(most, weight.group_size & -weight.group_size)


def _tiles(weight: QuantizedWeight, mean: float, few: int, interpreted: bool) -> Tiles:
    """By the rows of a matrix: few are bound by reading it, many by multiplying."""
    if interpreted:
        return Tiles(16, 128, _depth(weight, 64), 1, 1)
    if weight.dtype is torch.float32:
        return Tiles(32, 64, _depth(weight, 32), 4, 2)
    if mean <= few:
        return Tiles(16, 32, _depth(weight, 128), 4, 4)
    if mean <= 40:
        return Tiles(64, 64, _depth(weight, 64), 4, 3)
    return Tiles(128, 128, _depth(weight, 64), 8, 3)


def _block(weight: QuantizedWeight) -> dict[str, int]:
    packed = FORMATS[weight.format]
    return {"BLOCK": 0, "BYTES": 0} if packed.scaled else {"BLOCK": packed.columns, "BYTES": packed.bytes}


def _rounded(x_TK: Tensor, to: str | None, native: bool) -> tuple[Tensor, Tensor | None]:
    """(x on each row's grid, the grids' scales [T]); x itself, and None, where nothing is rounded."""
    if to is None:
        return x_TK, None
    T, K = x_TK.shape
    dtype = torch.int8 if to == "int8" else torch.float8_e4m3fn if native else x_TK.dtype
    out, scales = x_TK.new_empty(T, K, dtype=dtype), x_TK.new_empty(T, dtype=torch.float32)
    shape = tile(K, 1024)
    most = 127.0 if to == "int8" else 448.0
    _round_kernel[(triton.cdiv(T, shape["ROWS"]),)](
        x_TK, out, scales, T, K, x_TK.stride(0), MOST=most, FP8=to == "fp8",
        ROWS=shape["ROWS"], WIDTH=shape["COLUMNS"], num_warps=shape["num_warps"],
    )  # fmt: skip
    return out, scales


def _multiply(
    x_TK: Tensor,
    weight: QuantizedWeight,
    out: Tensor,
    tiles: Tiles,
    bias_N: Tensor | None = None,
    grouped: tuple[Tensor, Tensor, int, int] | None = None,
    clamped: bool = False,
) -> Tensor:
    """x times the weight into ``out``; ``grouped``: (order, cut, tiles, S) of ``experts``, whose biases are [E, N]."""
    N, K, gated = out.shape[1], weight.K, weight.gated
    interpreted = triton.knobs.runtime.interpret
    if weight.input_order is not None:
        x_TK = x_TK.index_select(1, weight.input_order)
    native = has_fp8(x_TK.device)
    matrix_of_fp8 = native and weight.format == weight.activations == "fp8" and tiles.depth >= 32
    a, a_scales = _rounded(x_TK, weight.activations, matrix_of_fp8)
    matrix_of_ints = weight.activations == "int8" and weight.zeros is None and weight.format != "fp8"
    kind = "fp8" if matrix_of_fp8 else "int8" if matrix_of_ints and tiles.depth >= 32 else "values"
    wide = interpreted or x_TK.dtype is torch.float32
    operand = tl.float32 if wide else tl.bfloat16 if x_TK.dtype is torch.bfloat16 else tl.float16
    scales, zeros = weight.scales, weight.zeros
    packed = FORMATS[weight.format]
    width = tiles.columns if tiles.columns <= 32 else tiles.columns // (1 + gated)
    staged = tiles.rows * tiles.depth * a.element_size() + width * (1 + gated) * tiles.depth // packed.columns
    decoded = width * (1 + gated) * tiles.depth * max(a.element_size(), 2)
    stages = max(2, min(tiles.stages, (shared_memory(x_TK.device) - decoded) // staged))
    columns = triton.cdiv(N, width)
    order, cut, num_tiles, S = grouped or (None, None, triton.cdiv(len(x_TK), tiles.rows), 1)

    def strides(x: Tensor | None) -> tuple[int, int, int]:
        return (0, 0, 0) if x is None else (x.stride(0) if x.dim() == 3 else 0, x.stride(-2), x.stride(-1))

    _product[(num_tiles * columns,)](
        a, a_scales, weight.codes, scales, zeros, bias_N, out, order, cut, len(x_TK), num_tiles, columns, S, N, K,
        weight.group_size, a.stride(0), *strides(weight.codes)[:2], *strides(scales), *strides(zeros), out.stride(0),
        GROUPED=grouped is not None, GATED=gated, CLAMPED=clamped, FORMAT=weight.format, ZERO=packed.zero,
        PER_BYTE=packed.columns if packed.scaled else 1, PRODUCT=kind, OPERAND=operand, NATIVE=native,
        WHOLE=K % tiles.depth == 0, ROWS=tiles.rows, COLUMNS=width, DEPTH=tiles.depth, GROUP=8, **_block(weight),
        num_warps=tiles.warps, num_stages=stages,
    )  # fmt: skip
    return out


def quantized_linear_forms(num_tokens: int) -> list[int]:
    """The first of each kind of ``_tiles``."""
    return [T for T in (1, 17, 41) if num_tokens >= T]


def quantized_linear(
    x_TK: Tensor, weight: QuantizedWeight, bias_N: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """The operator for plain weights in the formats ``KNOWN``, in groups of a multiple of 16 columns or of all."""
    _refuse(weight)
    T, N = x_TK.shape[0], weight.N
    fits("x", x_TK, (T, weight.K), weight.dtype)
    out = x_TK.new_empty(T, N) if out is None else out
    fits("out", out, (T, N), weight.dtype, torch.float32)
    if bias_N is not None:
        fits("bias", bias_N, (N,), *DTYPES)
    if T and N:
        _multiply(x_TK, weight, out, _tiles(weight, T, 16, triton.knobs.runtime.interpret), bias_N)
    return out


def quantized_experts(
    x_TD: Tensor,
    w13: QuantizedWeight,
    w2: QuantizedWeight,
    topk_ids_TS: Tensor,
    topk_weights_TS: Tensor,
    out: Tensor | None = None,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """The operator for what ``quantized_linear`` takes; ids and rows as in ``experts.fused_experts``."""
    for weight in (w13, w2):
        _refuse(weight)
    ids, weights, out = experts.checked(x_TD, w13, w2, topk_ids_TS, topk_weights_TS, out, b13, b2, activation)
    S, E, P = ids.shape[1], w13.E, ids.numel()
    if not P * E:
        return out.zero_()
    tiles = _tiles(w13, P / E, 8, triton.knobs.runtime.interpret)
    tiles_2 = _tiles(w2, P / E, 8, triton.knobs.runtime.interpret)
    order, cut, num_tiles = experts.arranged(ids, E, tiles.rows)
    grouped = order, cut, num_tiles, S
    if w2.input_order is not None:
        raise NotImplementedError("experts whose w2 has its columns in an order of their own")
    h = x_TD.new_empty(P, w2.K)
    if w13.input_order is None:
        _multiply(x_TD, w13, h, tiles, b13, grouped, activation == "swigluoai")
    else:  # each pair of a token and an expert has a row of its own
        x_PD = x_TD.repeat_interleave(S, 0).gather(1, w13.input_order[ids.flatten().clamp(min=0)])
        plain = dataclasses.replace(w13, input_order=None)
        _multiply(x_PD, plain, h, tiles, b13, (order, cut, num_tiles, 1), activation == "swigluoai")
    y = _multiply(h, w2, x_TD.new_empty(P, w2.N), tiles_2, b2, grouped)
    return experts.combined(y, ids, weights, out, E)


def quantized_embedding(ids_T: Tensor, weight: QuantizedWeight, vocab_range: tuple[int, int] | None = None) -> Tensor:
    _refuse(weight)
    if weight.input_order is not None:
        raise NotImplementedError("rows of a matrix whose columns are in the order of the inputs")
    (T,), scales, zeros = ids_T.shape, weight.scales, weight.zeros
    first, last = (0, weight.N) if vocab_range is None else vocab_range
    assert 0 <= last - first <= weight.N, f"ids from {first} to {last} do not fit {weight.N} rows"
    fits("ids", ids_T, (T,), torch.int64, torch.int32)
    out = torch.empty(T, weight.K, dtype=weight.dtype, device=weight.codes.device)
    if T:
        shape: dict[str, Any] = tile(weight.K, 2048)
        grid = (triton.cdiv(T, shape["ROWS"]), triton.cdiv(weight.K, shape["COLUMNS"]))
        of_zeros = (0, 0) if zeros is None else zeros.stride()
        of_scales = (0, 0) if scales is None else scales.stride()
        _rows_kernel[grid](
            ids_T, weight.codes, scales, zeros, out, T, weight.K, weight.group_size, first, last,
            weight.codes.stride(0), *of_scales, *of_zeros, FORMAT=weight.format,
            ZERO=FORMATS[weight.format].zero, PER_BYTE=FORMATS[weight.format].columns, NATIVE=has_fp8(out.device),
            **_block(weight), **shape,
        )  # fmt: skip
    return out
