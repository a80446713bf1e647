# SPDX-License-Identifier: Apache-2.0
"""The text model of Qwen3.5 (Qwen team 2026), dense and with experts: Qwen3-Next's layers under other weight names."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.model_executor.models.causal_lm import TextPart
from vllm.model_executor.models.qwen3_next import Qwen3NextDecoderLayer, Qwen3NextForCausalLM, Qwen3NextModel


class Qwen3_5DecoderLayer(Qwen3NextDecoderLayer):
    interleaved = False

    @staticmethod
    def routed(config: Any, index: int) -> tuple[bool, bool]:
        return False, False


class Qwen3_5MoeDecoderLayer(Qwen3_5DecoderLayer):
    @staticmethod
    def routed(config: Any, index: int) -> tuple[bool, bool]:
        return True, True


class Qwen3_5Model(Qwen3NextModel):
    layer_cls = Qwen3_5DecoderLayer


class Qwen3_5MoeModel(Qwen3NextModel):
    layer_cls = Qwen3_5MoeDecoderLayer


class Qwen3_5ForCausalLM(Qwen3NextForCausalLM):
    model_cls: ClassVar[type[Qwen3NextModel]] = Qwen3_5Model
    ignored_weights = (*Qwen3NextForCausalLM.ignored_weights, r"^(model\.)?visual\.")


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    model_cls = Qwen3_5MoeModel


class Qwen3_5ForConditionalGeneration(TextPart, Qwen3_5ForCausalLM):
    model_prefix = "model.language_model"


class Qwen3_5MoeForConditionalGeneration(Qwen3_5ForConditionalGeneration):
    model_cls = Qwen3_5MoeModel
