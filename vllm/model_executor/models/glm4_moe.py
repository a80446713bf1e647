# SPDX-License-Identifier: Apache-2.0
"""GLM-4.5 and 4.6 (GLM team 2025, arXiv:2508.06471): partly rotated attention, sigmoid-routed experts beside shared
ones; the first layers are dense."""

from __future__ import annotations

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import check_hidden_act
from vllm.model_executor.layers.fused_moe import FusedMoE, Gate, Router
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.decoder import DecoderAttention, DecoderLayer, DecoderModel, GatedMLP


class Glm4MoE(nn.Module):
    """The experts of the best groups by sigmoid and correction bias, plus shared experts, whose TP shares ride in
    their sum."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.gate = Gate(hidden, config.n_routed_experts, torch.float32, f"{prefix}.gate")
        router = Router(
            config.n_routed_experts,
            config.num_experts_per_tok,
            bool(config.norm_topk_prob),
            "sigmoid",
            config.routed_scaling_factor,
            f"{prefix}.gate.e_score_correction_bias",
            config.n_group,
            config.topk_group,
        )
        parallel = vllm_config.parallel_config.enable_expert_parallel
        self.experts = FusedMoE(router, hidden, inner, dtype, f"{prefix}.experts", parallel)
        shared = inner * config.n_shared_experts
        self.shared_experts = (
            GatedMLP(hidden, shared, dtype, f"{prefix}.shared_experts", reduce_results=False) if shared else None
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        shared = None if self.shared_experts is None else self.shared_experts(hidden_states)
        return self.experts(hidden_states, self.gate(hidden_states), tp_partial=shared)


class Glm4MoeDecoderLayer(DecoderLayer):
    def __init__(self, vllm_config: VllmConfig, rope: RotaryEmbedding, prefix: str) -> None:
        super().__init__()
        config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        check_hidden_act(config.hidden_act)
        self.self_attn = DecoderAttention(
            config,
            rope,
            dtype,
            f"{prefix}.self_attn",
            bool(config.attention_bias),
            qk_norm=bool(config.use_qk_norm),
            o_bias=False,
        )
        self.mlp = (
            Glm4MoE(vllm_config, f"{prefix}.mlp")
            if int(prefix.rsplit(".", 1)[1]) >= config.first_k_dense_replace
            else GatedMLP(config.hidden_size, config.intermediate_size, dtype, f"{prefix}.mlp")
        )
        self.make_norms(config, dtype, prefix)


class Glm4MoeModel(DecoderModel):
    layer_cls = Glm4MoeDecoderLayer
    partial_rotary = True


class Glm4MoeForCausalLM(CausalLM):
    model_cls = Glm4MoeModel
