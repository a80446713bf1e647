# SPDX-License-Identifier: Apache-2.0
"""The writes of new keys and values into the paged cache, and of zeros into pad rows.

They ran in Triton's interpreter, not yet on hardware."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.triton.rows import fits, rows_of

_MOST_ELEMENTS = 32768  # that a program holds


@triton.jit
def _codes(x, scale):
    """e4m3 of ``x / scale``: the nearest, of two the even one, at most 448 in size; a NaN stays one."""
    x = tl.div_rn(x.to(tl.float32), scale)
    bits = x.to(tl.uint32, bitcast=True)
    sign, size = (bits >> 24) & 0x80, (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    size = tl.where(size > 448.0, 448.0, size)
    bits = size.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # the exponents' biases differ by 120
    small = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000  # whole 2^-9, e4m3's least
    code = tl.where(x != x, 0x7F, tl.where(size < 0.015625, small, normal))  # noqa: PLR0124  a NaN
    return (code | sign).to(tl.uint8)


@triton.jit
def _write_kernel(
    k, k0, k1, v, v0, v1, keys, keys0, keys1, keys2, values, values0, values1, values2, slots, block_size, J, D,
    k_scale, v_scale, VALUES: tl.constexpr, CODES: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + t).to(tl.int64)
    if slot >= 0:
        block, offset = slot // block_size, slot % block_size
        j, d = tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
        live = (j < J) & (d < D)
        key = tl.load(k + t * k0 + j * k1 + d, live)
        if CODES:
            key = _codes(key, k_scale)
        tl.store(keys + block * keys0 + j * keys1 + offset * keys2 + d, key, live)
        if VALUES:
            value = tl.load(v + t * v0 + j * v1 + d, live)
            if CODES:
                value = _codes(value, v_scale)
            tl.store(values + block * values0 + j * values1 + offset * values2 + d, value, live)


def reshape_and_cache(
    k_TJD: Tensor,
    v_TJD: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor | None,
    slot_mapping_T: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    T, J, D = shape = k_TJD.shape
    dtype, block_size = k_TJD.dtype, key_cache.shape[2]
    heads, block = triton.next_power_of_2(J), triton.next_power_of_2(D)
    if heads * block > _MOST_ELEMENTS:
        raise NotImplementedError(f"{J} heads of size {D}, the most is {_MOST_ELEMENTS} elements")
    fits("k", k_TJD, shape, dtype)
    codes = key_cache.dtype is torch.float8_e4m3fn
    if codes:
        key_cache = key_cache.view(torch.uint8)
        value_cache = None if value_cache is None else value_cache.view(torch.uint8)
    v, values = (k_TJD, key_cache) if v_TJD is None or value_cache is None else (v_TJD, value_cache)
    fits("v", v, shape, dtype)
    for cache in (key_cache, values):
        fits("a cache", cache, (key_cache.shape[0], J, block_size, D), torch.uint8 if codes else dtype)
    fits("slot_mapping", slot_mapping_T, (T,), torch.int64)
    if T:
        _write_kernel[(T,)](
            k_TJD, *rows_of(k_TJD)[2:], v, *rows_of(v)[2:], key_cache, *key_cache.stride()[:3],
            values, *values.stride()[:3], slot_mapping_T, block_size, J, D, k_scale, v_scale, v is v_TJD, codes, heads,
            block,
        )  # fmt: skip


@triton.jit
def _zero_kernel(x, x0, slots, D, COLUMNS: tl.constexpr):
    t, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if tl.load(slots + t) < 0:
        tl.store(x + t * x0 + d, tl.zeros([COLUMNS], x.dtype.element_ty), d < D)


def zero_padding_rows(x: Tensor, slot_mapping_T: Tensor) -> None:
    rows = x if x.dim() == 2 else x.flatten(1)
    assert rows.data_ptr() == x.data_ptr(), f"rows have strides {x.stride()}, needed contiguous ones"
    T, D = rows.shape
    fits("x", rows, (T, D), x.dtype)
    fits("slot_mapping", slot_mapping_T, (T,), torch.int64)
    if T and D:
        columns = min(triton.next_power_of_2(D), 1024)
        _zero_kernel[(T, triton.cdiv(D, columns))](rows, rows.stride(0), slot_mapping_T, D, columns)
