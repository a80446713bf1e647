# SPDX-License-Identifier: Apache-2.0
"""Offline inference: prompts in, completions out."""

from __future__ import annotations

import contextlib
import functools
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from tqdm.auto import tqdm

from vllm._upstream_names import refuse
from vllm.beam_search import BeamSearch, BeamSearchOutput
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.chat_utils import load_chat_template, render_chat, split_conversations
from vllm.inputs import PromptType, split_prompts, split_tokenization_kwargs
from vllm.logger import init_logger
from vllm.logprobs import SampleLogprobs
from vllm.outputs import RequestOutput
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from vllm.transformers_utils.config import HfOverrides, sampling_defaults
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.reader import Metric

logger = init_logger(__name__)

_Call = TypeVar("_Call", bound=Callable[..., Any])


def _joint(call: _Call) -> _Call:
    """A call that all ranks make together. Where it fails on one rank, that rank first keeps step with the others.

    So bad input costs the one who gave it: the others get their answers, and the error is raised here after that.
    """

    @functools.wraps(call)
    def joint(self: LLM, *args: Any, **kwargs: Any) -> Any:
        engine = self.llm_engine
        since = engine.worker.num_steps
        try:
            return call(self, *args, **kwargs)
        except BaseException as error:
            if engine.vllm_config.parallel_config.world_size > 1 and not engine.is_torn:
                logger.warning("%s failed on this rank, which keeps step with the others: %r", call.__name__, error)
                with _interrupts_between_steps():
                    engine.keep_step(since)
            raise

    return cast(_Call, joint)


