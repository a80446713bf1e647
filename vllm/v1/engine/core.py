# SPDX-License-Identifier: Apache-2.0
"""The engine of one rank without texts: worker and scheduler, one step at a time.

With ``async_scheduling`` a step is scheduled, agreed on and launched before the one before it is taken in, so that the
device has work while the host thinks. One thread does all of that in one order: launch N + 1, then take in N. So when
the ranks agree that none has requests left, nothing runs in that step, and the one before is taken in at its end.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import get_kv_cache_config
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.debug import watchdog
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.outputs import EngineCoreOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.gpu_model_runner import LaunchedStep
from vllm.v1.worker.gpu_worker import Worker

logger = init_logger(__name__)

_LOG_INTERVAL_S = 10.0


@dataclass
class EngineStats:
    """What the engine has done. ``context_tokens``: keys and values read, summed over the requests of each step."""

    steps: int = 0
    tokens: int = 0
    context_tokens: int = 0
    output_tokens: int = 0

    def record_scheduled(self, output: SchedulerOutput) -> None:
        self.steps += 1
        self.tokens += output.total_num_scheduled_tokens
        self.context_tokens += output.total_num_scheduled_tokens + sum(output.num_computed_tokens)

    def since(self, before: EngineStats) -> EngineStats:
        now, then = dataclasses.asdict(self), dataclasses.asdict(before)
        return EngineStats(**{name: now[name] - then[name] for name in now})


class _InStep:
    """A step while it runs; a class, since generators one in the other take many times as long to enter and to leave.

    What goes wrong inside leaves the lockstep, so that the other ranks hear of it.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core, self._running = core, core.worker.step()

    def __enter__(self) -> None:
        self._running.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self._running.__exit__(None, None, None)
            return
        cause = self._core.worker.cause_of(error)
        self._core.fail(cause)
        self._running.__exit__(type(cause), cause, trace)
        if cause is not error:
            raise cause


