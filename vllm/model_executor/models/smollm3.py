# SPDX-License-Identifier: Apache-2.0
"""SmolLM3 (Bakouch et al. 2025): Llama's layer, without rotation in every fourth."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.decoder import DecoderModel, window_by_layer
from vllm.model_executor.models.llama import LlamaDecoderLayer


class SmolLM3DecoderLayer(LlamaDecoderLayer):
    sliding_window = staticmethod(window_by_layer)

    def __init__(self, vllm_config: VllmConfig, rope: RotaryEmbedding | None, prefix: str) -> None:
        rotated = vllm_config.model_config.hf_config.no_rope_layers[int(prefix.rsplit(".", 1)[1])]  # despite its name
        super().__init__(vllm_config, rope if rotated else None, prefix)


class SmolLM3Model(DecoderModel):
    layer_cls = SmolLM3DecoderLayer


class SmolLM3ForCausalLM(CausalLM):
    model_cls = SmolLM3Model
