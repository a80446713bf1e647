# SPDX-License-Identifier: Apache-2.0
"""An LLM inference engine for TP × DP × EP ranks, with the public interface of upstream's vLLM 0.33.

``import vllm`` loads neither torch nor transformers; each name below does when it is first used.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.llm import LLM
    from vllm.inputs import PromptType, TextPrompt, TokensPrompt
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

# torch's OpenMP reads it when it is loaded. Its threads then sleep after some 50 us of waiting; by default they keep a
# core busy for milliseconds after each operation, and whoever else wants that core puts them off when work comes.
if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")

__version__ = "0.33.0+arc.1"
__version_tuple__ = (0, 33, 0, "arc.1")

from vllm import _upstream_names

_upstream_names.install()

_WHERE = {
    "LLM": "vllm.entrypoints.llm",
    "LLMEngine": "vllm.v1.engine.llm_engine",
    "EngineArgs": "vllm.engine.arg_utils",
    "ModelRegistry": "vllm.model_executor.models.registry",
    "SamplingParams": "vllm.sampling_params",
    "RequestOutput": "vllm.outputs",
    "CompletionOutput": "vllm.outputs",
    "TokensPrompt": "vllm.inputs",
    "TextPrompt": "vllm.inputs",
    "PromptType": "vllm.inputs",
    "PoolingParams": "vllm.pooling_params",
    "AsyncEngineArgs": "vllm.engine.arg_utils",
    "AsyncLLMEngine": "vllm.engine.async_llm_engine",
    **dict.fromkeys(
        (
            "ClassificationOutput",
            "ClassificationRequestOutput",
            "EmbeddingOutput",
            "EmbeddingRequestOutput",
            "PoolingOutput",
            "PoolingRequestOutput",
            "ScoringOutput",
            "ScoringRequestOutput",
        ),
        "vllm.outputs",
    ),
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineArgs",
    "LLMEngine",
    "ModelRegistry",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "__version_tuple__",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(importlib.import_module(_WHERE[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'vllm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
