# SPDX-License-Identifier: Apache-2.0
"""One rank: its device, its groups, its model runner and its share of memory."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch

from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed import GroupLease, get_ep_group, get_world_group
from vllm.distributed.eplb import ExpertLoadBalancer
from vllm.distributed.parallel_state import check_same_on_all_ranks, tell_all_launched
from vllm.kernels.ops import check_fp8_cache
from vllm.kernels.table import choose_anew
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import FusedMoE
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.platforms import current_platform
from vllm.platforms.host_limits import Limit, tightest, usable_processors
from vllm.v1.core.kv_cache_utils import useful_cache_bytes
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.debug import watchdog
from vllm.v1.debug.nan_trace import install_nan_trace
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.metrics.stats import StepCounts
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.transfers import ThreadStream, is_host
from vllm.v1.worker.gpu_model_runner import GPUModelRunner, LaunchedStep
from vllm.v1.worker.settings import settings_of

logger = init_logger(__name__)


class Worker:
    """Runs steps on one rank. Every method is called on every rank, in the same order."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self.platform = current_platform
        # Of "weights" and "kv_cache", what sleep() took and wake_up() has not brought back.
        self.asleep: set[str] = set()
        self._profiler: torch.profiler.profile | None = None
        self.groups: GroupLease | None = None

    def init_device(self) -> None:
        """Join the other ranks.

        Raises:
            ValueError: the world's size is not TP × DP (nor, with an external launcher, a multiple), or there are fewer
                devices than ranks.
        """
        parallel = self.vllm_config.parallel_config
        self.groups = GroupLease(
            parallel.tensor_parallel_size,
            parallel.data_parallel_size,
            parallel.enable_expert_parallel,
            replicas=parallel.distributed_executor_backend == "external_launcher",
            separate_twins=self.vllm_config.scheduler_config.async_scheduling,
        )
        # Ranks drop an engine together, and none may be left when the interpreter goes: parallel_state sees to that.
        weakref.finalize(self, self.groups.release).atexit = False
        watchdog.install(get_world_group())
        self.device = get_world_group().device
        self._share_host()
        choose_anew(self.device.type)
        if self.vllm_config.cache_config.is_fp8:
            check_fp8_cache(self.device.type)
        self.runner = GPUModelRunner(self.vllm_config, self.platform, self.device)

    def check_settings(self, generation_config: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` on every rank where one was started with another model or other settings."""
        check_same_on_all_ranks(get_world_group(), settings_of(self.vllm_config, generation_config))

    def _share_host(self) -> None:
        """Learn what limits all ranks have, those of other replicas too. No more threads than processors: those that
        are put off hold up all others of a kernel. The user's word in OMP_NUM_THREADS counts more."""
        limits = self.platform.processor_limits()
        both = tell_all_launched("limits", (limits, self._memory_limits()))
        everyones, self.memory_limits_of_all = zip(*both, strict=True)
        if limits and not os.environ.get("OMP_NUM_THREADS"):
            torch.set_num_threads(min(torch.get_num_threads(), usable_processors(everyones, limits)))

    def load_model(self) -> None:
        with torch.device(self.device):
            self.runner.model = cast(CausalLM, get_model(self.vllm_config))
        self.runner.model.wait_for_steps = self.runner.stream.wait
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
        limit, sharers = tightest(self._memory_limits(), self.memory_limits_of_all)
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

    def _memory_limits(self) -> list[Limit]:
        return self.platform.memory_limits(self.device, self.vllm_config.cache_config.gpu_memory_utilization)

    def _given_memory(self) -> int | None:
        cache = self.vllm_config.cache_config
        if cache.kv_cache_memory_bytes is None and is_host(self.device) and envs.VLLM_CPU_KVCACHE_SPACE:
            return int(envs.VLLM_CPU_KVCACHE_SPACE * 2**30)
        return cache.kv_cache_memory_bytes

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        with torch.device(self.device):
            self.runner.initialize_kv_cache(kv_cache_config)
        interval = self.vllm_config.parallel_config.eplb_step_interval
        if interval is not None:
            layers = [module for module in self.runner.model.modules() if isinstance(module, FusedMoE)]
            self.runner.balancer = ExpertLoadBalancer(layers, get_ep_group(), interval)
        self.nan_trace = install_nan_trace(self.runner.model)
        self.runner.is_watched = self.nan_trace is not None
        self.runner.capture_model()

    # --- between steps --------------------------------------------------------------------------------------------

    @property
    def model_runner(self) -> GPUModelRunner:
        """For code written for upstream: what it reads and writes there no step in flight does."""
        self.wait_for_device()
        return self.runner

    def wait_for_device(self) -> None:
        """Before anything that may change what a step in flight reads: weights, caches."""
        self.runner.stream.wait()

    def get_model(self) -> CausalLM:
        self.wait_for_device()
        return self.runner.model

    def apply_model(self, func: Callable[[CausalLM], Any]) -> Any:
        return func(self.get_model())

    def take_stale_caches(self) -> bool:
        """Whether ``load_weights`` changed the model since the last call, or captures in service wrote over the caches:
        what was computed before means nothing then.

        Raises:
            ValueError: the engine sleeps, or weights have not come that sleep(level=2) dropped, or that lie in one
                quantised matrix with new ones.
        """
        if self.asleep:
            raise ValueError(f"the engine sleeps ({', '.join(sorted(self.asleep))} given back): call wake_up() first")
        model = self.runner.model
        if model.missing_weights or model.held_forms.found:
            names = sorted({*model.missing_weights, *model.held_forms.found})
            raise ValueError(
                f"{len(names)} weights were dropped by sleep(level=2), or others that lie beside them quantised have "
                f"come, and have not come back ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}): give them "
                "to the model's load_weights()"
            )
        changed = model.has_new_weights
        if changed:
            model.has_new_weights = False
            # Head and embedding may come in any order, so whether they are alike is known now.
            with torch.no_grad():
                model.lm_head.settle_tie()
        overwritten, self.runner.has_overwritten_caches = self.runner.has_overwritten_caches, False
        return changed or overwritten

    def sleep(self, level: int = 1) -> None:
        """Give back the KV cache; with ``level`` 2 the weights too, on devices with 1 as well (kept on the host)."""
        self.wait_for_device()
        if "kv_cache" not in self.asleep:
            self.runner.release_kv_cache()
        if level == 2:
            self.runner.model.drop_weights()
        elif not is_host(self.device) and "weights" not in self.asleep:
            self.runner.model.move_weights(torch.device("cpu"))
        self.asleep = {"weights", "kv_cache"}
        self.platform.empty_cache()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Bring back what ``tags`` name, all by default; what is awake stays so."""
        names = ("weights", "kv_cache")
        if wrong := [tag for tag in tags or () if tag not in names]:
            raise ValueError(
                f"wake_up(tags={list(tags or ())!r}): {wrong} unknown; give some of {list(names)}, or None"
            )
        waking = self.asleep & set(names if tags is None else tags)
        if "weights" in waking and not is_host(self.device):
            self.runner.model.move_weights(self.device)
        if "kv_cache" in waking:
            with torch.device(self.device):
                self.runner.restore_kv_cache()
        self.asleep -= waking

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> None:
        """Start torch's profiler, or stop it and write a Chrome trace to ``VLLM_TORCH_PROFILER_DIR``."""
        if is_start == (self._profiler is not None):
            raise ValueError("the profiler runs already" if is_start else "the profiler was not started")
        if not is_start:
            profiler, self._profiler = self._profiler, None
            assert profiler is not None
            profiler.stop()
            return
        if not envs.VLLM_TORCH_PROFILER_DIR:
            raise ValueError("VLLM_TORCH_PROFILER_DIR is not set: set it to the folder that traces are written to")
        name = f"{profile_prefix or 'vllm'}-rank{get_world_group().rank}"
        activities = torch.profiler.supported_activities()
        write = torch.profiler.tensorboard_trace_handler(envs.VLLM_TORCH_PROFILER_DIR, name)
        options: dict[str, Any] = {}
        if isinstance(self.runner.stream, ThreadStream):  # else the profiler looks at the calling thread alone
            options["experimental_config"] = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        self._profiler = torch.profiler.profile(activities=activities, on_trace_ready=write, **options)
        self._profiler.start()

    def execute_model(self, scheduler_output: SchedulerOutput, has_unfinished: bool = True) -> ModelRunnerOutput:
        if self.nan_trace is not None:
            self.nan_trace.begin_step(scheduler_output.requests)
        output = self.runner.execute_model(scheduler_output, has_unfinished)
        if self.nan_trace is not None:
            self.nan_trace.end_step(output)
        return output

    def launch(self, scheduler_output: SchedulerOutput, has_unfinished: bool) -> LaunchedStep:
        """``execute_model`` in two parts, between which the next step may be launched: see ``GPUModelRunner``."""
        assert self.nan_trace is None, "VLLM_DEBUG_NAN checks one step at a time"
        return self.runner.launch(scheduler_output, has_unfinished)

    def finish(self, step: LaunchedStep) -> ModelRunnerOutput:
        return self.runner.finish(step)

    def step(self) -> AbstractContextManager[None]:
        """Around all of one step."""
        return watchdog.running(self.runner.dp_rank, self.num_steps)

    def cause_of(self, error: BaseException) -> BaseException:
        """What ended a step that ended with ``error``: where the device failed, that is why the host's collective was
        given up."""
        if isinstance(error, RuntimeError):
            try:
                self.runner.stream.check()
            except BaseException as cause:
                return cause
        return error

    @property
    def num_steps(self) -> int:
        """How many steps were agreed on, counted alike on all ranks."""
        return self.runner.step

    @property
    def counts(self) -> StepCounts:
        return self.runner.counts

    @property
    def any_unfinished_across_dp(self) -> bool:
        """Whether any DP rank had unfinished requests when the last step was agreed on."""
        return self.runner.any_unfinished_across_dp

    def shutdown(self) -> None:
        """Let go of model, caches and groups; again it does nothing."""
        if (runner := vars(self).pop("runner", None)) is not None:
            runner.stream.close()
        if self.groups is not None:
            self.groups.release()
        self.platform.empty_cache()

    def __getattr__(self, name: str) -> Any:
        if name == "runner":
            raise RuntimeError("this engine has been shut down: make a new LLM")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
