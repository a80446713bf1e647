# SPDX-License-Identifier: Apache-2.0
"""Which class serves which architecture, imported when it is first asked for."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from torch import nn

_MODELS = "vllm.model_executor.models"


class _ModelRegistry:
    """Architecture name (``config.json``'s ``architectures``) → model class."""

    def __init__(self, known: dict[str, str]) -> None:
        self._known: dict[str, str | type[nn.Module]] = dict(known)

    def get_supported_archs(self) -> list[str]:
        return sorted(self._known)

    def register_model(self, model_arch: str, model_cls: type[nn.Module] | str) -> None:
        """Serve ``model_arch`` by ``model_cls``: a class, or ``"module:class"`` to import it on first use."""
        if isinstance(model_cls, str):
            module, colon, name = model_cls.partition(":")
            if not (module and colon and name.isidentifier()):
                raise ValueError(f"model_cls={model_cls!r} of {model_arch}: give a class or 'module:class'")
        elif not (isinstance(model_cls, type) and issubclass(model_cls, nn.Module)):
            raise ValueError(
                f"model_cls={model_cls!r} of {model_arch} is no nn.Module class: give a class or 'module:class'"
            )
        self._known[model_arch] = model_cls

    def resolve_model_cls(self, architectures: str | Iterable[str]) -> tuple[type[nn.Module], str]:
        """The class of the first known one of ``architectures``, and that architecture's name."""
        wanted = [architectures] if isinstance(architectures, str) else list(architectures)
        for architecture in wanted:
            entry = self._known.get(architecture)
            if entry is None:
                continue
            if isinstance(entry, str):
                module, _, name = entry.partition(":")
                entry = getattr(importlib.import_module(module), name)
            return entry, architecture
        raise ValueError(
            f"no model for architectures={wanted}; known: {', '.join(self.get_supported_archs())}. "
            "Choose a checkpoint of a known architecture or add one with ModelRegistry.register_model"
        )


ModelRegistry = _ModelRegistry(
    {
        "DeepseekV2ForCausalLM": f"{_MODELS}.deepseek_v2:DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM": f"{_MODELS}.deepseek_v2:DeepseekV3ForCausalLM",
        "Gemma2ForCausalLM": f"{_MODELS}.gemma2:Gemma2ForCausalLM",
        "Gemma3ForCausalLM": f"{_MODELS}.gemma3:Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration": f"{_MODELS}.gemma3:Gemma3ForConditionalGeneration",
        "Glm4MoeForCausalLM": f"{_MODELS}.glm4_moe:Glm4MoeForCausalLM",
        "GptOssForCausalLM": f"{_MODELS}.gpt_oss:GptOssForCausalLM",
        "LlamaForCausalLM": f"{_MODELS}.llama:LlamaForCausalLM",
        "MinistralForCausalLM": f"{_MODELS}.mistral:MistralForCausalLM",
        "MiniMaxM2ForCausalLM": f"{_MODELS}.minimax_m2:MiniMaxM2ForCausalLM",
        "Mistral3ForConditionalGeneration": f"{_MODELS}.mistral:Mistral3ForConditionalGeneration",
        "MistralForCausalLM": f"{_MODELS}.mistral:MistralForCausalLM",
        "MixtralForCausalLM": f"{_MODELS}.mixtral:MixtralForCausalLM",
        "Phi3ForCausalLM": f"{_MODELS}.phi3:Phi3ForCausalLM",
        "Qwen2ForCausalLM": f"{_MODELS}.qwen2:Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM": f"{_MODELS}.qwen2_moe:Qwen2MoeForCausalLM",
        "Qwen3_5ForCausalLM": f"{_MODELS}.qwen3_5:Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration": f"{_MODELS}.qwen3_5:Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForCausalLM": f"{_MODELS}.qwen3_5:Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration": f"{_MODELS}.qwen3_5:Qwen3_5MoeForConditionalGeneration",
        "Qwen3ForCausalLM": f"{_MODELS}.qwen3:Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM": f"{_MODELS}.qwen3_moe:Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM": f"{_MODELS}.qwen3_next:Qwen3NextForCausalLM",
        "SmolLM3ForCausalLM": f"{_MODELS}.smollm3:SmolLM3ForCausalLM",
    }
)
