# SPDX-License-Identifier: Apache-2.0
"""Qwen3-MoE (Qwen team 2025): Qwen3's attention, routed experts in most layers, a dense feed-forward in the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import check_hidden_act
from vllm.model_executor.layers.fused_moe import FusedMoE, Router
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.decoder import DecoderAttention, DecoderLayer, DecoderModel, GatedMLP


class Qwen3MoeSparseMoeBlock(nn.Module):
    """Softmax router; ``renormalize`` makes the chosen weights' sum 1."""

    def __init__(self, vllm_config: VllmConfig, prefix: str, renormalize: bool) -> None:
        super().__init__()
        config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        self.gate = ReplicatedLinear(config.hidden_size, config.num_experts, False, dtype, f"{prefix}.gate")
        self.experts = FusedMoE(
            Router(config.num_experts, config.num_experts_per_tok, renormalize),
            config.hidden_size,
            config.moe_intermediate_size,
            dtype,
            f"{prefix}.experts",
            vllm_config.parallel_config.enable_expert_parallel,
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.experts(hidden_states, self.gate(hidden_states))


def has_experts(config: Any, index: int) -> bool:
    """Whether the feed-forward of layer ``index`` is routed (Qwen3-MoE and Qwen3-Next)."""
    dense = index in config.mlp_only_layers or not config.num_experts
    return not dense and (index + 1) % config.decoder_sparse_step == 0


class Qwen3MoeDecoderLayer(DecoderLayer):
    def __init__(self, vllm_config: VllmConfig, rope: RotaryEmbedding, prefix: str) -> None:
        super().__init__()
        config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        check_hidden_act(config.hidden_act)
        index = int(prefix.rsplit(".", 1)[1])
        self.self_attn = DecoderAttention(
            config,
            rope,
            dtype,
            f"{prefix}.self_attn",
            bool(config.attention_bias),
            config.sliding_window,
            qk_norm=True,
        )
        self.mlp = (
            Qwen3MoeSparseMoeBlock(vllm_config, f"{prefix}.mlp", bool(config.norm_topk_prob))
            if has_experts(config, index)
            else GatedMLP(config.hidden_size, config.intermediate_size, dtype, f"{prefix}.mlp")
        )
        self.make_norms(config, dtype, prefix)


class Qwen3MoeModel(DecoderModel):
    layer_cls = Qwen3MoeDecoderLayer


class Qwen3MoeForCausalLM(CausalLM):
    model_cls = Qwen3MoeModel
