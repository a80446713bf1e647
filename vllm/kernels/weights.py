# SPDX-License-Identifier: Apache-2.0
"""Weights in the layout of the implementation that reads them. The functions here are for "plain" ones, which every
implementation reads but those that pack for themselves (``kernels.cpu.ops``)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedWeight:
    """A linear layer's weight [N, K] in the layout that ``linear`` reads.

    ``kind``: "panels" for the C++ kernels (``data`` is flat), "plain" for all others (``data`` is the [N, K] weight).
    """

    N: int
    K: int
    dtype: torch.dtype
    data: Tensor
    kind: str

    @functools.cached_property
    def address(self) -> int:
        return self.data.data_ptr()


@dataclass(frozen=True)
class PackedExperts:
    """Weights [E, N, K] of all experts in the layout that ``fused_experts`` reads; ``kind`` as in PackedWeight.

    ``gated``: N is [gate; up] stacked, and "panels" holds the two halves one after the other.
    """

    E: int
    N: int
    K: int
    dtype: torch.dtype
    data: Tensor
    kind: str
    gated: bool


def pack_linear_weight(weight_NK: Tensor, into: PackedWeight | None = None) -> PackedWeight:
    N, K = weight_NK.shape
    if into is None:
        return PackedWeight(N, K, weight_NK.dtype, weight_NK, "plain")
    if into.data.data_ptr() != weight_NK.data_ptr():
        into.data.copy_(weight_NK)
    return into


def unpack_linear_weight(packed: PackedWeight) -> Tensor:
    return packed.data


def pack_expert_weights(weight_ENK: Tensor, gated: bool = False) -> PackedExperts:
    E, N, K = weight_ENK.shape
    return PackedExperts(E, N, K, weight_ENK.dtype, weight_ENK, "plain", gated)


def repack_expert_weight(packed: PackedExperts, expert: int, weight_NK: Tensor, part: int = 0) -> None:
    rows = weight_NK.shape[0]
    packed.data[expert, part * rows : (part + 1) * rows].copy_(weight_NK)


@dataclass(frozen=True)
class GDNWeights:
    """One layer's small weights on one rank, all fp32 and contiguous.

    conv_weight_KC: taps, oldest first. decay_rate_H: exp(A_log). dt_bias_H. norm_weight_E with ``eps``.
    """

    conv_weight_KC: Tensor
    decay_rate_H: Tensor
    dt_bias_H: Tensor
    norm_weight_E: Tensor
    eps: float
    num_k_heads: int
    head_k_dim: int

    @property
    def num_v_heads(self) -> int:
        return self.decay_rate_H.shape[0]

    @property
    def head_v_dim(self) -> int:
        return self.norm_weight_E.shape[0]

    @property
    def conv_dim(self) -> int:
        return self.conv_weight_KC.shape[1]

    @property
    def value_dim(self) -> int:
        return self.num_v_heads * self.head_v_dim

    @functools.cached_property
    def conv_weight_CK(self) -> Tensor:
        return self.conv_weight_KC.T.contiguous()

    @functools.cached_property
    def log_decay_rate_H(self) -> Tensor:
        return self.decay_rate_H.log()

    def split(self, x_TN: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Views of the projection: convolution input [T, C], z [T, H, E], b [T, H], a [T, H]."""
        H = self.num_v_heads
        mixed, z, b, a = x_TN.split([self.conv_dim, self.value_dim, H, H], dim=-1)
        return mixed, z.unflatten(-1, (H, self.head_v_dim)), b, a
