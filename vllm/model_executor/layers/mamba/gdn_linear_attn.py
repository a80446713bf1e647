# SPDX-License-Identifier: Apache-2.0
"""The gated-delta-net layer: linear attention whose only memory of the past is a state of fixed size per request."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context, set_current_layer
from vllm.kernels import ops
from vllm.kernels.weights import GDNWeights
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear, Shard, divide
from vllm.model_executor.parameter import WeightSpec
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec


class GDNHeads:
    """The heads of a layer and the part of them that this TP rank holds: G key heads, each with its H/G value heads.

    Raises:
        ValueError: the key heads cannot be divided over the TP ranks, or the value heads over the key heads.
    """

    def __init__(self, config: Any, prefix: str) -> None:
        tp_size, tp_rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        self.total_k, self.total_v = config.linear_num_key_heads, config.linear_num_value_heads
        self.head_k_dim, self.head_v_dim = config.linear_key_head_dim, config.linear_value_head_dim
        if self.total_v % self.total_k:
            raise ValueError(
                f"{prefix}: linear_num_value_heads={self.total_v} is no multiple of linear_num_key_heads={self.total_k}"
            )
        self.num_k = divide(self.total_k, tp_size, f"linear_num_key_heads of {prefix}")
        self.v_per_k = self.total_v // self.total_k
        self.num_v = self.num_k * self.v_per_k
        self.key_dim, self.value_dim = self.total_k * self.head_k_dim, self.total_v * self.head_v_dim
        self.local_k = slice(tp_rank * self.num_k, (tp_rank + 1) * self.num_k)
        self.local_v = slice(tp_rank * self.num_v, (tp_rank + 1) * self.num_v)

    def qkv_rows(self) -> torch.Tensor:
        """Rows of this rank in a tensor that stacks all q, all k and all v heads, in that order."""
        keys = torch.arange(self.key_dim, device="cpu").unflatten(0, (self.total_k, -1))[self.local_k].flatten()
        return torch.cat([keys, self.key_dim + keys, 2 * self.key_dim + self.value_rows()])

    def value_rows(self) -> torch.Tensor:
        return torch.arange(self.value_dim, device="cpu").unflatten(0, (self.total_v, -1))[self.local_v].flatten()

    def interleaved_rows(self, sizes: list[int]) -> torch.Tensor:
        """As ``qkv_rows``, for a tensor that holds, key head after key head, ``sizes`` rows of each kind."""
        rows = torch.arange(self.total_k * sum(sizes), device="cpu").unflatten(0, (self.total_k, -1))[self.local_k]
        return torch.cat([part.flatten() for part in rows.split(sizes, dim=1)])


class GDNInProjection(LinearBase):
    """Hidden states → q | k | v | z | b | a of this rank's heads, in one matrix product.

    Checkpoints hold either ``in_proj_qkvz`` and ``in_proj_ba``, interleaved by key head (Qwen3-Next), or
    ``in_proj_qkv``, ``in_proj_z``, ``in_proj_b`` and ``in_proj_a`` (Qwen3.5).
    """

    def __init__(self, hidden_size: int, heads: GDNHeads, interleaved: bool, dtype: torch.dtype, prefix: str) -> None:
        values = heads.v_per_k * heads.head_v_dim
        if interleaved:
            parts = [
                ("in_proj_qkvz", heads.interleaved_rows([heads.head_k_dim, heads.head_k_dim, values, values])),
                ("in_proj_ba", heads.interleaved_rows([heads.v_per_k, heads.v_per_k])),
            ]
            sizes = [2 * (heads.key_dim + heads.value_dim), 2 * heads.total_v]
        else:
            scalars = torch.arange(heads.total_v, device="cpu")[heads.local_v]
            parts = [
                ("in_proj_qkv", heads.qkv_rows()),
                ("in_proj_z", heads.value_rows()),
                ("in_proj_b", scalars),
                ("in_proj_a", scalars),
            ]
            sizes = [2 * heads.key_dim + heads.value_dim, heads.value_dim, heads.total_v, heads.total_v]
        shards, at = [], 0
        for (name, rows), size in zip(parts, sizes, strict=True):
            shards.append(Shard(f"{prefix}.{name}.weight", (size, hidden_size), rows, slice(None), at))
            at += len(rows)
        super().__init__(shards, False, dtype)


class GatedDeltaNet(Layer):
    """hidden_states [T, hidden] → [T, hidden].

    TP rank r holds key heads [r·G/tp, (r + 1)·G/tp), their value heads, and the convolution channels of both. Each
    request has a slot in the pools ``conv_state`` and ``recurrent_state``; a dummy step and pad rows touch none.
    """

    backend = GDNAttentionBackend
    weight_attributes = ("weights",)

    def __init__(self, config: Any, interleaved: bool, dtype: torch.dtype, prefix: str) -> None:
        super().__init__()
        self.layer_name, self.dtype, self.eps = prefix, dtype, config.rms_norm_eps
        self.heads = heads = GDNHeads(config, prefix)
        self.conv_kernel_size = config.linear_conv_kernel_dim
        self.in_proj = GDNInProjection(config.hidden_size, heads, interleaved, dtype, prefix)
        self.out_proj = RowParallelLinear(heads.value_dim, config.hidden_size, False, dtype, f"{prefix}.out_proj")
        self.small: dict[str, torch.Tensor] = {}
        self.weights: GDNWeights | None = None
        self.conv_state: torch.Tensor | None = None
        self.recurrent_state: torch.Tensor | None = None

    # --- weights ------------------------------------------------------------------------------------------------

    def weight_specs(self) -> list[WeightSpec]:
        heads, prefix = self.heads, self.layer_name
        conv_dim = 2 * heads.key_dim + heads.value_dim
        shapes = {
            "conv1d.weight": (conv_dim, 1, self.conv_kernel_size),
            "A_log": (heads.total_v,),
            "dt_bias": (heads.total_v,),
            "norm.weight": (heads.head_v_dim,),
        }
        return [
            WeightSpec(f"{prefix}.{name}", shape, self._taker(name), torch.float32) for name, shape in shapes.items()
        ]

    def _taker(self, name: str):
        def take(loaded: torch.Tensor) -> None:
            self.small[name] = loaded.clone()

        return take

    def process_weights_after_loading(self) -> None:
        heads, small, device = self.heads, self.small, torch.get_default_device()
        new: dict[str, Any] = {}
        if (taps := small.get("conv1d.weight")) is not None:
            new["conv_weight_KC"] = taps[heads.qkv_rows(), 0].T.contiguous().to(device)
        if (log_rate := small.get("A_log")) is not None:
            new["decay_rate_H"] = log_rate[heads.local_v].exp().to(device)
        if (dt_bias := small.get("dt_bias")) is not None:
            new["dt_bias_H"] = dt_bias[heads.local_v].to(device)
        if (norm := small.get("norm.weight")) is not None:
            new["norm_weight_E"] = norm.to(device)
        if self.weights is not None:
            self.weights = dataclasses.replace(self.weights, **new)
        elif len(new) == 4:
            self.weights = GDNWeights(**new, eps=self.eps, num_k_heads=heads.num_k, head_k_dim=heads.head_k_dim)
        else:
            return  # the rest comes with a later call
        self.small = {}

    # --- state --------------------------------------------------------------------------------------------------

    def get_kv_cache_spec(self) -> MambaSpec:
        heads = self.heads
        conv_dim = 2 * heads.num_k * heads.head_k_dim + heads.num_v * heads.head_v_dim
        return MambaSpec(
            ((self.conv_kernel_size - 1, conv_dim), (heads.num_v, heads.head_k_dim, heads.head_v_dim)),
            (self.dtype, torch.float32),
        )

    def bind_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate the pools, one slot for each request that may run and the pad slot."""
        spec = self.get_kv_cache_spec()
        conv, recurrent = ((config.num_state_slots, *shape) for shape in spec.shapes)
        self.conv_state = torch.zeros(conv, dtype=spec.dtypes[0])
        self.recurrent_state = ops.zeroed_state(recurrent, spec.dtypes[1])

    def unbind_kv_cache(self) -> None:
        self.conv_state = self.recurrent_state = None

    def clear_state(self, slot: int) -> None:
        """A request begins in ``slot``: nothing of the slot's last owner may reach it."""
        assert self.conv_state is not None, f"{self.layer_name}: no state pools"
        assert self.recurrent_state is not None, f"{self.layer_name}: no state pools"
        self.conv_state[slot].zero_()
        self.recurrent_state[slot].zero_()

    # --- one step -----------------------------------------------------------------------------------------------

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """``positions`` is not used: the state knows how far its request has come."""
        set_current_layer(self.layer_name)
        return self.out_proj(self._core(self.in_proj(hidden_states)))

    def _core(self, projected: torch.Tensor) -> torch.Tensor:
        """[T, N] → [T, H·E]; rows past the real tokens are exactly 0. Without metadata (profiling) all of them are."""
        context = get_forward_context()
        if context.attn_metadata is None:
            return projected.new_zeros(projected.shape[0], self.heads.num_v * self.heads.head_v_dim)
        metadata = context.attn_metadata[self.layer_name]
        assert self.weights is not None, f"{self.layer_name}: no weights were loaded"
        assert self.conv_state is not None, f"{self.layer_name}: no state pools"
        assert self.recurrent_state is not None, f"{self.layer_name}: no state pools"
        return ops.gated_delta_net(
            projected,
            self.weights,
            self.conv_state,
            self.recurrent_state,
            metadata.query_start_loc,
            metadata.state_indices,
            metadata.query_start_loc_cpu,
        )
