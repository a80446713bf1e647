# SPDX-License-Identifier: Apache-2.0
"""Qwen2 and Qwen2.5 (Qwen team 2024): Llama's layer with biases on q, k and v alone."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.decoder import DecoderModel, window_by_layer
from vllm.model_executor.models.llama import LlamaDecoderLayer


class Qwen2DecoderLayer(LlamaDecoderLayer):
    sliding_window = staticmethod(window_by_layer)

    @staticmethod
    def biases(config: Any) -> tuple[bool, bool, bool]:
        return True, False, False


class Qwen2Model(DecoderModel):
    layer_cls = Qwen2DecoderLayer


class Qwen2ForCausalLM(CausalLM):
    model_cls = Qwen2Model
