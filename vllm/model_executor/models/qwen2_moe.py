# SPDX-License-Identifier: Apache-2.0
"""Qwen1.5-MoE and Qwen2-MoE (Qwen team 2024): Qwen2's attention, routed experts beside a gated shared one."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import check_hidden_act
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.decoder import (
    DecoderAttention,
    DecoderLayer,
    DecoderModel,
    GatedMLP,
    window_by_layer,
)
from vllm.model_executor.models.qwen3_moe import has_experts
from vllm.model_executor.models.qwen3_next import Qwen3NextSparseMoeBlock


class Qwen2MoeDecoderLayer(DecoderLayer):
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
            bool(config.qkv_bias),
            window_by_layer(config, index),
            o_bias=False,
        )
        self.mlp = (
            Qwen3NextSparseMoeBlock(vllm_config, f"{prefix}.mlp", bool(config.norm_topk_prob))
            if has_experts(config, index)
            else GatedMLP(config.hidden_size, config.intermediate_size, dtype, f"{prefix}.mlp")
        )
        self.make_norms(config, dtype, prefix)


class Qwen2MoeModel(DecoderModel):
    layer_cls = Qwen2MoeDecoderLayer


class Qwen2MoeForCausalLM(CausalLM):
    model_cls = Qwen2MoeModel
