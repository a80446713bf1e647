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


def check_hidden_act(name: str) -> None:
    """The feed-forward layers here are SwiGLU: another activation is an error that names it."""
    if name != "silu":
        raise ValueError(f"hidden_act={name!r} is not supported: the feed-forward layers take 'silu'")
