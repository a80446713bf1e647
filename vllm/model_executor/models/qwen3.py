# SPDX-License-Identifier: Apache-2.0
"""Qwen3 (Qwen team 2025): Llama's layer with an RMS norm on each query and key head."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.decoder import DecoderModel
from vllm.model_executor.models.llama import LlamaDecoderLayer


class Qwen3DecoderLayer(LlamaDecoderLayer):
    qk_norm = True
    mlp_has_bias = False

    @staticmethod
    def sliding_window(config: Any, index: int) -> int | None:
        return config.sliding_window if config.layer_types[index] == "sliding_attention" else None


class Qwen3Model(DecoderModel):
    layer_cls = Qwen3DecoderLayer


class Qwen3ForCausalLM(CausalLM):
    model_cls = Qwen3Model
