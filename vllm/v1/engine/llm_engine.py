# SPDX-License-Identifier: Apache-2.0
"""The engine: requests in, one step at a time, outputs out."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config import ModelConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import PromptType
from vllm.logger import init_logger
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import get_tokenizer
from vllm.v1.core.kv_cache_utils import get_kv_cache_config
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.debug import watchdog
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.executor.abstract import Executor
from vllm.v1.metrics.reader import Counter, Gauge, Metric
from vllm.v1.request import Request, RequestStatus
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
        """Call before the scheduler takes in the step's result."""
        self.steps += 1
        self.tokens += output.total_num_scheduled_tokens
        self.context_tokens += output.total_num_scheduled_tokens + sum(r.num_computed_tokens for r in output.requests)

    def since(self, before: EngineStats) -> EngineStats:
        now, then = dataclasses.asdict(self), dataclasses.asdict(before)
        return EngineStats(**{name: now[name] - then[name] for name in now})


class LLMEngine:
    """Input processor, scheduler, worker and output processor of one rank, driven by ``step``.

    ``generation_config``: the model's end tokens and sampling defaults. ``stats`` counts unless
    ``disable_log_stats``. Raises ``ValueError`` where the cache cannot hold one request of ``max_model_len``.
    """

    def __init__(self, vllm_config: VllmConfig, generation_config: Mapping[str, Any]) -> None:
        self.generation_config = dict(generation_config)
        config = vllm_config.model_config
        self.tokenizer = None
        if not config.skip_tokenizer_init:
            self.tokenizer = get_tokenizer(
                config.tokenizer,
                tokenizer_mode=config.tokenizer_mode,
                trust_remote_code=config.trust_remote_code,
                revision=config.tokenizer_revision,
            )
        self.output_processor = OutputProcessor(self.tokenizer, log_stats=not vllm_config.disable_log_stats)
        self.worker = Worker(vllm_config)
        self.model_executor = Executor(self.worker)
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
                self.input_processor = InputProcessor(vllm_config, self.tokenizer, generation_config)
                self.scheduler = Scheduler(vllm_config, kv_cache_config)
                self.scheduler.grammars = self.input_processor.grammars
        except BaseException:
            self.shutdown()
            raise
        self.is_torn = False  # a step has begun and not ended
        self.stats = EngineStats()
        self._logged = (time.monotonic(), EngineStats())
        logger.info(
            "KV cache of %d tokens (%.2f GiB); a request has at most %d",
            tokens,
            kv_cache_config.total_bytes / 2**30,
            config.max_model_len,
        )

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, usage_context: Any = None) -> LLMEngine:
        vllm_config = engine_args.create_engine_config()
        return cls(vllm_config, engine_args.get_generation_config(vllm_config.model_config))

    @property
    def model_config(self) -> ModelConfig:
        return self.vllm_config.model_config

    def get_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ValueError("there is no tokenizer: the engine was made with skip_tokenizer_init=True")
        return self.tokenizer

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> str:
        """Queue a request; the next steps run it. Returns its id.

        Raises ``ValueError`` for a request that can never run and for an id in use; other requests are untouched.
        """
        if lora_request is not None or trace_headers or priority:
            raise NotImplementedError("lora_request, trace_headers and priority are not supported; leave them out")
        if not isinstance(request_id, str):
            raise TypeError(f"request_id={request_id!r} is a {type(request_id).__name__}; give a string")
        checked = self.input_processor.process_inputs(prompt, params, tokenization_kwargs)
        arrival_time = time.time() if arrival_time is None else arrival_time
        children = self.output_processor.add_request(
            request_id, checked.prompt, checked.prompt_token_ids, checked.params, arrival_time
        )
        try:
            for child_id, child_params in children:
                self.scheduler.add_request(
                    Request(child_id, checked.prompt_token_ids, child_params, checked.eos_token_id, arrival_time)
                )
        except ValueError:
            self.abort_request([request_id])
            raise
        return request_id

    def step(self) -> list[RequestOutput]:
        """Run one step on this rank and its peers; returns what requests got out of it.

        With several ranks every one calls this as long as ``has_unfinished_requests``. What it raises ends the run on
        all of them.
        """
        if self.worker.take_new_weights():
            self.scheduler.reset_prefix_cache()
        self.is_torn = True
        with self.worker.step():
            outputs = self._step()
        self.is_torn = False
        return outputs

    def _step(self) -> list[RequestOutput]:
        scheduler_output = self.scheduler.schedule()
        if not self.vllm_config.disable_log_stats:
            self.stats.record_scheduled(scheduler_output)
            self.output_processor.record_scheduled(scheduler_output.started)
        runner_output = self.worker.execute_model(
            scheduler_output, has_unfinished=self.scheduler.has_unfinished_requests()
        )
        outputs = self.scheduler.update_from_output(scheduler_output, runner_output)
        processed, stopped = self.output_processor.process_outputs(outputs)
        self.scheduler.finish_requests(stopped, RequestStatus.FINISHED_STOPPED)
        if not self.vllm_config.disable_log_stats:
            self.stats.output_tokens += sum(len(output.new_token_ids) for output in outputs)
            self._log_stats()
        return processed

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Drop requests, at any moment between steps; ids that are not in use are ignored."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self.scheduler.finish_requests(self.output_processor.abort_requests(ids), RequestStatus.FINISHED_ABORTED)

    def has_unfinished_requests(self) -> bool:
        """Whether a further ``step`` is due: requests here, or on any rank when the last step was agreed on."""
        return self.scheduler.has_unfinished_requests() or (
            self.vllm_config.parallel_config.world_size > 1 and self.worker.any_unfinished_across_dp
        )

    def keep_step(self, since: int) -> None:
        """Take part in what the other ranks do until they are done, without requests of this rank's own.

        For a call that failed on this rank between steps and began at step ``since``: each call of several ranks makes
        a step at least, so the others wait for that one even where none of them has requests.
        """
        if self.vllm_config.parallel_config.world_size > 1 and not self.is_torn:
            while self.worker.num_steps == since or self.has_unfinished_requests():
                self.step()

    def get_num_unfinished_requests(self) -> int:
        """Unfinished requests of this rank; one with ``n`` completions counts once."""
        return self.output_processor.get_num_unfinished_requests()

    def reset_prefix_cache(self) -> bool:
        return self.scheduler.reset_prefix_cache()

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Take ``tokenizer`` for the requests that come from now on; the model's end tokens stay as they are."""
        self.tokenizer = tokenizer
        self.input_processor = InputProcessor(self.vllm_config, tokenizer, self.generation_config)
        self.scheduler.grammars = self.input_processor.grammars
        self.output_processor.set_tokenizer(tokenizer)

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """See ``LLM.sleep``."""
        if level not in (1, 2):
            raise ValueError(f"sleep(level={level!r}): 1 keeps the weights, 2 drops them; give one of them")
        if count := self.get_num_unfinished_requests():
            raise ValueError(f"sleep: {count} requests are unfinished; let them end or abort them first")
        self.reset_prefix_cache()
        self.worker.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """See ``LLM.wake_up``."""
        self.worker.wake_up(tags)

    def is_sleeping(self) -> bool:
        return bool(self.worker.asleep)

    def get_metrics(self) -> list[Metric]:
        """See ``LLM.get_metrics``."""
        if self.vllm_config.disable_log_stats:
            raise ValueError(
                "nothing is counted with disable_log_stats=True; make the LLM with disable_log_stats=False"
            )
        pool, labels = self.scheduler.kv_cache_manager.pool, {"model_name": str(self.model_config.served_model_name)}
        usage = 1 - pool.num_free / max(pool.num_blocks - 1, 1)
        return [
            Gauge(name="vllm:num_requests_running", labels=labels, value=len(self.scheduler.running)),
            Gauge(name="vllm:num_requests_waiting", labels=labels, value=len(self.scheduler.waiting)),
            Gauge(name="vllm:kv_cache_usage_perc", labels=labels, value=usage),
            Counter(name="vllm:generation_tokens", labels=labels, value=self.stats.output_tokens),
            Counter(name="vllm:engine_steps", labels=labels, value=self.stats.steps),
            Counter(name="vllm:engine_tokens", labels=labels, value=self.stats.tokens),
        ]

    def shutdown(self) -> None:
        """Leave the other ranks and free the model; requests are refused afterwards. Again it does nothing.

        Nobody has to call it: an engine that is dropped, or alive at exit, leaves in the same way.
        """
        self.worker.shutdown()

    def _log_stats(self) -> None:
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
