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
            self.running = [r for r in self.running if not r.status.is_finished]
            self.waiting = deque(r for r in self.waiting if not r.status.is_finished)

    def _end(self, request: Request, status: RequestStatus) -> None:
        request.status = status
        self.kv_cache_manager.release(request)
        self._finished_req_ids.add(request.request_id)

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
        started: set[str] = set()
        preempted: set[str] = set()

        index = 0
        while index < len(running) and budget > 0:
            request = running[index]
            computed = request.num_computed_tokens
            count = min(len(request.all_token_ids) - computed, budget)
            blocks: list[int] | None = []
            if computed + count > len(request.block_ids) * block_size:
                while (blocks := self.kv_cache_manager.grow(request, computed + count)) is None:
                    victim = running.pop()
                    self._preempt(victim)
                    preempted.add(victim.request_id)
                    if victim is request:
                        break
            if blocks is None:
                break
            requests.append(request)
            counts.append(count)
            new_block_ids.append(blocks)
            budget -= count
            index += 1

        while self.waiting and budget > 0 and len(running) < self.max_num_seqs and not preempted:
            request = self.waiting[0]
            if not self._admit(request, budget):
                break
            self.waiting.popleft()
            running.append(request)
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            requests.append(request)
            counts.append(count)
            new_block_ids.append(list(request.block_ids))
            started.add(request.request_id)
            budget -= count

        finished, self._finished_req_ids = frozenset(self._finished_req_ids), set()
        return SchedulerOutput(requests, counts, new_block_ids, frozenset(started), finished, frozenset(preempted))

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
        """Take in a step's tokens: advance its requests, end those that are done.

        Returns one output for each request that got a token or prompt log-probabilities, or ended.
        """
        running_status, caching = RequestStatus.RUNNING, self.kv_cache_manager.enable_prefix_caching
        block_size, logprobs = self.kv_cache_config.block_size, runner_output.logprobs
        requests, counts = scheduler_output.requests, scheduler_output.num_scheduled_tokens
        sampled = runner_output.sampled_token_ids
        assert len(sampled) == len(requests), f"{len(sampled)} rows of sampled tokens for {len(requests)} requests"
        scored = runner_output.prompt_logprobs
        outputs: list[EngineCoreOutput] = []
        any_ended = False
        for request, count, token_ids in zip(requests, counts, sampled, strict=True):
            if request.status is not running_status:
                continue
            request_id, all_token_ids = request.request_id, request.all_token_ids
            if request_id in runner_output.nan_req_ids:
                self.kv_cache_manager.drop_cached(request)
                ended, token_ids, prompt_logprobs = RequestStatus.FINISHED_ERROR, [], None
                request.stop_reason = "the model's logits are not finite"
                self.counts.corrupted += 1
            else:
                start = request.num_computed_tokens
                computed = request.num_computed_tokens = start + count
                assert len(token_ids) == (computed == len(all_token_ids)), (
                    f"{request_id}: {len(token_ids)} tokens sampled after {computed} of {len(all_token_ids)}"
                )
                if caching and computed // block_size > request.num_cached_blocks:
                    self.kv_cache_manager.cache_computed(request)
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
            self.running = [r for r in self.running if r.status is running_status]
        return outputs

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
