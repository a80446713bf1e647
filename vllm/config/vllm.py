# SPDX-License-Identifier: Apache-2.0
"""All of one engine's configuration, and the checks that need more than one part of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.config.cache import CacheConfig
from vllm.config.compilation import CompilationConfig, CUDAGraphMode
from vllm.config.model import ModelConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.scheduler import SchedulerConfig


@dataclass(frozen=True)
class VllmConfig:
    """Everything that an engine is built from."""

    model_config: ModelConfig
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    compilation_config: CompilationConfig = field(default_factory=CompilationConfig)
    disable_log_stats: bool = True

    def __post_init__(self) -> None:
        scheduler, model = self.scheduler_config, self.model_config
        if not scheduler.enable_chunked_prefill and scheduler.max_num_batched_tokens < model.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens={scheduler.max_num_batched_tokens} is below max_model_len="
                f"{model.max_model_len} and chunked prefill is off: a long prompt could never run; raise the former, "
                "lower the latter or set enable_chunked_prefill=True"
            )
        graphs = self.compilation_config
        # a step of the largest count is padded to the next size, but decodes are captured alone
        name, limit = "max_num_batched_tokens", scheduler.max_num_batched_tokens
        most = graphs.padded_size(limit)
        if graphs.cudagraph_mode is CUDAGraphMode.FULL_DECODE_ONLY:
            name, limit = "max_num_seqs", scheduler.max_num_seqs
            most = limit
        if too_large := [size for size in graphs.cudagraph_capture_sizes if size > most]:
            raise ValueError(
                f"cudagraph_capture_sizes {too_large}: no step has more rows than {name}={limit}; leave them out, or "
                f"raise {name}"
            )
