# SPDX-License-Identifier: Apache-2.0
from vllm.v1.engine.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
