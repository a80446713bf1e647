# SPDX-License-Identifier: Apache-2.0
"""Which requests run in a step, and what becomes of them after it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import cdiv
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.stats import RequestCounts
from vllm.v1.outputs import EngineCoreOutput, LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import Grammars


class Scheduler:
    """Continuous batching, first come first served.

    ``running`` followed by ``waiting`` is always in order of arrival: the last running request gives way when blocks
    run out and waits in front, and none is admitted past the first that waits. So the oldest request moves in every
    step, and each request ends after a bounded number of steps.

    A step may be scheduled before the one before it was taken in. Tokens of that one which are not known yet are
    counted, and read on the device. A request is left out where that does not do: one that is known to end by its
    length, or whose next token depends on them through the host. What the host learns too late costs the row that the
    later step runs for the request: ``update_from_output`` drops it. Blocks and state slots that a request gives up are
    free at once, since whatever their next holder does to them is launched after all that was scheduled before.
    """

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        scheduler_config = vllm_config.scheduler_config
        self.max_num_batched_tokens = scheduler_config.max_num_batched_tokens
        self.max_num_seqs = scheduler_config.max_num_seqs
        self.enable_chunked_prefill = scheduler_config.enable_chunked_prefill
        self.max_model_len = vllm_config.model_config.max_model_len
        self.grammars = Grammars.of_model(vllm_config.model_config)
        self.kv_cache_config = kv_cache_config
        self.kv_cache_manager = KVCacheManager(kv_cache_config, vllm_config.cache_config.enable_prefix_caching)
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.counts = RequestCounts()
        self._finished_req_ids: set[str] = set()
        # Steps that were not taken in, each with the requests whose row of it counts for nothing.
        self._in_flight: deque[tuple[SchedulerOutput, set[Request]]] = deque()
        self._restarted: set[str] = set()

    def add_request(self, request: Request) -> None:
        """Queue ``request``.

        Raises:
            ValueError: its id is in use, its prompt leaves no room for a token, it could never fit in the cache, or no
                matcher can be made of its grammar.
        """
        num_prompt, size = request.num_prompt_tokens, self.kv_cache_config.block_size
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use by an unfinished request; give another")
        if not 0 < num_prompt < self.max_model_len:
            raise ValueError(
                f"prompt of {num_prompt} tokens with max_model_len={self.max_model_len}: give 1 to "
                f"{self.max_model_len - 1} tokens, one is left to generate"
            )
        request.max_num_tokens = min(num_prompt + request.max_tokens, self.max_model_len)
        needed, blocks = cdiv(request.max_num_tokens, size), self.kv_cache_config.num_blocks - 1
        if needed > blocks:
            raise ValueError(
                f"prompt of {num_prompt} tokens and max_tokens={request.max_tokens} need {needed} cache blocks of "
                f"{size} tokens, the cache has {blocks}; ask for {blocks * size} tokens or fewer in all, or raise "
                "kv_cache_memory_bytes / gpu_memory_utilization"
            )
        if request.sampling_params.structured_outputs is not None:
            request.matcher = self.grammars.matcher(request)
        self.requests[request.request_id] = request
        request.queued_ts = request.queued_ts or time.monotonic()
        self.waiting.append(request)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def get_num_unfinished_requests(self) -> int:
        return len(self.requests)

    def finish_requests(self, request_ids: str | Iterable[str], status: RequestStatus) -> None:
        """End requests at any moment, between ``schedule`` and ``update_from_output`` too; unknown ids are ignored."""
        assert status.is_finished, f"{status!r} is no way to end"
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        finished = [request for i in ids if (request := self.requests.pop(i, None)) is not None]
        for request in finished:
            self._end(request, status)
        if finished:
            self._remove_finished()

    def _end(self, request: Request, status: RequestStatus) -> None:
        request.status = status
        self.kv_cache_manager.release(request)
        self._finished_req_ids.add(request.request_id)

    @property
    def must_wait(self) -> bool:
        """Whether nothing can be scheduled before the step in flight is taken in."""
        return not self.waiting and all(self._waits(request) for request in self.running)

    @staticmethod
    def _waits(request: Request) -> bool:
        """Whether ``request`` cannot go on before its tokens in flight are known."""
        ahead = request.num_in_flight
        return ahead > 0 and (request.reads_tokens or len(request.all_token_ids) + ahead >= request.max_num_tokens)

    def schedule(self) -> SchedulerOutput:
        """What the next step runs: the running requests in order, then those admitted, within the token budget.

        Empty (0 tokens) where nothing can run, unfinished requests or not; the rank takes part in the step all the
        same.
        """
        budget, block_size = self.max_num_batched_tokens, self.kv_cache_config.block_size
        running = self.running
        requests: list[Request] = []
        counts: list[int] = []
        new_block_ids: list[list[int]] = []
        computed_before: list[int] = []
        samples: list[bool] = []
        started: set[str] = set()
        preempted, self._restarted = self._restarted, set()
        any_preempted = False

        def run(request: Request, count: int, known: int, blocks: list[int]) -> None:
            requests.append(request)
            counts.append(count)
            new_block_ids.append(blocks)
            computed_before.append(request.num_computed_tokens)
            request.num_computed_tokens += count
            samples.append(request.num_computed_tokens == known)
            request.num_in_flight += samples[-1]

        if self._in_flight:
            self.cache_in_flight(running)
        index = 0
        while index < len(running) and budget > 0:
            request = running[index]
            if request.num_in_flight and self._waits(request):
                index += 1
                continue
            computed, known = request.num_computed_tokens, len(request.all_token_ids) + request.num_in_flight
            count = min(known - computed, budget)
            blocks: list[int] | None = []
            if computed + count > len(request.block_ids) * block_size:
                while (blocks := self.kv_cache_manager.grow(request, computed + count)) is None:
                    victim = running.pop()
                    self._preempt(victim)
                    preempted.add(victim.request_id)
                    any_preempted = True
                    if victim is request:
                        break
            if blocks is None:
                break
            run(request, count, known, blocks)
            budget -= count
            index += 1

        while self.waiting and budget > 0 and len(running) < self.max_num_seqs and not any_preempted:
            request = self.waiting[0]
            if request.num_in_flight or not self._admit(request, budget):
                break
            self.waiting.popleft()
            running.append(request)
            started.add(request.request_id)
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            run(request, count, request.num_tokens, list(request.block_ids))
            budget -= count

        finished, self._finished_req_ids = frozenset(self._finished_req_ids), set()
        step = SchedulerOutput(
            requests,
            counts,
            new_block_ids,
            computed_before,
            samples,
            frozenset(started),
            finished,
            frozenset(preempted),
        )
        self._in_flight.append((step, set()))
        return step

    def cache_in_flight(self, requests: Iterable[Request]) -> None:
        """Offer what the step in flight computes, as if it had been taken in: later steps run after it."""
        if self.kv_cache_manager.enable_prefix_caching:
            for request in requests:
                num_tokens = min(request.num_computed_tokens, len(request.all_token_ids))
                if num_tokens // self.kv_cache_config.block_size > request.num_cached_blocks:
                    self.kv_cache_manager.cache_computed(request, num_tokens)

    def _admit(self, request: Request, budget: int) -> bool:
        """Start ``request``, which waits first in line, if cache and ``budget`` allow."""
        if not self.kv_cache_manager.start(request, None if self.enable_chunked_prefill else budget):
            return False
        request.status = RequestStatus.RUNNING
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = request.num_computed_tokens
            request.queued_seconds = time.monotonic() - request.queued_ts
            if self.kv_cache_manager.enable_prefix_caching:
                self.counts.prefix_queries += request.num_tokens
                self.counts.prefix_hits += request.num_computed_tokens
        return True

    def _preempt(self, request: Request) -> None:
        """Give up all blocks of ``request``, the last running one; it will compute its tokens again."""
        self.kv_cache_manager.release(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.counts.preemptions += 1
        self.waiting.appendleft(request)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Take in a step's tokens: advance its requests, end those that are done. Steps are taken in as they were
        scheduled, and another one may have been scheduled since: rows of requests that ended meanwhile are dropped.

        Returns one output for each request that got a token or prompt log-probabilities, or ended.
        """
        in_flight, dropped = self._in_flight.popleft()
        assert in_flight is scheduler_output, "a step is taken in before an earlier one"
        caching = self.kv_cache_manager.enable_prefix_caching
        block_size, logprobs = self.kv_cache_config.block_size, runner_output.logprobs
        requests, counts = scheduler_output.requests, scheduler_output.num_scheduled_tokens
        starts, samples = scheduler_output.num_computed_tokens, scheduler_output.samples
        sampled = runner_output.sampled_token_ids
        assert len(sampled) == len(requests), f"{len(sampled)} rows of sampled tokens for {len(requests)} requests"
        scored = runner_output.prompt_logprobs
        outputs: list[EngineCoreOutput] = []
        any_ended = False
        for request, start, count, samples_one, token_ids in zip(
            requests, starts, counts, samples, sampled, strict=True
        ):
            request_id, all_token_ids = request.request_id, request.all_token_ids
            is_nan, is_dropped = request_id in runner_output.nan_req_ids, request in dropped
            if is_nan:
                self._drop_corrupted(request)
            if not is_dropped:
                request.num_in_flight -= samples_one
            if is_dropped or request.status.is_finished:
                continue
            if is_nan:
                ended, token_ids, prompt_logprobs = RequestStatus.FINISHED_ERROR, [], None
                request.stop_reason = "the model's logits are not finite"
                self.counts.corrupted += 1
            else:
                computed = start + count
                assert len(token_ids) == (computed == len(all_token_ids)), (
                    f"{request_id}: {len(token_ids)} tokens sampled after {computed} of {len(all_token_ids)}"
                )
                if caching and computed // block_size > request.num_cached_blocks:
                    self.kv_cache_manager.cache_computed(request, computed)
                prompt_logprobs = self._new_prompt_logprobs(request, start, scored) if scored else None
                ended = None
                if request_id in runner_output.undrawable:
                    request.stop_reason = runner_output.undrawable[request_id]
                    ended, token_ids = RequestStatus.FINISHED_ERROR, []
                if token_ids:
                    if len(all_token_ids) == len(request.prompt_token_ids):
                        self.counts.prompt_tokens += len(all_token_ids)
                    self.counts.generation_tokens += len(token_ids)
                    all_token_ids += token_ids
                    ended = self._check_stop(request)
                    if request.matcher is not None:
                        ended = self._follow_grammar(request, ended)
            if ended is not None:
                del self.requests[request_id]
                self._end(request, ended)
                any_ended = True
            if token_ids or ended is not None or prompt_logprobs is not None:
                outputs.append(
                    EngineCoreOutput(
                        request_id,
                        token_ids,
                        logprobs.get(request_id) if token_ids else None,
                        prompt_logprobs,
                        ended.finish_reason if ended is not None else None,
                        request.stop_reason,
                        max(request.num_cached_tokens, 0),
                        request.queued_seconds,
                    )
                )
        if any_ended:
            self._remove_finished()
        return outputs

    def _remove_finished(self) -> None:
        self.running = [r for r in self.running if not r.status.is_finished]
        if any(r.status.is_finished for r in self.waiting):
            self.waiting = deque(r for r in self.waiting if not r.status.is_finished)

    def _drop_corrupted(self, request: Request) -> None:
        """No later request finds what ``request`` computed, or what was computed on top of it. Those that a later step
        has started on it start again, after all of that step."""
        holds = set(request.block_ids)
        self.kv_cache_manager.drop_cached(request)
        if not holds and self._in_flight:  # it gave up its blocks when a later step was scheduled, or after
            self.reset_prefix_cache()
        for step, dropped in self._in_flight:
            for other, start in zip(step.requests, step.num_computed_tokens, strict=True):
                is_fresh = other.request_id in step.started and other in self.running
                found = set(other.block_ids[: start // self.kv_cache_config.block_size]) if is_fresh else set()
                if found and (not holds or holds & found):
                    for victim in reversed(self.running[self.running.index(other) :]):
                        self.running.pop()
                        self._preempt(victim)
                        victim.num_in_flight = 0
                        dropped.add(victim)
                        self._restarted.add(victim.request_id)

    @staticmethod
    def _new_prompt_logprobs(request: Request, start: int, scored: dict[str, LogprobsLists]) -> LogprobsLists | None:
        """The rows that the request was not given before: after a preemption the prompt is scored again."""
        rows = scored.get(request.request_id)
        if rows is None:
            return None
        known = min(max(request.num_prompt_logprobs - start, 0), len(rows.token_ids))
        if known == len(rows.token_ids):
            return None
        request.num_prompt_logprobs = start + len(rows.token_ids)
        return LogprobsLists(rows.token_ids[known:], rows.logprobs[known:], rows.ranks[known:])

    @staticmethod
    def _check_stop(request: Request) -> RequestStatus | None:
        """How the token just appended ends ``request``; sets ``stop_reason`` where a stop token did."""
        params, num_tokens = request.sampling_params, len(request.all_token_ids)
        if num_tokens - len(request.prompt_token_ids) >= params.min_tokens:
            token = request.all_token_ids[-1]
            if token == request.eos_token_id and not params.ignore_eos:
                return RequestStatus.FINISHED_STOPPED
            if params.stop_token_ids and token in params.stop_token_ids:
                request.stop_reason = token
                return RequestStatus.FINISHED_STOPPED
        if num_tokens >= request.max_num_tokens:
            return RequestStatus.FINISHED_LENGTH_CAPPED
        return None

    @staticmethod
    def _follow_grammar(request: Request, ended: RequestStatus | None) -> RequestStatus | None:
        """How the token just appended ends ``request``, which it does too where nothing can follow it."""
        matcher, params = request.matcher, request.sampling_params
        assert matcher is not None, f"request {request.request_id} has no grammar"
        if not matcher.take(request.all_token_ids[-1], ended is RequestStatus.FINISHED_STOPPED):
            request.stop_reason = matcher.why_none()
            return RequestStatus.FINISHED_ERROR
        is_over = matcher.is_over and request.num_output_tokens >= params.min_tokens
        return RequestStatus.FINISHED_STOPPED if is_over else ended

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix. Running requests go on, and nothing they compute is found later."""
        self.kv_cache_manager.pool.reset()
        return True

    def drop_cached_blocks(self, request_id: str) -> None:
        """Let no later request reuse what ``request_id`` computed or read; unknown ids are ignored."""
        request = self.requests.get(request_id)
        if request is not None:
            self.kv_cache_manager.drop_cached(request)

    def check_integrity(self) -> None:
        """Raises AssertionError naming blocks or state slots that are leaked or shared by mistake."""
        queued = [*self.running, *self.waiting]
        names = [r.request_id for r in queued]
        assert sorted(names) == sorted(self.requests), f"queued {names}, known {list(self.requests)}"
        idle = [r.request_id for r in self.waiting if r.block_ids or r.state_slot != -1]
        assert not idle, f"waiting requests that hold blocks or a state slot: {idle}"
        self.kv_cache_manager.check_integrity(queued)
