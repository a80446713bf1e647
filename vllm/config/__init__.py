# SPDX-License-Identifier: Apache-2.0
"""The configuration of one engine: frozen records, resolved once, never changed after."""

from vllm.config.cache import CacheConfig
from vllm.config.compilation import CompilationConfig, CUDAGraphMode
from vllm.config.model import ModelConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.config.vllm import VllmConfig

__all__ = [
    "CUDAGraphMode",
    "CacheConfig",
    "CompilationConfig",
    "ModelConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "VllmConfig",
]
