# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: PT018
"""The C++ gated delta net; its contract is that of ``kernels.ops.gated_delta_net``. A request's result does not depend
on how its tokens are cut into steps: bitwise."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from vllm.kernels.cpu.ops import _CODE, _at, _kernels, _threads
from vllm.kernels.weights import GDNWeights

_i22_f = struct.Struct("22qd").pack


def gated_delta_net(
    x_TN: Tensor,
    weights: GDNWeights,
    conv_state: Tensor,
    recurrent_state: Tensor,
    query_start_loc: Tensor,
    state_indices: Tensor,
    query_start_loc_cpu: Tensor | None = None,
) -> Tensor:
    T, R = x_TN.shape[0], state_indices.shape[0]
    H, D, E = weights.num_v_heads, weights.head_k_dim, weights.head_v_dim
    (K, C), slots = weights.conv_weight_KC.shape, conv_state.shape[0]
    assert x_TN.shape[1] == C + H * E + 2 * H and x_TN.stride(1) == 1, (
        f"x is {x_TN.shape} {x_TN.stride()}, needed [T, {C + H * E + 2 * H}]"
    )
    assert conv_state.shape == (slots, K - 1, C) and recurrent_state.shape == (slots, H, D, E), (
        f"states are {conv_state.shape}, {recurrent_state.shape}, needed {(slots, K - 1, C)}, {(slots, H, D, E)}"
    )
    assert conv_state.dtype is x_TN.dtype and recurrent_state.dtype is torch.float32, (
        f"x is {x_TN.dtype}, states are {conv_state.dtype}, {recurrent_state.dtype}"
    )
    assert conv_state.is_contiguous() and recurrent_state.is_contiguous(), "the state pools must be contiguous"
    assert query_start_loc.shape == (R + 1,) and query_start_loc.dtype is state_indices.dtype is torch.int32, (
        f"tables are {query_start_loc.shape} {query_start_loc.dtype}, {state_indices.shape} {state_indices.dtype}"
    )
    out = x_TN.new_empty(T, H * E)
    bad = _kernels().vc_gated_delta_net(
        _i22_f(
            _CODE[x_TN.dtype], T, R, weights.num_k_heads, H, D, E, K, _at(x_TN), x_TN.stride(0),
            _at(weights.conv_weight_KC), _at(weights.decay_rate_H), _at(weights.dt_bias_H),
            _at(weights.norm_weight_E), _at(conv_state), _at(recurrent_state), slots, _at(query_start_loc),
            _at(state_indices), _at(out), H * E, _threads(), weights.eps,
        )
    )  # fmt: skip
    assert not bad, (
        f"{T} rows and {slots} slots do not fit query_start_loc {query_start_loc.tolist()}, slots "
        f"{state_indices.tolist()}"
    )
    return out
