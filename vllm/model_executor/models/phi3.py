# SPDX-License-Identifier: Apache-2.0
"""Phi-3 and Phi-4 (Abdin et al. 2024): Llama's layer, its projections of one input stored as one tensor."""

from __future__ import annotations

from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.decoder import DecoderModel
from vllm.model_executor.models.mistral import MistralDecoderLayer


class Phi3DecoderLayer(MistralDecoderLayer):
    fused = True


class Phi3Model(DecoderModel):
    layer_cls = Phi3DecoderLayer
    partial_rotary = True


class Phi3ForCausalLM(CausalLM):
    model_cls = Phi3Model