class LLM:
    """A model and the engine that runs it.

    The arguments are those of ``vllm.EngineArgs``, which says what they mean, and ``chat_template`` (Jinja text or the
    path of a file). Under torchrun every rank makes the same ``LLM``; the TP ranks of a DP group then call its methods
    with the same prompts, different DP groups with their own, and with none where a group has nothing to do.
    """

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: Any = "auto",
        quantization: str | None = None,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        chat_template: Path | str | None = None,
        seed: int = 0,
        gpu_memory_utilization: float = EngineArgs.gpu_memory_utilization,
        enforce_eager: bool = False,
        hf_overrides: HfOverrides = None,
        kv_cache_memory_bytes: int | str | None = None,
        compilation_config: Any = None,
        data_parallel_size: int = 1,
        enable_expert_parallel: bool = False,
        distributed_executor_backend: str | None = None,
        max_model_len: int | str | None = None,
        max_num_seqs: int | str | None = None,
        max_num_batched_tokens: int | str | None = None,
        block_size: int | None = None,
        num_gpu_blocks_override: int | None = None,
        enable_prefix_caching: bool | None = None,
        enable_chunked_prefill: bool | None = None,
        async_scheduling: bool | None = None,
        disable_log_stats: bool = True,
        **kwargs: Any,
    ) -> None:
        engine_args = EngineArgs(
            model,
            tokenizer=tokenizer,
            tokenizer_mode=tokenizer_mode,
            skip_tokenizer_init=skip_tokenizer_init,
            trust_remote_code=trust_remote_code,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            quantization=quantization,
            revision=revision,
            tokenizer_revision=tokenizer_revision,
            seed=seed,
            gpu_memory_utilization=gpu_memory_utilization,
            enforce_eager=enforce_eager,
            hf_overrides=hf_overrides,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            compilation_config=compilation_config,
            data_parallel_size=data_parallel_size,
            enable_expert_parallel=enable_expert_parallel,
            distributed_executor_backend=distributed_executor_backend,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            num_gpu_blocks_override=num_gpu_blocks_override,
            enable_prefix_caching=enable_prefix_caching,
            enable_chunked_prefill=enable_chunked_prefill,
            async_scheduling=async_scheduling,
            disable_log_stats=disable_log_stats,
            **kwargs,
        )
        self.chat_template = load_chat_template(chat_template)
        self.llm_engine = LLMEngine.from_engine_args(engine_args)
        self.model_config = self.llm_engine.model_config
        self._request_ids = itertools.count()
        # Requests of enqueue(), in order, and the outputs of those that another call's steps finished.
        self._enqueued: list[str] = []
        self._finished: dict[str, RequestOutput] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        return cls(**vars(engine_args))

    def get_tokenizer(self) -> Any:
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What ``generate`` uses where it is given none: the model's generation_config.json over the neutral values."""
        return SamplingParams(**sampling_defaults(self.llm_engine.generation_config))

    @_joint
    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., tqdm] = True,
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """The completions of ``prompts``, in their order.

        ``prompts``: a string, token ids, a ``TextPrompt`` or ``TokensPrompt``, or a list of those. ``sampling_params``:
        one for all, or one for each. ``use_tqdm``: a progress bar, or what makes it. Raises ``ValueError`` when one
        prompt cannot run; then none of the call does. An interrupt ends the call after the running step.
        """
        if mm_processor_kwargs:
            raise NotImplementedError("mm_processor_kwargs is not supported; leave it out")
        _check_unused(lora_request, priority)
        return self._run(self._add(prompts, sampling_params, tokenization_kwargs), use_tqdm)

    def enqueue(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., tqdm] = True,
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """Queue ``prompts`` without running them; returns their request ids. ``wait_for_completion`` runs them."""
        _check_unused(lora_request, priority)
        request_ids = self._add(prompts, sampling_params, tokenization_kwargs)
        self._enqueued += request_ids
        return request_ids

    @_joint
    def wait_for_completion(
        self, output_type: Any = None, *, use_tqdm: bool | Callable[..., tqdm] = True
    ) -> list[RequestOutput]:
        """The outputs of all requests queued by ``enqueue`` since the last call, in their order."""
        request_ids, self._enqueued = self._enqueued, []
        return self._run(request_ids, use_tqdm)

    def _add(self, prompts: Any, sampling_params: Any, tokenization_kwargs: dict[str, Any] | None = None) -> list[str]:
        """Queue requests, all of them or none; returns their ids."""
        prompts = split_prompts(prompts)
        params = self._pair(sampling_params, len(prompts))
        request_ids: list[str] = []
        try:
            for prompt, one in zip(prompts, params, strict=True):
                request_id = str(next(self._request_ids))
                self.llm_engine.add_request(request_id, prompt, one, tokenization_kwargs=tokenization_kwargs)
                request_ids.append(request_id)
        except BaseException:
            self.llm_engine.abort_request(request_ids)
            raise
        return request_ids

    @_joint
    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The ``beam_width`` best continuations of each prompt; see ``vllm.beam_search.BeamSearch``.

        ``concurrency_limit``: most prompts searched at once. Each step asks for twice ``beam_width`` log-probabilities
        (more with several end tokens), which ``max_logprobs`` must allow.
        """
        _check_unused(lora_request, None)
        processor = self.llm_engine.input_processor
        ends = {*processor.other_eos_token_ids, *({processor.eos_token_id} - {None})}
        searches = [BeamSearch(processor.process_prompt(prompt), params, ends) for prompt in split_prompts(prompts)]
        sampling = SamplingParams(max_tokens=1, temperature=params.temperature, ignore_eos=True, detokenize=False)
        waiting = list(reversed(searches))
        owners: dict[str, BeamSearch] = {}
        rounds: dict[int, dict[str, RequestOutput | None]] = {}

        def start_round(search: BeamSearch) -> list[str]:
            sampling.logprobs = search.num_candidates
            request_ids = self._add([{"prompt_token_ids": beam.tokens} for beam in search.running], sampling)
            owners.update(dict.fromkeys(request_ids, search))
            rounds[id(search)] = dict.fromkeys(request_ids)
            return request_ids

        def follow(output: RequestOutput) -> list[str]:
            """The requests that come after ``output``: its prompt's next round, or another prompt's first."""
            search = owners.pop(output.request_id)
            outputs = rounds[id(search)]
            outputs[output.request_id] = output
            if None in outputs.values():
                return []
            search.advance([_logprobs_of(o) for o in outputs.values() if o is not None])
            return start_round(search) if search.running else start_round(waiting.pop()) if waiting else []

        first: list[str] = []
        while waiting and (concurrency_limit is None or len(rounds) < concurrency_limit):
            first += start_round(waiting.pop())
        self._run(first, use_tqdm, follow)
        return [self._beam_output(search, params) for search in searches]

    def _beam_output(self, search: BeamSearch, params: BeamSearchParams) -> BeamSearchOutput:
        sequences = [sequence for _, sequence in search.finished]
        tokenizer: Any = self.llm_engine.tokenizer
        for sequence in sequences if tokenizer is not None else ():
            drop_end = sequence.finish_reason == "stop" and not params.include_stop_str_in_output
            sequence.text = tokenizer.decode(sequence.tokens[:-1] if drop_end else sequence.tokens)
        return BeamSearchOutput(sequences)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Run a method of this rank's worker, by name, or a function that is given the worker; returns ``[result]``.

        Under torchrun each rank calls it and gets its own worker's result.
        """
        return self.llm_engine.model_executor.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """``[func(model)]`` of this rank's model."""
        return self.collective_rpc("apply_model", args=(func,))

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back until ``wake_up``: level 1 the KV cache and, on devices, the weights (to the host); level 2
        both for good, so that ``load_weights`` must bring weights after it.

        Cached prefixes are forgotten. Raises ``ValueError`` while requests are unfinished.
        """
        self.llm_engine.sleep(level, mode)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Undo ``sleep``: all of it, or ``["weights"]`` or ``["kv_cache"]`` alone."""
        self.llm_engine.wake_up(tags)

    def is_sleeping(self) -> bool:
        return self.llm_engine.is_sleeping()

    def get_metrics(self) -> list[Metric]:
        """The engine's counts; raises ``ValueError`` where it was made with ``disable_log_stats`` (the default)."""
        return self.llm_engine.get_metrics()

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Record torch's profile until ``stop_profile`` writes it to ``VLLM_TORCH_PROFILER_DIR``."""
        self.collective_rpc("profile", args=(True, profile_prefix))

    def stop_profile(self) -> None:
        self.collective_rpc("profile", args=(False,))

    def get_world_size(self, include_dp: bool = True) -> int:
        """Ranks in all, or those of one DP group."""
        parallel = self.llm_engine.vllm_config.parallel_config
        return parallel.world_size if include_dp else parallel.tensor_parallel_size

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Take ``tokenizer`` for the requests that come from now on."""
        self.llm_engine.set_tokenizer(tokenizer)

    @_joint
    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """The answers to one conversation (a list of ``{"role": ..., "content": ...}``) or to a list of them."""
        tokenizer_kwargs, truncate = split_tokenization_kwargs(tokenization_kwargs)
        prompts = [
            render_chat(
                conversation,
                self.get_tokenizer(),
                self.model_config,
                chat_template=load_chat_template(chat_template) or self.chat_template,
                chat_template_content_format=chat_template_content_format,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                tokenizer_kwargs=tokenizer_kwargs,
            )
            for conversation in split_conversations(messages)
        ]
        return self.generate(
            prompts,
            sampling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            priority=priority,
            tokenization_kwargs={"truncate_prompt_tokens": truncate},
            mm_processor_kwargs=mm_processor_kwargs,
        )

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget every cached prefix; running requests go on. There is no connector to reset."""
        if reset_running_requests:
            raise NotImplementedError("reset_running_requests=True is not supported; finish or abort the requests")
        return self.llm_engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """Leave the other ranks and free the model; nobody has to call it. The LLM cannot be used afterwards."""
        self.llm_engine.shutdown()

    def _pair(self, params: Any, num_prompts: int) -> list[SamplingParams]:
        """One SamplingParams for each prompt, which gives its output once, at the end."""
        if params is None:
            params = self.get_default_sampling_params()
        if not isinstance(params, Sequence):
            params = [_final_only(params)] * num_prompts
        elif len(params) != num_prompts:
            raise ValueError(f"{len(params)} sampling_params for {num_prompts} prompts; give one, or one for each")
        else:
            params = [_final_only(one) for one in params]
        return params

    def _run(
        self,
        request_ids: list[str],
        use_tqdm: bool | Callable[..., tqdm],
        follow: Callable[[RequestOutput], list[str]] = lambda output: [],
    ) -> list[RequestOutput]:
        """Step until all ranks are done: a rank without requests takes part as long as another has some.

        ``follow`` may add requests when one has finished; their ids join ``request_ids``. All are aborted on errors.
        """
        try:
            return self._steps(request_ids, use_tqdm, follow)
        except BaseException:
            self.llm_engine.abort_request(request_ids)
            raise

    def _steps(
        self,
        request_ids: list[str],
        use_tqdm: bool | Callable[..., tqdm],
        follow: Callable[[RequestOutput], list[str]],
    ) -> list[RequestOutput]:
        engine, finished, mine = self.llm_engine, self._finished, set(request_ids)
        in_step = engine.vllm_config.parallel_config.world_size > 1
        with _progress(len(request_ids), use_tqdm) as progress, _interrupts_between_steps() as raise_interrupt:
            while in_step or engine.has_unfinished_requests():
                in_step = False
                for output in engine.step():
                    if not output.finished or not (output.request_id in mine or output.request_id in self._enqueued):
                        continue
                    finished[output.request_id] = output
                    if output.request_id in mine:
                        progress(output)
                        more = follow(output)
                        request_ids += more
                        mine.update(more)
                raise_interrupt()
        return [finished.pop(request_id) for request_id in request_ids]


