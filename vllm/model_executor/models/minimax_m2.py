# SPDX-License-Identifier: Apache-2.0
"""MiniMax-M2 (MiniMax 2025): attention with queries and keys normalised over all heads, sigmoid-routed experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce
from vllm.forward_context import set_current_layer
from vllm.kernels import ops
from vllm.model_executor.layers.activation import check_hidden_act
from vllm.model_executor.layers.fused_moe import FusedMoE, Gate, Router
from vllm.model_executor.layers.linear import Shard
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models.decoder import DecoderAttention, DecoderLayer, DecoderModel
from vllm.model_executor.models.mixtral import MixtralForCausalLM
from vllm.model_executor.parameter import WeightSpec


class AllHeadsNorm(nn.Module):
    """RMS norm over all heads of a token, those of other TP ranks as well; the weight is of this rank's heads."""

    weight_attributes = ("weight",)

    def __init__(self, heads: Shard, eps: float, dtype: torch.dtype, name: str) -> None:
        super().__init__()
        self.full_size, self.rows, self.eps, self.dtype, self.name = heads.full[0], heads.rows, eps, dtype, name
        # Ranks that hold the same heads, each of which counts.
        self.copies = get_tensor_model_parallel_world_size() * heads.num_rows // self.full_size
        self.weight: torch.Tensor | None = None

    def weight_specs(self) -> list[WeightSpec]:
        return [WeightSpec(self.name, (self.full_size,), self._take, rows=self.rows)]

    def _take(self, loaded: torch.Tensor) -> None:
        self.weight = torch.empty(loaded.shape, dtype=self.dtype)
        self.weight.copy_(loaded)

    def forward(self, x: torch.Tensor, squares: torch.Tensor | None) -> None:
        """x [T, heads · D] in place; squares [T, 1] float32: sums over all ranks' x, None where there is one rank."""
        assert self.weight is not None, f"{self.name}: no weight was loaded"
        if squares is None:
            ops.rms_norm(x, self.weight, self.eps, x)
            return
        scale = torch.rsqrt(squares / (self.copies * self.full_size) + self.eps)
        x.copy_((x.float() * scale).to(x.dtype) * self.weight)


class MiniMaxM2Attention(DecoderAttention):
    def __init__(self, config: Any, rope: RotaryEmbedding, dtype: torch.dtype, prefix: str) -> None:
        super().__init__(config, rope, dtype, prefix)
        self.prefix = prefix
        self.q_norm, self.k_norm = (  # type: ignore[assignment]
            AllHeadsNorm(shard, config.rms_norm_eps, dtype, f"{prefix}.{name}.weight")
            for shard, name in zip(self.qkv_proj.shards[:2], ("q_norm", "k_norm"), strict=True)
        )

    def normalise(self, q: torch.Tensor, k: torch.Tensor) -> None:
        rows = q.flatten(1), k.flatten(1)
        squares: tuple[torch.Tensor | None, ...] = (None, None)
        if get_tensor_model_parallel_world_size() > 1:
            norms = [torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float32) for x in rows]
            set_current_layer(self.prefix)
            squares = tensor_model_parallel_all_reduce(torch.cat(norms, dim=1).square_()).split(1, dim=1)
        self.q_norm(rows[0], squares[0])  # type: ignore[misc]
        self.k_norm(rows[1], squares[1])  # type: ignore[misc]


class MiniMaxM2MoE(nn.Module):
    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        E = config.num_local_experts
        self.gate = Gate(config.hidden_size, E, torch.float32, f"{prefix}.gate")
        self.experts = FusedMoE(
            Router(E, config.num_experts_per_tok, True, "sigmoid", bias_name=f"{prefix}.e_score_correction_bias"),
            config.hidden_size,
            config.intermediate_size,
            dtype,
            f"{prefix}.experts",
            vllm_config.parallel_config.enable_expert_parallel,
            ("w1", "w3", "w2"),
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.experts(hidden_states, self.gate(hidden_states))


class MiniMaxM2DecoderLayer(DecoderLayer):
    def __init__(self, vllm_config: VllmConfig, rope: RotaryEmbedding, prefix: str) -> None:
        super().__init__()
        config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        check_hidden_act(config.hidden_act)
        self.self_attn = MiniMaxM2Attention(config, rope, dtype, f"{prefix}.self_attn")
        self.mlp = MiniMaxM2MoE(vllm_config, f"{prefix}.block_sparse_moe")
        self.make_norms(config, dtype, prefix)


class MiniMaxM2Model(DecoderModel):
    layer_cls = MiniMaxM2DecoderLayer
    partial_rotary = True


class MiniMaxM2ForCausalLM(MixtralForCausalLM):
    """The layers that predict several tokens at once (``mtp``) are left unread."""

    model_cls = MiniMaxM2Model
    ignored_weights = (*MixtralForCausalLM.ignored_weights, r"(^|\.)mtp\.")
