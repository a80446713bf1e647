# SPDX-License-Identifier: Apache-2.0
"""The operations of the layers, by the device of their input: C++ kernels on CPU, plain torch elsewhere.

Shapes and rules are those of the functions of the same name in ``vllm._cpu_ops``.
"""

from __future__ import annotations

import torch

from vllm import _cpu_ops as cpu


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    op = cpu.rms_norm if x.is_cpu else cpu.rms_norm_ref
    return op(x, weight, eps, out)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in place: the normalised sum is in ``x``, the sum in ``residual``."""
    op = cpu.fused_add_rms_norm if x.is_cpu else cpu.fused_add_rms_norm_ref
    return op(x, residual, weight, eps, x)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """In place: the result is the first half of x's columns."""
    op = cpu.silu_and_mul if x.is_cpu else cpu.silu_and_mul_ref
    return op(x, x[:, : x.shape[1] // 2])


def rotary_embedding(positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, cos_sin_cache: torch.Tensor) -> None:
    op = cpu.rotary_embedding if q.is_cpu else cpu.rotary_embedding_ref
    op(positions, q, k, cos_sin_cache)
