# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square norms. They ran in Triton's interpreter, not yet on hardware."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.triton.rows import DTYPES, fits, refuse_other_dtypes, rows_of, tile

_MOST_COLUMNS = 32768


@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(
    x, x0, x1, residual, r0, gate, g0, g1, weight, out, o0, o1, num_rows, H, eps,
    D: tl.constexpr, NARROW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    d = tl.arange(0, COLUMNS)[None, :]
    live = (row < num_rows) & (d < D)
    t, h = row // H, row % H
    v = tl.load(x + t * x0 + h * x1 + d, live, 0).to(tl.float32)
    if residual is not None:
        at = residual + t * r0 + d
        rounded = (v + tl.load(at, live, 0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(at, rounded, live)
        v = rounded.to(tl.float32)
    y = v * tl.rsqrt(tl.sum(v * v, axis=1) / D + eps)[:, None]
    if NARROW:
        y = y.to(out.dtype.element_ty).to(tl.float32)
    y *= tl.load(weight + d, d < D, 0).to(tl.float32)
    if gate is not None:
        z = tl.load(gate + t * g0 + h * g1 + d, live, 0).to(tl.float32)
        y *= z * tl.sigmoid(z)
    tl.store(out + t * o0 + h * o1 + d, y.to(out.dtype.element_ty), live)


def _norm(x: Tensor, residual: Tensor | None, gate: Tensor | None, weight_D: Tensor, eps: float, out: Tensor) -> None:
    D = x.shape[-1]
    refuse_other_dtypes(x, weight_D, out)
    if D > _MOST_COLUMNS:
        raise NotImplementedError(f"a norm over {D} elements, the most is {_MOST_COLUMNS}")
    fits("x", x, x.shape, x.dtype)
    T, H, x0, x1 = rows_of(x)
    _, _, o0, o1 = rows_of(out)
    r0 = 0 if residual is None else rows_of(residual)[2]
    g0, g1 = (0, 0) if gate is None else rows_of(gate)[2:]
    if num_rows := T * H:
        shape = tile(D, _MOST_COLUMNS)
        narrow = gate is None and weight_D.dtype is x.dtype
        _norm_kernel[(triton.cdiv(num_rows, shape["ROWS"]),)](
            x, x0, x1, residual, r0, gate, g0, g1, weight_D, out, o0, o1, num_rows, H, eps, D, narrow, **shape
        )


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    fits("weight", weight_D, x.shape[-1:], x.dtype, torch.float32)
    fits("out", out, x.shape, x.dtype)
    _norm(x, None, None, weight_D, eps, out)
    return out


def fused_add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(x_TD, memory_format=torch.contiguous_format) if out is None else out
    assert x_TD.dim() == 2, f"x is {tuple(x_TD.shape)}, needed [T, D]"
    fits("weight", weight_D, x_TD.shape[-1:], x_TD.dtype, torch.float32)
    fits("out", out, x_TD.shape, x_TD.dtype)
    fits("residual", residual_TD, x_TD.shape, x_TD.dtype)
    _norm(x_TD, residual_TD, None, weight_D, eps, out)
    return out, residual_TD


def rms_norm_gated(x: Tensor, z: Tensor, weight_E: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight * silu(z)`` over the last dimension, rounded once; ``reference_gdn`` has the
    twin.

    Args:
        x, z: [T, E] or [T, H, E], may be views into wider rows; the last dimension contiguous.
        weight_E: [E]. All may differ in dtype.
        out: of x's shape and any of the dtypes, may be x or z; by default of x's dtype.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    refuse_other_dtypes(z)
    fits("weight", weight_E, x.shape[-1:], *DTYPES)
    fits("out", out, x.shape, *DTYPES)
    fits("z", z, x.shape, *DTYPES)
    _norm(x, None, z, weight_E, eps, out)
    return out
