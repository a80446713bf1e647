# SPDX-License-Identifier: Apache-2.0
"""Activation functions of the feed-forward layers."""

from __future__ import annotations

import torch
from torch import nn

from vllm.kernels import ops


class SiluAndMul(nn.Module):
    """x [T, 2I] → silu(x[:, :I]) · x[:, I:] [T, I] (SwiGLU, Shazeer 2020), which overwrites x[:, :I]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.silu_and_mul(x, x[:, : x.shape[1] // 2])


class GeluTanhAndMul(nn.Module):
    """As ``SiluAndMul`` with the tanh form of GELU (GeGLU)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.gelu_tanh_and_mul(x, x[:, : x.shape[1] // 2])


_GATED: dict[str, type[nn.Module]] = {"silu": SiluAndMul, "gelu_pytorch_tanh": GeluTanhAndMul}


def gated_activation(name: str) -> nn.Module:
    """The activation that configs call ``name``; ``ValueError`` where there is none."""
    if name not in _GATED:
        raise ValueError(f"hidden_act={name!r} is not supported: the feed-forward layers take {' or '.join(_GATED)}")
    return _GATED[name]()


def check_hidden_act(name: str) -> None:
    """Experts are SwiGLU: another activation is an error that names it."""
    if name != "silu":
        raise ValueError(f"hidden_act={name!r} is not supported: layers of experts take 'silu'")
