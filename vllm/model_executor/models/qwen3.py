# SPDX-License-Identifier: Apache-2.0
"""Qwen3 (Qwen team 2025): Llama's layer with an RMS norm on each query and key head."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.decoder import DecoderModel, window_by_layer
from vllm.model_executor.models.llama import LlamaDecoderLayer


class Qwen3DecoderLayer(LlamaDecoderLayer):
    qk_norm = True
    sliding_window = staticmethod(window_by_layer)

    @staticmethod
    def biases(config: Any) -> tuple[bool, bool, bool]:
        return bool(config.attention_bias), bool(config.attention_bias), False


class Qwen3Model(DecoderModel):
    layer_cls = Qwen3DecoderLayer


class Qwen3ForCausalLM(CausalLM):
    model_cls = Qwen3Model
