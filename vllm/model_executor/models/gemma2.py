# SPDX-License-Identifier: Apache-2.0
"""Gemma 2 (Gemma team 2024): Gemma 3 without norms of heads, with soft caps and one rotary embedding."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding, get_rope
from vllm.model_executor.models.gemma3 import Gemma3DecoderLayer, Gemma3ForCausalLM, Gemma3Model


class Gemma2DecoderLayer(Gemma3DecoderLayer):
    qk_norm = False

    @staticmethod
    def soft_cap(config: Any) -> float:
        return config.attn_logit_softcapping or 0.0


class Gemma2Model(Gemma3Model):
    layer_cls = Gemma2DecoderLayer

    def make_rope(self, config: Any, max_model_len: int) -> dict[str, RotaryEmbedding]:
        return dict.fromkeys(config.layer_types, get_rope(config, max_model_len))


class Gemma2ForCausalLM(Gemma3ForCausalLM):
    model_cls = Gemma2Model
