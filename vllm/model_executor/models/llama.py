# SPDX-License-Identifier: Apache-2.0
"""Llama (Touvron et al. 2023; Grattafiori et al. 2024): pre-norm attention with rotary positions, SwiGLU."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import check_hidden_act
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.decoder import DecoderAttention, DecoderLayer, DecoderModel, GatedMLP


class LlamaDecoderLayer(DecoderLayer):
    qk_norm: ClassVar[bool] = False
    mlp_has_bias: ClassVar[bool] = True

    def __init__(self, vllm_config: VllmConfig, rope: RotaryEmbedding, prefix: str) -> None:
        super().__init__()
        config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        check_hidden_act(config.hidden_act)
        window = self.sliding_window(config, int(prefix.rsplit(".", 1)[1]))
        attention_bias = bool(getattr(config, "attention_bias", False))
        self.self_attn = DecoderAttention(
            config, rope, dtype, f"{prefix}.self_attn", attention_bias, window, self.qk_norm
        )
        mlp_bias = self.mlp_has_bias and bool(getattr(config, "mlp_bias", False))
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, dtype, f"{prefix}.mlp", mlp_bias)
        self.make_norms(config, dtype, prefix)

    @staticmethod
    def sliding_window(config: Any, index: int) -> int | None:
        """The attention window of layer ``index``, None for full attention; Llama has none."""
        return None


class LlamaModel(DecoderModel):
    layer_cls = LlamaDecoderLayer


class LlamaForCausalLM(CausalLM):
    model_cls = LlamaModel