def _final_only(params: Any) -> Any:
    if not isinstance(params, SamplingParams):
        raise TypeError(f"sampling_params has a {type(params).__name__}; give SamplingParams")
    params = params.clone()
    params.output_kind = RequestOutputKind.FINAL_ONLY
    return params


def _logprobs_of(output: RequestOutput) -> SampleLogprobs:
    completion = output.outputs[0]
    if not completion.logprobs:
        raise ValueError(f"beam search ended: a step finished with {completion.finish_reason!r} and gave no token")
    return completion.logprobs


for _name in ("encode", "embed", "classify", "reward", "score", "init_weight_transfer_engine", "update_weights"):
    setattr(LLM, _name, refuse(f"vllm.LLM.{_name}"))


def _check_unused(lora_request: Any, priority: Any) -> None:
    adapters = lora_request if isinstance(lora_request, Sequence) else [lora_request]
    if any(adapter is not None for adapter in adapters):
        raise NotImplementedError("lora_request is not supported; merge the adapter into the checkpoint")
    priorities = priority if isinstance(priority, Sequence) else [priority]
    if any(priorities):
        raise NotImplementedError(f"priority={priority!r} is not supported: requests run first come, first served")


@contextlib.contextmanager
def _progress(total: int, use_tqdm: bool | Callable[..., tqdm]) -> Iterator[Callable[[RequestOutput], None]]:
    """A function that takes each finished request; it draws a bar with tokens a second, or nothing."""
    if not use_tqdm:
        yield lambda _: None
        return
    make = tqdm if use_tqdm is True else use_tqdm
    started = time.perf_counter()
    tokens_in = tokens_out = 0

    def update(output: RequestOutput) -> None:
        nonlocal tokens_in, tokens_out
        tokens_in += len(output.prompt_token_ids or ())
        tokens_out += sum(len(completion.token_ids) for completion in output.outputs)
        elapsed = time.perf_counter() - started
        bar.set_postfix_str(f"input {tokens_in / elapsed:.1f} tok/s, output {tokens_out / elapsed:.1f} tok/s", False)
        bar.update(1)

    with make(total=total, desc="Processed prompts", dynamic_ncols=True) as bar:
        yield update


@contextlib.contextmanager
def _interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Hold the first Ctrl-C back until the yielded function is called, so that no step is torn; a second one is not."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    pending = False

    def hold(signum: int, frame: Any) -> None:
        nonlocal pending
        if pending:
            signal.default_int_handler(signum, frame)
        pending = True

    def raise_pending() -> None:
        if pending:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, hold)
    try:
        yield raise_pending
    except Exception as error:
        # The other ranks were interrupted too, and left before or after this one.
        if pending:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    raise_pending()
