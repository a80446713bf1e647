# SPDX-License-Identifier: Apache-2.0
"""Llama (Touvron et al. 2023; Grattafiori et al. 2024): pre-norm attention with rotary positions, SwiGLU."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.config import VllmConfig
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.decoder import DecoderAttention, DecoderLayer, DecoderModel, GatedMLP


class LlamaDecoderLayer(DecoderLayer):
    """``fused``: checkpoints have q, k and v as one tensor, and gate and up."""

    qk_norm: ClassVar[bool] = False
    fused: ClassVar[bool] = False

    def __init__(self, vllm_config: VllmConfig, rope: RotaryEmbedding | None, prefix: str) -> None:
        super().__init__()
        config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        window = self.sliding_window(config, int(prefix.rsplit(".", 1)[1]))
        qkv_bias, o_bias, mlp_bias = self.biases(config)
        self.self_attn = DecoderAttention(
            config, rope, dtype, f"{prefix}.self_attn", qkv_bias, window, self.qk_norm, o_bias, self.fused
        )
        self.mlp = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            dtype,
            f"{prefix}.mlp",
            mlp_bias,
            hidden_act=config.hidden_act,
            fused=self.fused,
        )
        self.make_norms(config, dtype, prefix)

    @staticmethod
    def biases(config: Any) -> tuple[bool, bool, bool]:
        """Whether there are any on q, k and v, on the output projection of attention, in the feed-forward."""
        attention = bool(getattr(config, "attention_bias", False))
        return attention, attention, bool(getattr(config, "mlp_bias", False))

    @staticmethod
    def sliding_window(config: Any, index: int) -> int | None:
        """The attention window of layer ``index``, None for full attention; Llama has none."""
        return None


class LlamaModel(DecoderModel):
    layer_cls = LlamaDecoderLayer


class LlamaForCausalLM(CausalLM):
    model_cls = LlamaModel
