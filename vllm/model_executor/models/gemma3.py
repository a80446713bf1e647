# SPDX-License-Identifier: Apache-2.0
"""The text model of Gemma 3 (Gemma team 2025): norms before and after each block, windows in five layers of six."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding, get_rope
from vllm.model_executor.models.causal_lm import VISION_WEIGHTS, CausalLM, TextPart
from vllm.model_executor.models.decoder import (
    DecoderAttention,
    DecoderLayer,
    DecoderModel,
    GatedMLP,
    window_by_layer,
)


class Gemma3DecoderLayer(DecoderLayer):
    """What each block puts out is normalised before the residual stream takes it in."""

    qk_norm: ClassVar[bool] = True
    norms = (*DecoderLayer.norms, "pre_feedforward_layernorm", "post_feedforward_layernorm")
    pre_feedforward_layernorm: RMSNorm
    post_feedforward_layernorm: RMSNorm

    def __init__(self, vllm_config: VllmConfig, rope: dict[str, RotaryEmbedding], prefix: str) -> None:
        super().__init__()
        config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        if config.use_bidirectional_attention:
            raise ValueError(
                "use_bidirectional_attention=True: attention to later tokens (embedding models) is not supported"
            )
        index = int(prefix.rsplit(".", 1)[1])
        self.self_attn = DecoderAttention(
            config,
            rope[config.layer_types[index]],
            dtype,
            f"{prefix}.self_attn",
            bool(config.attention_bias),
            window_by_layer(config, index),
            self.qk_norm,
            zero_centered_norm=True,
            scale=config.query_pre_attn_scalar**-0.5,
            soft_cap=self.soft_cap(config),
        )
        self.mlp = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            dtype,
            f"{prefix}.mlp",
            hidden_act=config.hidden_activation,
        )
        self.make_norms(config, dtype, prefix, zero_centered=True)

    @staticmethod
    def soft_cap(config: Any) -> float:
        """Of the attention's scores; transformers leaves Gemma 3's as they are, whatever its config holds."""
        return 0.0

    def forward(
        self, positions: torch.Tensor, update: torch.Tensor | None, stream: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, stream = self.input_layernorm.add(update, stream)
        attended = self.self_attn(positions, normed)
        attended = self.post_attention_layernorm(attended, out=attended)
        normed, stream = self.pre_feedforward_layernorm.add(attended, stream)
        fed = self.mlp(normed)
        return self.post_feedforward_layernorm(fed, out=fed), stream


class Gemma3Model(DecoderModel):
    layer_cls = Gemma3DecoderLayer
    zero_centered_norm = True

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(vllm_config, prefix)
        model = vllm_config.model_config
        # Rounded to the model's dtype, as in training: 55.5 for the root of 3072 in bfloat16.
        self.embed_scale = float(torch.tensor(model.hf_config.hidden_size**0.5, dtype=model.dtype, device="cpu"))

    def make_rope(self, config: Any, max_model_len: int) -> dict[str, RotaryEmbedding]:
        return {kind: get_rope(config, max_model_len, layer_type=kind) for kind in set(config.layer_types)}

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(input_ids).mul_(self.embed_scale)


class Gemma3ForCausalLM(CausalLM):
    model_cls: ClassVar[type[Gemma3Model]] = Gemma3Model

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config, prefix)
        self.soft_cap: float | None = vllm_config.model_config.hf_config.final_logit_softcapping

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = super().compute_logits(hidden_states)
        return logits if self.soft_cap is None else logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)


class Gemma3ForConditionalGeneration(TextPart, Gemma3ForCausalLM):
    ignored_weights = (*CausalLM.ignored_weights, VISION_WEIGHTS)
