# SPDX-License-Identifier: Apache-2.0
"""gpt-oss (OpenAI 2025, arXiv:2508.10925): attention with sinks, every other layer over a window, and routed experts
with biases and a clamped activation."""

from __future__ import annotations

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe import FusedMoE, Gate, Router
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.decoder import DecoderAttention, DecoderLayer, DecoderModel, window_by_layer


class GptOssMoE(nn.Module):
    """The softmax is over the chosen experts, which is that over all, renormalised."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        alpha, limit = getattr(config, "swiglu_alpha", 1.702), getattr(config, "swiglu_limit", 7.0)
        if (alpha, limit) != (1.702, 7.0):
            raise ValueError(f"swiglu_alpha={alpha}, swiglu_limit={limit}: the experts' kernels have 1.702 and 7.0")
        E, experts = config.num_local_experts, f"{prefix}.experts"
        self.router = Gate(config.hidden_size, E, dtype, f"{prefix}.router", bias=True)
        self.experts = FusedMoE(
            Router(E, config.num_experts_per_tok, True),
            config.hidden_size,
            config.intermediate_size,
            dtype,
            experts,
            vllm_config.parallel_config.enable_expert_parallel,
            bias_names=(f"{experts}.gate_up_proj_bias", f"{experts}.down_proj_bias"),
            activation="swigluoai",
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.experts(hidden_states, self.router(hidden_states))


class GptOssDecoderLayer(DecoderLayer):
    def __init__(self, vllm_config: VllmConfig, rope: RotaryEmbedding, prefix: str) -> None:
        super().__init__()
        config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        self.self_attn = DecoderAttention(
            config,
            rope,
            dtype,
            f"{prefix}.self_attn",
            bool(config.attention_bias),
            window_by_layer(config, int(prefix.rsplit(".", 1)[1])),
            sinks_name=f"{prefix}.self_attn.sinks",
        )
        self.mlp = GptOssMoE(vllm_config, f"{prefix}.mlp")
        self.make_norms(config, dtype, prefix)


class GptOssModel(DecoderModel):
    layer_cls = GptOssDecoderLayer


class GptOssForCausalLM(CausalLM):
    """A checkpoint whose experts are no MXFP4 stacks them as transformers holds them, input features first."""

    model_cls = GptOssModel
    transposed_experts = True
