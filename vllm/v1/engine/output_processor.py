# SPDX-License-Identifier: Apache-2.0
"""From the engine's steps to the client's outputs."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from vllm.logprobs import PromptLogprobs, SampleLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.detokenizer import Detokenizer, continuation_ids
from vllm.v1.engine.logprobs import CONTEXT, TokenText, logprob_dicts
from vllm.v1.metrics.engine_metrics import EngineMetrics
from vllm.v1.metrics.stats import RequestStateStats
from vllm.v1.outputs import EngineCoreOutput


class ProcessedOutputs(NamedTuple):
    """``reqs_to_abort``: sequences that a stop string ended and the scheduler still runs."""

    request_outputs: list[RequestOutput]
    reqs_to_abort: list[str]


class _Completion:
    """One sequence of a request, and how much of it the client has."""

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        detokenizer: Detokenizer | None,
        has_end_tokens: bool,
    ) -> None:
        self.index = index
        self.params = params
        self.prompt_token_ids = prompt_token_ids
        self.detokenizer = detokenizer
        self.has_end_tokens = has_end_tokens  # else what ends the request is its grammar, after a token of text
        # Without stop strings and without outputs on the way, all the text can be made at the end.
        self.text_at_end = not params.stop and params.output_kind is RequestOutputKind.FINAL_ONLY
        self.token_ids: list[int] = []
        self.logprobs: SampleLogprobs | None = None if params.logprobs is None else []
        self.cumulative_logprob: float | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.stats: RequestStateStats | None = None
        self._num_text_sent = 0
        self._num_tokens_sent = 0

    def add(self, output: EngineCoreOutput, token_text: Callable[[int, Sequence[int]], str | None]) -> None:
        token_ids = output.new_token_ids
        if self.logprobs is not None and output.new_logprobs is not None:
            before = [*self.prompt_token_ids[-CONTEXT:], *self.token_ids[-CONTEXT:]]
            self.logprobs += logprob_dicts(output.new_logprobs, self.params.logprobs or 0, token_text, before)
            new = sum(row[0] for row in output.new_logprobs.logprobs)
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + new
        self.token_ids += token_ids
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        detokenizer = self.detokenizer
        if detokenizer is None or (self.text_at_end and not output.finished):
            return
        shown = self.token_ids if self.text_at_end else token_ids
        if self.finish_reason == "stop" and self.has_end_tokens and not self.params.include_stop_str_in_output:
            shown = shown[:-1]
        if (stop := detokenizer.add(shown, output.finished)) is not None:
            self.finish_reason, self.stop_reason = "stop", stop

    def make_output(self, delta: bool) -> CompletionOutput:
        text, token_ids, logprobs = "", self.token_ids, self.logprobs
        if self.detokenizer is not None:
            text = self.detokenizer.text
            if self.finish_reason is None:
                text = text[: self.detokenizer.num_stable]
        num_text, num_tokens = len(text), len(token_ids)
        if delta:
            text, token_ids = text[self._num_text_sent :], token_ids[self._num_tokens_sent :]
            logprobs = None if logprobs is None else logprobs[self._num_tokens_sent :]
            self._num_text_sent, self._num_tokens_sent = max(self._num_text_sent, num_text), num_tokens
        elif self.finish_reason is None:
            token_ids = token_ids[:]
            logprobs = None if logprobs is None else logprobs[:]
        return CompletionOutput(
            self.index,
            text,
            token_ids,
            self.cumulative_logprob,
            logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


@dataclasses.dataclass
class _Request:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    child_ids: list[str]
    completions: list[_Completion]
    prompt_logprobs: PromptLogprobs | None
    num_unfinished: int
    stats: RequestStateStats | None
    num_cached_tokens: int | None = None
    dp_rank: int | None = None

    def make_output(self, changed: Sequence[_Completion]) -> RequestOutput | None:
        """The output that is due after a step that changed ``changed``, if one is."""
        finished = self.num_unfinished == 0
        kind = self.params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY and not finished:
            return None
        delta = kind is RequestOutputKind.DELTA
        prompt_logprobs = self.prompt_logprobs
        if delta:
            self.prompt_logprobs = None
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            prompt_logprobs,
            [completion.make_output(delta) for completion in (changed if delta else self.completions)],
            finished,
            metrics=None if self.stats is None else self.stats.copy(),
            num_cached_tokens=self.num_cached_tokens,
        )


class OutputProcessor:
    """Keeps each request from ``add_request`` until it is finished or aborted; ``log_stats``: with its metrics,
    which are summed up in ``metrics``."""

    def __init__(self, tokenizer: Any | None, log_stats: bool = False) -> None:
        self.metrics = EngineMetrics() if log_stats else None
        self.set_tokenizer(tokenizer)
        self._requests: dict[str, _Request] = {}
        self._by_child: dict[str, tuple[_Request, _Completion]] = {}

    def set_tokenizer(self, tokenizer: Any | None) -> None:
        """For the requests that come from now on."""
        self._tokenizer = tokenizer
        self._continuations = functools.cache(lambda: continuation_ids(tokenizer))
        self._token_text = TokenText(tokenizer, self._continuations)

    def add_request(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        arrival_time: float | None = None,
    ) -> list[tuple[str, SamplingParams]]:
        """Returns the sequences to run: the request itself or, for ``n`` > 1, ``i_<request_id>`` with ``seed`` + i.

        Raises ``ValueError`` for an id in use.
        """
        children = _children(request_id, params)
        taken = [name for name in (request_id, *(name for name, _ in children)) if name in self._requests]
        taken += [name for name, _ in children if name in self._by_child]
        if taken:
            raise ValueError(f"request_id={taken[0]!r} is in use; wait for its end, abort it or take another id")
        eos_token_id = None if params.ignore_eos else getattr(self._tokenizer, "eos_token_id", None)
        has_end_tokens = not params.structured_outputs or eos_token_id is not None or bool(params.stop_token_ids)
        completions = []
        for index, (_, child_params) in enumerate(children):
            detokenizer = None
            if self._tokenizer is not None and params.detokenize:
                detokenizer = Detokenizer(self._tokenizer, child_params, prompt_token_ids, self._continuations)
            completions.append(_Completion(index, child_params, prompt_token_ids, detokenizer, has_end_tokens))
        request = _Request(
            request_id,
            prompt,
            prompt_token_ids,
            params,
            [name for name, _ in children],
            completions,
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
            num_unfinished=len(children),
            stats=None,
        )
        if self.metrics is not None:
            arrived = time.time() if arrival_time is None else arrival_time
            request.stats = RequestStateStats(arrival_time=arrived, queued_ts=time.monotonic())
            for completion in completions:
                completion.stats = request.stats.copy()
        self._requests[request_id] = request
        self._by_child |= {name: (request, c) for name, c in zip(request.child_ids, completions, strict=True)}
        return children

    def accepted(self, request_id: str, dp_rank: int = 0) -> None:
        """``dp_rank`` has the request: from now on its end is counted there, whatever it is."""
        self._requests[request_id].dp_rank = dp_rank

    def process_outputs(self, outputs: Iterable[EngineCoreOutput], dp_rank: int = 0) -> ProcessedOutputs:
        """Takes one step's outputs, of ``dp_rank``; those of sequences that are gone are ignored. One output at most
        for a request."""
        reqs_to_abort = []
        now = time.monotonic() if self.metrics is not None else 0.0
        changed: dict[str, list[_Completion]] = {}
        for output in outputs:
            if output.request_id not in self._by_child:
                continue
            request, completion = self._by_child[output.request_id]
            token_text = self._token_text if completion.detokenizer is not None else _no_text
            if output.new_prompt_logprobs is not None and request.prompt_logprobs is not None:
                count = request.params.prompt_logprobs or 0
                start = len(request.prompt_logprobs)
                before = request.prompt_token_ids[max(start - CONTEXT, 0) : start]
                request.prompt_logprobs += logprob_dicts(output.new_prompt_logprobs, count, token_text, before)
            if not output.new_token_ids and not output.finished:
                continue
            if request.num_cached_tokens is None:
                request.num_cached_tokens = output.num_cached_tokens
            completion.add(output, token_text)
            if self.metrics is not None:
                self._record(request, completion, output, now, dp_rank)
            changed.setdefault(request.request_id, []).append(completion)
            if completion.finish_reason is not None:
                if not output.finished:
                    reqs_to_abort.append(output.request_id)
                del self._by_child[output.request_id]
                request.num_unfinished -= 1
        request_outputs = []
        for request_id, completions in changed.items():
            request = self._requests[request_id]
            made = request.make_output(completions)
            if made is not None:
                request_outputs.append(made)
            if request.num_unfinished == 0:
                self._forget(request)
        return ProcessedOutputs(request_outputs, reqs_to_abort)

    def _record(
        self, request: _Request, completion: _Completion, output: EngineCoreOutput, now: float, dp_rank: int
    ) -> None:
        own, request.dp_rank = completion.stats, dp_rank
        assert self.metrics is not None and own is not None and request.stats is not None  # noqa: PT018
        for times in (own, request.stats):
            before = times.last_token_ts
            if not times.scheduled_ts:
                times.scheduled_ts = times.queued_ts + output.queued_seconds
            if output.new_token_ids:
                times.record_tokens(len(output.new_token_ids), now)
                if times is own:
                    self.metrics.record_tokens(dp_rank, own, before)
        if completion.finish_reason is not None:
            self._record_end(request, completion, completion.finish_reason)

    def _record_end(self, request: _Request, completion: _Completion, reason: str) -> None:
        if self.metrics is not None and completion.stats is not None and request.dp_rank is not None:
            num_prompt, max_tokens = len(request.prompt_token_ids), request.params.max_tokens
            self.metrics.record_finished(request.dp_rank, completion.stats, reason, num_prompt, max_tokens)

    def _forget(self, request: _Request) -> None:
        del self._requests[request.request_id]
        if self.metrics is not None and request.dp_rank is not None:
            longest = max(len(completion.token_ids) for completion in request.completions)
            self.metrics.record_request(request.dp_rank, request.params, longest)

    def abort_requests(self, request_ids: Iterable[str]) -> list[str]:
        """Forget requests; returns their unfinished sequences. Ids that are not in use are ignored."""
        aborted = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is None:
                continue
            for name, completion in zip(request.child_ids, request.completions, strict=True):
                if self._by_child.pop(name, None) is not None:
                    self._record_end(request, completion, "abort")
                    aborted.append(name)
            self._forget(request)
        return aborted

    def owner_of(self, sequence_id: str) -> str | None:
        """The request of an unfinished sequence; None where it has ended."""
        return self._by_child[sequence_id][0].request_id if sequence_id in self._by_child else None

    def get_num_unfinished_requests(self) -> int:
        return len(self._requests)


def _no_text(_token_id: int, _context: Sequence[int]) -> None:
    return None


def _children(request_id: str, params: SamplingParams) -> list[tuple[str, SamplingParams]]:
    if params.n == 1:
        return [(request_id, params)]
    children = []
    for i in range(params.n):
        child = params.clone()
        child.n = 1
        if child.seed is not None:
            child.seed += i
        if i > 0:
            child.prompt_logprobs = None
        children.append((f"{i}_{request_id}", child))
    return children