class EngineCore:
    """Worker and scheduler of one rank, driven by ``step``, which every rank of an engine calls together.

    ``generation_config``: must be the same on all ranks. ``stats`` counts unless ``disable_log_stats``. ``failure``:
    what a step failed with, after which none can follow. Raises ``ValueError`` where the cache cannot hold one request
    of ``max_model_len``.
    """

    def __init__(self, vllm_config: VllmConfig, generation_config: Mapping[str, Any]) -> None:
        config = vllm_config.model_config
        self.worker = Worker(vllm_config)
        try:
            self.worker.init_device()
            self.worker.check_settings(generation_config)
            with watchdog.telling("the engine's start"):
                self.worker.load_model()
                available = self.worker.determine_available_memory()
                kv_cache_config = get_kv_cache_config(
                    self.worker.get_kv_cache_specs(), available, vllm_config, config.fit_max_model_len
                )
                self.worker.initialize_kv_cache(kv_cache_config)
                tokens = (kv_cache_config.num_blocks - 1) * kv_cache_config.block_size
                if tokens < config.max_model_len:
                    logger.warning(
                        "max_model_len=%d: the KV cache does not hold %d tokens", tokens, config.max_model_len
                    )
                    config = dataclasses.replace(config, max_model_len=tokens)
                    vllm_config = dataclasses.replace(vllm_config, model_config=config)
                self.vllm_config = vllm_config
                self.scheduler = Scheduler(vllm_config, kv_cache_config)
        except BaseException:
            self.shutdown()
            raise
        self.failure = ""
        self._in_flight: tuple[SchedulerOutput, LaunchedStep] | None = None
        self.stats = EngineStats()
        self._logged = (time.monotonic(), EngineStats())
        logger.info(
            "KV cache of %d tokens (%.2f GiB); a request has at most %d",
            tokens,
            kv_cache_config.total_bytes / 2**30,
            config.max_model_len,
        )

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises ``ValueError`` for one that can never run; other requests are untouched."""
        self.scheduler.add_request(request)

    def abort_requests(
        self, request_ids: Iterable[str], status: RequestStatus = RequestStatus.FINISHED_ABORTED
    ) -> None:
        """End requests, between steps or in one; ids that have ended are ignored."""
        ids, requests = list(request_ids), self.scheduler.requests
        # An abort comes after the step in flight; where a stop string ends a request, that was the step before.
        if self._in_flight is not None and status is RequestStatus.FINISHED_ABORTED:
            self.scheduler.cache_in_flight(requests[name] for name in ids if name in requests)
        self.scheduler.finish_requests(ids, status)

    def has_unfinished_requests(self) -> bool:
        """Whether a further ``step`` is due: requests here, or on any rank when the last step was agreed on, or a step
        in flight."""
        return (
            self.scheduler.has_unfinished_requests()
            or self._in_flight is not None
            or (self.vllm_config.parallel_config.world_size > 1 and self.worker.any_unfinished_across_dp)
        )

    def in_step(self) -> AbstractContextManager[None]:
        """Around all of a step. What it raises leaves the lockstep, so that the other ranks hear of it; after that
        ``EngineDeadError`` is all that comes of a step."""
        if self.failure:
            raise EngineDeadError(f"no step follows one that failed, with {self.failure}; make a new engine")
        if self.worker.take_stale_caches():
            self.scheduler.reset_prefix_cache()
        return _InStep(self)

    def fail(self, error: BaseException) -> None:
        """``error`` ended a step: none follows it."""
        self.failure, self._in_flight = repr(error), None

    def step(self) -> list[EngineCoreOutput]:
        """Run one step on this rank and its peers. What it raises ends the run on all of them."""
        with self.in_step():
            return self.run_step()

    def run_step(self) -> list[EngineCoreOutput]:
        """The step, inside ``in_step``; what comes of it may be returned by the next one."""
        outputs = self._take_in() if self._in_flight is not None and self.scheduler.must_wait else []
        scheduler_output = self.scheduler.schedule()
        if not self.vllm_config.disable_log_stats:
            self.stats.record_scheduled(scheduler_output)
        has_unfinished = self.scheduler.has_unfinished_requests()
        if not self.vllm_config.scheduler_config.async_scheduling:
            return self._update(scheduler_output, self.worker.execute_model(scheduler_output, has_unfinished))
        launched = self.worker.launch(scheduler_output, has_unfinished)
        outputs += self._take_in()
        self._in_flight = scheduler_output, launched
        if launched.inputs is None:
            outputs += self._take_in()
        return outputs

    def settle(self) -> None:
        """Take in the step in flight of an engine that has no requests any more: it was for rows that nobody wants."""
        outputs = self._take_in()
        assert not outputs, f"a step in flight gives {len(outputs)} outputs, of requests that have ended"

    def _take_in(self) -> list[EngineCoreOutput]:
        """The results of the step in flight, if there is one."""
        if self._in_flight is None:
            return []
        (scheduler_output, launched), self._in_flight = self._in_flight, None
        return self._update(scheduler_output, self.worker.finish(launched))

    def _update(self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        outputs = self.scheduler.update_from_output(scheduler_output, runner_output)
        if not self.vllm_config.disable_log_stats:
            self.stats.output_tokens += sum(len(output.new_token_ids) for output in outputs)
        return outputs

    def log_stats(self) -> None:
        """Once in a while, log what was done since the last time."""
        if self.vllm_config.disable_log_stats:
            return
        then, before = self._logged
        now = time.monotonic()
        if now - then < _LOG_INTERVAL_S:
            return
        done = self.stats.since(before)
        logger.info(
            "%d requests running, %d waiting; %.1f tok/s run, %.1f tok/s generated in %d steps",
            len(self.scheduler.running),
            len(self.scheduler.waiting),
            done.tokens / (now - then),
            done.output_tokens / (now - then),
            done.steps,
        )
        self._logged = (now, dataclasses.replace(self.stats))

    def shutdown(self) -> None:
        """Leave the other ranks and free the model; requests are refused afterwards. Again it does nothing.

        Nobody has to call it: an engine that is dropped, or alive at exit, leaves in the same way.
        """
        self.worker.shutdown()
