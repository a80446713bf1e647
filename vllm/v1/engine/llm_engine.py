# SPDX-License-Identifier: Apache-2.0
"""The engine: requests in, one step at a time, outputs out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm.config import ModelConfig, VllmConfig
from vllm.distributed import get_dp_group
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import PromptType
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import tokenizer_of
from vllm.v1.engine.core import EngineCore, EngineStats
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.executor.abstract import Executor
from vllm.v1.metrics.reader import Metric
from vllm.v1.metrics.stats import rank_stats
from vllm.v1.request import Request, RequestStatus


class LLMEngine:
    """Input processor, scheduler, worker and output processor of one rank, driven by ``step``.

    ``generation_config``: the model's end tokens and sampling defaults. ``stats`` counts unless
    ``disable_log_stats``. Raises ``ValueError`` where the cache cannot hold one request of ``max_model_len``.
    """

    def __init__(self, vllm_config: VllmConfig, generation_config: Mapping[str, Any]) -> None:
        if vllm_config.parallel_config.distributed_executor_backend == "ray":
            raise NotImplementedError(
                "distributed_executor_backend='ray' is not supported by LLM, which is one rank of those that torchrun "
                "started: leave it out, or use vllm serve or AsyncLLM"
            )
        self.generation_config = dict(generation_config)
        config = vllm_config.model_config
        self.tokenizer = tokenizer_of(config)
        self.output_processor = OutputProcessor(self.tokenizer, log_stats=not vllm_config.disable_log_stats)
        core = self.engine_core = EngineCore(vllm_config, generation_config)
        self.worker, self.scheduler = core.worker, core.scheduler
        self.stats: EngineStats = core.stats
        self.model_executor = Executor(self.worker)
        self.vllm_config = core.vllm_config
        self.input_processor = InputProcessor(self.vllm_config, self.tokenizer, generation_config)
        self.scheduler.grammars = self.input_processor.grammars

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
                self.engine_core.add_request(
                    Request(child_id, checked.prompt_token_ids, child_params, checked.eos_token_id, arrival_time)
                )
        except ValueError:
            self.abort_request([request_id])
            raise
        self.output_processor.accepted(request_id)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Run one step on this rank and its peers; returns what requests got out of it, or out of the one before where
        steps are scheduled ahead.

        With several ranks every one calls this as long as ``has_unfinished_requests``. What it raises ends the run on
        all of them, and later calls raise ``EngineDeadError`` with that cause.
        """
        with self.engine_core.in_step():
            outputs = self.engine_core.run_step()
            processed, stopped = self.output_processor.process_outputs(outputs)
            if stopped:
                self.engine_core.abort_requests(stopped, RequestStatus.FINISHED_STOPPED)
            if (metrics := self.output_processor.metrics) is not None:
                metrics.record_rank(0, rank_stats(self))
            self.engine_core.log_stats()
        return processed

    @property
    def is_torn(self) -> bool:
        """A step has begun and will not end."""
        return bool(self.engine_core.failure)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Drop requests, at any moment between steps; ids that are not in use are ignored."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self.engine_core.abort_requests(self.output_processor.abort_requests(ids))

    def has_unfinished_requests(self) -> bool:
        """Whether a further ``step`` is due: requests here, or on any rank when the last step was agreed on."""
        return self.engine_core.has_unfinished_requests()

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
        self.engine_core.settle()
        self.reset_prefix_cache()
        self.worker.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """See ``LLM.wake_up``."""
        self.worker.wake_up(tags)

    def is_sleeping(self) -> bool:
        return bool(self.worker.asleep)

    def get_metrics(self) -> list[Metric]:
        """See ``LLM.get_metrics``."""
        metrics = self.output_processor.metrics
        if metrics is None:
            raise ValueError(
                "nothing is counted with disable_log_stats=True; make the LLM with disable_log_stats=False"
            )
        metrics.record_rank(0, rank_stats(self))
        dp_rank = get_dp_group().rank_in_group if self.vllm_config.parallel_config.world_size > 1 else 0
        config, block_size = self.model_config, self.vllm_config.cache_config.block_size
        name = str(config.served_model_name)
        return list(metrics.snapshot(name, [0], config.max_model_len, block_size, labelled=dp_rank))

    def shutdown(self) -> None:
        """Leave the other ranks and free the model; requests are refused afterwards. Again it does nothing.

        Nobody has to call it: an engine that is dropped, or alive at exit, leaves in the same way.
        """
        self.engine_core.shutdown()
