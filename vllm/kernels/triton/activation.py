# SPDX-License-Identifier: Apache-2.0
"""Gated activation. It ran in Triton's interpreter, not yet on hardware."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.triton.rows import fits, refuse_other_dtypes, rows_of, tile


@triton.jit(do_not_specialize=["T"])
def _gated_kernel(x, x0, out, o0, T, D, GELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    live = (t < T) & (d < D)
    gate = tl.load(x + t * x0 + d, live, 0).to(tl.float32)
    up = tl.load(x + t * x0 + D + d, live, 0).to(tl.float32)
    # gelu by tanh is x / 2 (1 + tanh(u / 2)) = x sigmoid(u)
    u = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    tl.store(out + t * o0 + d, (gate * tl.sigmoid(u) * up).to(out.dtype.element_ty), live)


def silu_and_mul(x: Tensor, out: Tensor | None = None) -> Tensor:
    return _gated(x, out, False)


def gelu_tanh_and_mul(x: Tensor, out: Tensor | None = None) -> Tensor:
    return _gated(x, out, True)


def _gated(x: Tensor, out: Tensor | None, gelu: bool) -> Tensor:
    T, width = x.shape
    D = width // 2
    refuse_other_dtypes(x)
    fits("x", x, (T, 2 * D), x.dtype)
    out = x.new_empty(T, D) if out is None else out
    fits("out", out, (T, D), x.dtype)
    x0, o0 = rows_of(x)[2], rows_of(out)[2]
    if T and D:
        shape = tile(D, 1024)
        grid = (triton.cdiv(T, shape["ROWS"]), triton.cdiv(D, shape["COLUMNS"]))
        _gated_kernel[grid](x, x0, out, o0, T, D, gelu, **shape)
    return out
