# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: PT018
"""The gated delta net: convolution, and the recurrence with its gated norm; states updated in place by slot.

No line of this has run on hardware yet, only in Triton's interpreter.

Shape letters as in ``reference_gdn``. Requests are walked token after token, so a result depends neither on the batch
around a request nor on how its tokens are cut into steps; a prompt costs a pass per token, which chunked kernels save.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.weights import GDNWeights

_SEGMENT = 512  # rows of a request that one program convolves
_MOST_HEAD_SIZE = 256
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _request(starts, slots, r, num_slots):
    """(first row, number of rows, slot): no rows where the slot is the pad slot or none of the pool's."""
    first = tl.load(starts + r)
    slot = tl.load(slots + r).to(tl.int64)
    n = tl.load(starts + r + 1) - first
    return first.to(tl.int64), tl.where((slot > 0) & (slot < num_slots), n, 0), slot


@triton.jit(do_not_specialize=["num_slots"])
def _conv_kernel(
    x, x_stride, weight, state, starts, slots, num_slots, y, C,
    K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    first, n, slot = _request(starts, slots, tl.program_id(1), num_slots)
    begin = tl.program_id(2) * SEGMENT
    if begin < n:
        c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
        own = x + first * x_stride + c
        old = state + slot * (K - 1) * C + c  # row j is the input of K - 1 - j tokens before the first
        for t0 in range(begin, tl.minimum(begin + SEGMENT, n), BLOCK_T):
            t = t0 + tl.arange(0, BLOCK_T).to(tl.int64)[:, None]
            live = (t < n) & (c < C)
            sums = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
            for j in tl.static_range(K):
                i = t + (j - (K - 1))  # this tap's token, negative where it came in an earlier step
                now = tl.load(own + i * x_stride, live & (i >= 0), 0).to(tl.float32)
                before = tl.load(old + (i + K - 1) * C, live & (i < 0), 0).to(tl.float32)
                sums += tl.where(i >= 0, now, before) * tl.load(weight + j * C + c, c < C, 0)
            silu = sums / (1 + tl.exp(-sums))
            tl.store(y + (first + t) * C + c, silu.to(y.dtype.element_ty), live)
        if begin == 0:
            # Only this program reads these channels' old rows; all of it must have, before any of it writes.
            j = tl.arange(0, BLOCK_K).to(tl.int64)[:, None]
            i = j + n - (K - 1)
            live = (j < K - 1) & (c < C)
            now = tl.load(own + i * x_stride, live & (i >= 0), 0)
            before = tl.load(old + (i + K - 1) * C, live & (i < 0), 0)
            tl.debug_barrier()
            tl.store(old + j * C, tl.where(i >= 0, now, before), live)


@triton.jit(do_not_specialize=["num_slots"])
def _recurrent_kernel(
    y, x, x_stride, rate, dt_bias, norm, eps, state, starts, slots, num_slots, out, scale,
    G: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, WHOLE_E: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0)
    g = h // (H // G)
    C: tl.constexpr = 2 * G * D + H * E
    first, n, slot = _request(starts, slots, tl.program_id(1), num_slots)
    if n > 0:
        rate_h, bias_h = tl.load(rate + h), tl.load(dt_bias + h)
        d = tl.arange(0, BLOCK_D)
        # A few columns of the state at a time stay in registers while all tokens pass; v's place takes their output.
        for e0 in range(0, E, BLOCK_E):
            e = e0 + tl.arange(0, BLOCK_E)
            in_state = (d < D)[:, None] & (e < E)[None, :]
            place = state + (slot * H + h) * D * E + d[:, None] * E + e[None, :]
            S = tl.load(place, in_state, 0)
            for t in range(n):
                conv = y + (first + t) * C
                b = tl.load(x + (first + t) * x_stride + C + H * E + h).to(tl.float32)
                a = tl.load(x + (first + t) * x_stride + C + H * E + H + h).to(tl.float32) + bias_h
                q = tl.load(conv + g * D + d, d < D, 0)
                k = tl.load(conv + (G + g) * D + d, d < D, 0)
                v = tl.load(conv + 2 * G * D + h * E + e, e < E, 0)
                q *= scale / tl.sqrt(tl.sum(q * q) + 1e-6)
                k *= 1 / tl.sqrt(tl.sum(k * k) + 1e-6)
                softplus = tl.where(a > 20, a, tl.log(1 + tl.exp(tl.minimum(a, 20))))
                S *= tl.exp(-rate_h * softplus)
                delta = (v - tl.sum(k[:, None] * S, 0)) / (1 + tl.exp(-b))
                S += k[:, None] * delta[None, :]
                tl.store(conv + 2 * G * D + h * E + e, tl.sum(q[:, None] * S, 0), e < E)
            tl.store(place, S, in_state)
        tl.debug_barrier()
        e = tl.arange(0, WHOLE_E)
        norm_E = tl.load(norm + e, e < E, 0)
        for t in range(n):
            o = tl.load(y + (first + t) * C + 2 * G * D + h * E + e, e < E, 0)
            z = tl.load(x + (first + t) * x_stride + C + h * E + e, e < E, 0).to(tl.float32)
            o *= norm_E / tl.sqrt(tl.sum(o * o) / E + eps) * (z / (1 + tl.exp(-z)))
            tl.store(out + (first + t) * H * E + h * E + e, o.to(out.dtype.element_ty), e < E)


def causal_conv1d(
    x_TC: Tensor,
    weight_KC: Tensor,
    conv_state: Tensor,
    query_start_loc: Tensor,
    state_indices: Tensor,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """As the twin ``causal_conv1d_ref``, [T, C] of ``dtype``; rows of no request or of the pad slot are not written."""
    (T, C), (K, R), slots = x_TC.shape, (weight_KC.shape[0], state_indices.shape[0]), conv_state.shape[0]
    assert conv_state.shape == (slots, K - 1, C) and weight_KC.shape == (K, C), (
        f"x is {x_TC.shape}, taps {weight_KC.shape}, states {conv_state.shape}"
    )
    assert conv_state.dtype is x_TC.dtype, f"x is {x_TC.dtype}, its kept rows are {conv_state.dtype}"
    y = torch.empty(T, C, dtype=dtype, device=x_TC.device)
    BLOCK_C = min(triton.next_power_of_2(C), 256)
    BLOCK_T = 2 if T <= R else 8
    if T and R:
        _conv_kernel[triton.cdiv(C, BLOCK_C), R, triton.cdiv(T, _SEGMENT)](
            x_TC, x_TC.stride(0), weight_KC, conv_state, query_start_loc, state_indices, slots, y, C,
            K, triton.next_power_of_2(max(K - 1, 1)), BLOCK_T, BLOCK_C, _SEGMENT,
        )  # fmt: skip
    return y


def gated_delta_net(
    x_TN: Tensor,
    weights: GDNWeights,
    conv_state: Tensor,
    recurrent_state: Tensor,
    query_start_loc: Tensor,
    state_indices: Tensor,
    query_start_loc_cpu: Tensor | None = None,
) -> Tensor:
    """The operator of this name; the host's copy of query_start_loc is not looked at.

    A slot outside [0, S) counts as the pad slot: rows 0, no state read or written.
    """
    G, H, D, E = weights.num_k_heads, weights.num_v_heads, weights.head_k_dim, weights.head_v_dim
    if max(D, E) > _MOST_HEAD_SIZE or x_TN.dtype not in _DTYPES:
        raise NotImplementedError(
            f"gated delta net with head sizes {D} and {E} in {x_TN.dtype}: the Triton kernel takes sizes up to "
            f"{_MOST_HEAD_SIZE} and {[str(dtype) for dtype in _DTYPES]}"
        )
    T, R, slots = x_TN.shape[0], state_indices.shape[0], conv_state.shape[0]
    assert x_TN.shape[1] == weights.conv_dim + H * E + 2 * H and x_TN.stride(1) == 1, (
        f"x is {x_TN.shape} {x_TN.stride()}, needed [T, {weights.conv_dim + H * E + 2 * H}]"
    )
    assert recurrent_state.shape == (slots, H, D, E) and recurrent_state.dtype is torch.float32, (
        f"states are {recurrent_state.shape} {recurrent_state.dtype}, needed {(slots, H, D, E)} float32"
    )
    if not recurrent_state.is_contiguous():
        raise NotImplementedError(f"states of strides {recurrent_state.stride()}: another kernel's order of memory")
    assert conv_state.is_contiguous(), f"kept rows of strides {conv_state.stride()}"
    assert query_start_loc.shape == (R + 1,), f"{R} slots for {query_start_loc.shape[0]} starts"
    out = x_TN.new_zeros(T, H * E)
    y = causal_conv1d(x_TN[:, : weights.conv_dim], weights.conv_weight_KC, conv_state, query_start_loc, state_indices)
    if T and R:
        BLOCK_D, WHOLE_E = triton.next_power_of_2(D), triton.next_power_of_2(E)
        _recurrent_kernel[H, R](
            y, x_TN, x_TN.stride(0), weights.decay_rate_H, weights.dt_bias_H, weights.norm_weight_E, weights.eps,
            recurrent_state, query_start_loc, state_indices, slots, out, D**-0.5, G, H, D, E,
            BLOCK_D, min(WHOLE_E, 4096 // BLOCK_D), WHOLE_E,
        )  # fmt: skip
    return out
