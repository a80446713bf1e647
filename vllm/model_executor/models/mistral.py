# SPDX-License-Identifier: Apache-2.0
"""Mistral (Jiang et al. 2023): Llama's layer over a sliding window; later releases have none, or
one in some layers (Ministral)."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.causal_lm import VISION_WEIGHTS, CausalLM, TextPart
from vllm.model_executor.models.decoder import DecoderModel, window_by_layer
from vllm.model_executor.models.llama import LlamaDecoderLayer


class MistralDecoderLayer(LlamaDecoderLayer):
    @staticmethod
    def sliding_window(config: Any, index: int) -> int | None:
        return window_by_layer(config, index) if config.model_type == "ministral" else config.sliding_window

    @staticmethod
    def biases(config: Any) -> tuple[bool, bool, bool]:
        return False, False, False


class MistralModel(DecoderModel):
    layer_cls = MistralDecoderLayer


class MistralForCausalLM(CausalLM):
    model_cls = MistralModel


class Mistral3ForConditionalGeneration(TextPart, MistralForCausalLM):
    ignored_weights = (*CausalLM.ignored_weights, VISION_WEIGHTS)
