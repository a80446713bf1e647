# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding. It ran in Triton's interpreter, not yet on hardware."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.triton.rows import fits, refuse_other_dtypes, rows_of

_MOST_ELEMENTS = 32768  # that a program holds


@triton.jit
def _rotate(x, x1, heads, cos, sin, HALF: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    h, i = tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    live = (h < heads) & (i < HALF)
    at_a = x + h * x1 + (2 * i if PAIRS else i)
    at_b = at_a + (1 if PAIRS else HALF)
    a = tl.load(at_a, live, 0).to(tl.float32)
    b = tl.load(at_b, live, 0).to(tl.float32)
    tl.store(at_a, (a * cos - b * sin).to(x.dtype.element_ty), live)
    tl.store(at_b, (b * cos + a * sin).to(x.dtype.element_ty), live)


@triton.jit
def _rotary_kernel(
    positions, q, q0, q1, H, k, k0, k1, J, cos_sin,
    HALF: tl.constexpr, PAIRS: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    at = cos_sin + tl.load(positions + t).to(tl.int64) * (2 * HALF)
    i = tl.arange(0, BLOCK)[None, :]
    cos, sin = tl.load(at + i, i < HALF, 0), tl.load(at + HALF + i, i < HALF, 0)
    _rotate(q + t * q0, q1, H, cos, sin, HALF, PAIRS, Q_HEADS, BLOCK)
    _rotate(k + t * k0, k1, J, cos, sin, HALF, PAIRS, K_HEADS, BLOCK)


def rotary_embedding(
    positions_T: Tensor, q_THD: Tensor, k_TJD: Tensor, cos_sin_cache: Tensor, interleaved: bool = False
) -> None:
    refuse_other_dtypes(q_THD, k_TJD)
    T, H, q0, q1 = rows_of(q_THD)
    D, J, k0, k1 = q_THD.shape[-1], *rows_of(k_TJD)[1:]
    rot_dim = cos_sin_cache.shape[1]
    heads, block = triton.next_power_of_2(max(H, J)), triton.next_power_of_2(max(rot_dim // 2, 1))
    if heads * block > _MOST_ELEMENTS:
        raise NotImplementedError(f"{max(H, J)} heads with {rot_dim} elements to rotate, the most is {_MOST_ELEMENTS}")
    fits("q", q_THD, (T, H, D), q_THD.dtype)
    fits("k", k_TJD, (T, J, D), q_THD.dtype)
    fits("positions", positions_T, (T,), torch.int64)
    fits("cos_sin_cache", cos_sin_cache, (cos_sin_cache.shape[0], rot_dim), torch.float32)
    assert cos_sin_cache.is_contiguous(), f"cos_sin_cache has strides {cos_sin_cache.stride()}, needed contiguous rows"
    assert rot_dim in range(0, D + 1, 2), f"rot_dim is {rot_dim}, needed an even number up to the head size {D}"
    if T and rot_dim:
        _rotary_kernel[(T,)](
            positions_T, q_THD, q0, q1, H, k_TJD, k0, k1, J, cos_sin_cache,
            rot_dim // 2, interleaved, triton.next_power_of_2(H), triton.next_power_of_2(J), block,
        )  # fmt: skip
