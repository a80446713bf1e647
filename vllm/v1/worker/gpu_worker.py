# SPDX-License-Identifier: Apache-2.0
"""One rank: its device, its groups, its model runner and its share of memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch

from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    ensure_model_parallel_initialized,
    get_dp_group,
    get_world_group,
    init_distributed_environment,
)
from vllm.distributed.parallel_state import check_same_on_all_ranks
from vllm.logger import init_logger
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.platforms import current_platform
from vllm.platforms.host_limits import tightest, usable_processors
from vllm.v1.core.kv_cache_utils import useful_cache_bytes
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.debug import watchdog
from vllm.v1.debug.nan_trace import install_nan_trace
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.settings import settings_of

logger = init_logger(__name__)


class Worker:
    """Runs steps on one rank. Every method is called on every rank, in the same order."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self.platform = current_platform

    def init_device(self) -> None:
        """Join the other ranks.

        Raises:
            ValueError: the world's size is not TP × DP, or there are fewer devices than ranks.
        """
        parallel = self.vllm_config.parallel_config
        init_distributed_environment()
        ensure_model_parallel_initialized(
            parallel.tensor_parallel_size, parallel.data_parallel_size, parallel.enable_expert_parallel
        )
        watchdog.install(get_world_group())
        self._limit_threads()
        self.device = self.platform.get_device(int(os.environ.get("LOCAL_RANK", "0")))
        self.runner = GPUModelRunner(self.vllm_config, self.platform, self.device)

    def check_settings(self, generation_config: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` on every rank where one was started with another model or other settings."""
        check_same_on_all_ranks(get_world_group(), settings_of(self.vllm_config, generation_config))

    def _limit_threads(self) -> None:
        """No more threads than processors: those that are put off hold up all others of a kernel. The user's word in
        OMP_NUM_THREADS counts more."""
        limits = self.platform.processor_limits()
        everyones = get_world_group().all_gather_object(limits)
        if limits and not os.environ.get("OMP_NUM_THREADS"):
            torch.set_num_threads(min(torch.get_num_threads(), usable_processors(everyones, limits)))

    def load_model(self) -> None:
        with torch.device(self.device):
            self.runner.model = cast(CausalLM, get_model(self.vllm_config))
        get_world_group().wait_for_all("load_model", envs.VLLM_LOAD_TIMEOUT_S)

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return self.runner.get_kv_cache_specs()

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache and recurrent states on this rank.

        ``kv_cache_memory_bytes`` decides where given; on CPU ``VLLM_CPU_KVCACHE_SPACE`` (GiB) does next. Else it is
        what can be put to use, where the memory that this rank may have holds that beside the largest step. All ranks
        get the smallest rank's answer: schedulers that decide alike need caches of one size.
        """
        world = get_world_group()
        step_bytes = self.runner.profile_run()
        limits = self.platform.memory_limits(self.device, self.vllm_config.cache_config.gpu_memory_utilization)
        limit, sharers = tightest(limits, world.all_gather_object(limits))
        left = max(int(limit.free) // sharers - step_bytes, 0)
        found = "%.3f GiB may be taken under %s by %d rank(s), a step takes %.3f GiB of a rank's share"
        values = (limit.free / 2**30, limit.label, sharers, step_bytes / 2**30)
        wanted = self._given_memory()
        if wanted is None:
            wanted = min(left, useful_cache_bytes(self.get_kv_cache_specs(), self.vllm_config))
            logger.info(found, *values)
        elif wanted > left:
            text = f"a KV cache of {wanted / 2**30:.3f} GiB is asked for, which may fail in service: {found}"
            logger.warning(text, *values)
        return min(world.all_gather_object(wanted))

    def _given_memory(self) -> int | None:
        cache = self.vllm_config.cache_config
        if cache.kv_cache_memory_bytes is None and self.platform.device_type == "cpu" and envs.VLLM_CPU_KVCACHE_SPACE:
            return int(envs.VLLM_CPU_KVCACHE_SPACE * 2**30)
        return cache.kv_cache_memory_bytes

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        with torch.device(self.device):
            self.runner.initialize_kv_cache(kv_cache_config)
        self.nan_trace = install_nan_trace(self.runner.model)

    def execute_model(self, scheduler_output: SchedulerOutput, has_unfinished: bool = True) -> ModelRunnerOutput:
        if self.nan_trace is not None:
            self.nan_trace.begin_step(scheduler_output.requests)
        output = self.runner.execute_model(scheduler_output, has_unfinished)
        if self.nan_trace is not None:
            self.nan_trace.end_step(output)
        return output

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around all of one step: what goes wrong inside leaves the lockstep, so the other ranks hear of it."""
        with watchdog.running(get_dp_group().rank_in_group, self.num_steps):
            yield

    @property
    def num_steps(self) -> int:
        """How many steps were agreed on, counted alike on all ranks."""
        return self.runner.step

    @property
    def any_unfinished_across_dp(self) -> bool:
        """Whether any DP rank had unfinished requests when the last step was agreed on."""
        return self.runner.any_unfinished_across_dp

    def shutdown(self) -> None:
        watchdog.uninstall()
        cleanup_dist_env_and_memory()
