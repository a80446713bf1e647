# SPDX-License-Identifier: Apache-2.0
from vllm.v1.engine.async_llm import AsyncLLM as AsyncLLMEngine
from vllm.v1.engine.exceptions import EngineDeadError as AsyncEngineDeadError

__all__ = ["AsyncEngineDeadError", "AsyncLLMEngine"]
