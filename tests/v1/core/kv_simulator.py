# SPDX-License-Identifier: Apache-2.0
"""A model runner made of token ids, and what each request must give on its own.

A cache slot holds the digest of the whole token sequence up to its position, which is what keys and values depend
on. Each step checks that every request finds its own digests through its block list *before* anything of the step is
written, so a stale, shared, evicted or not yet written block is seen at once. The next token is a function of the
digest, so a wrong read also gives wrong tokens.
"""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any

from vllm.config import CacheConfig, SchedulerConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import EngineCoreOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

ROOT = 0
VOCABULARY = 5
EOS = 3


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 8, "ignore_eos": True} | values))


def digest(before: int, token: int) -> int:
    return (before * 6364136223846793005 + token * 2 + 1) % 2**64


def digests(token_ids: list[int]) -> list[int]:
    found, last = [], ROOT
    for token in token_ids:
        last = digest(last, token)
        found.append(last)
    return found


def next_token(last_digest: int) -> int:
    return (last_digest >> 33) % VOCABULARY


def expected(prompt: list[int], sampling: Any, max_model_len: int) -> tuple[list[int], str]:
    """The output tokens and finish reason of one request that runs alone without a cache."""
    output: list[int] = []
    while True:
        token = next_token(digests(prompt + output)[-1])
        output.append(token)
        may_stop = len(output) >= sampling.min_tokens
        if may_stop and ((token == EOS and not sampling.ignore_eos) or token in sampling.stop_token_ids):
            return output, "stop"
        if len(output) == sampling.max_tokens or len(prompt) + len(output) == max_model_len:
            return output, "length"


def make_scheduler(
    num_blocks: int = 64,
    block_size: int = 4,
    budget: int = 64,
    max_num_seqs: int = 8,
    max_model_len: int = 64,
    caching: bool = True,
    chunked: bool = True,
    num_state_slots: int = 0,
) -> Scheduler:
    config: Any = types.SimpleNamespace(
        scheduler_config=SchedulerConfig(budget, max_num_seqs, chunked),
        cache_config=CacheConfig(block_size, enable_prefix_caching=caching),
        model_config=types.SimpleNamespace(max_model_len=max_model_len),
    )
    return Scheduler(config, KVCacheConfig(num_blocks, block_size, num_state_slots))


@dataclass
class Row:
    """What the runner keeps of a request: the blocks it was told of and the cache generation it began in."""

    block_ids: list[int]
    epoch: int


@dataclass
class Simulator:
    scheduler: Scheduler
    kv: dict[tuple[int, int], tuple[int | None, int]] = field(default_factory=dict)
    states: dict[int, int] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    epoch: int = 0
    num_steps: int = 0

    def add(self, request_id: str, prompt: list[int], **sampling: Any) -> Request:
        request = Request(request_id, list(prompt), params(**sampling), eos_token_id=EOS, arrival_time=0.0)
        self.scheduler.add_request(request)
        self.requests[request_id] = request
        self.outputs[request_id] = []
        return request

    def abort(self, *request_ids: str) -> None:
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        for request_id in request_ids:
            self.requests.pop(request_id, None)

    def reset(self) -> None:
        assert self.scheduler.reset_prefix_cache()
        self.epoch += 1

    def schedule(self) -> SchedulerOutput:
        scheduler = self.scheduler
        step = scheduler.schedule()
        assert step.total_num_scheduled_tokens <= scheduler.max_num_batched_tokens
        assert len(step.requests) <= scheduler.max_num_seqs
        assert len({r.request_id for r in step.requests}) == len(step.requests)
        assert all(count > 0 for count in step.num_scheduled_tokens)
        assert step.requests == scheduler.running[: len(step.requests)]
        for request_id in step.finished_req_ids | step.preempted_req_ids:
            self.rows.pop(request_id, None)
        return step

    def execute(self, step: SchedulerOutput, nan: frozenset[str] = frozenset()) -> ModelRunnerOutput:
        """Check every read, then write; ``nan`` requests leave poison wherever they alone may write."""
        size, pool = self.scheduler.kv_cache_config.block_size, self.scheduler.kv_cache_manager.pool
        slots = [r.state_slot for r in step.requests if r.state_slot != -1]
        assert len(set(slots)) == len(slots), f"state slots {slots}"
        work = []
        for request, start, count, new_block_ids in zip(
            step.requests, step.num_computed_tokens, step.num_scheduled_tokens, step.new_block_ids, strict=True
        ):
            name = request.request_id
            if name in step.started:
                assert name not in self.rows, f"{name} started twice"
                self.rows[name] = Row(list(new_block_ids), self.epoch)
                if request.state_slot != -1:
                    self.states[request.state_slot] = ROOT
            else:
                self.rows[name].block_ids += new_block_ids
            row = self.rows[name]
            assert row.block_ids == request.block_ids, f"{name}: told of {row.block_ids}, has {request.block_ids}"
            assert 0 not in row.block_ids, f"{name} got the null block"
            own = digests(request.all_token_ids)
            for position in range(start):
                block = row.block_ids[position // size]
                found, epoch = self.kv.get((block, position % size), (None, -1))
                assert found == own[position], f"{name} reads another's KV at position {position}, block {block}"
                assert epoch == row.epoch, f"{name} reads KV of before the reset at position {position}"
            if request.state_slot != -1:
                assert request.state_slot > 0, f"{name} got the pad slot"
                before = own[start - 1] if start else ROOT
                assert self.states[request.state_slot] == before, f"{name} found another's state at {start}"
            work.append((request, row, own, start, start + count))
        sampled = []
        for request, row, own, start, end in work:
            for position in range(start, end):
                block = row.block_ids[position // size]
                assert pool.ref_counts[block] == 1, f"{request.request_id} writes to shared block {block}"
                assert block not in pool.keys, f"{request.request_id} writes to cached block {block}"
                self.kv[block, position % size] = (own[position], row.epoch)
            if request.state_slot != -1:
                self.states[request.state_slot] = own[end - 1]
            if request.request_id in nan:
                for block in row.block_ids:
                    if pool.ref_counts[block] == 1:
                        self.kv.update({(block, offset): (None, row.epoch) for offset in range(size)})
            sampled.append([next_token(own[end - 1])] if end == request.num_tokens else [])
        return ModelRunnerOutput(sampled, nan_req_ids=nan)

    def update(self, step: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineCoreOutput]:
        outputs = self.scheduler.update_from_output(step, result)
        for output in outputs:
            self.outputs[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self._finished(output)
        self.num_steps += 1
        return outputs

    def _finished(self, output: EngineCoreOutput) -> None:
        name, request = output.request_id, self.requests.pop(output.request_id)
        self.reasons[name] = str(output.finish_reason)
        if output.finish_reason == "error":
            return
        tokens, reason = expected(request.prompt_token_ids, request.sampling_params, self.scheduler.max_model_len)
        assert (self.outputs[name], output.finish_reason) == (tokens, reason), f"{name} differs from running alone"
        assert request.output_token_ids == tokens

    def step(self, nan: frozenset[str] = frozenset()) -> list[EngineCoreOutput]:
        step = self.schedule()
        return self.update(step, self.execute(step, nan))

    def finish(self) -> None:
        """Run to the end, within the bound that first come first served gives: the oldest moves in every step."""
        bound = sum(r.max_num_tokens for r in self.requests.values())
        for _ in range(bound):
            if not self.scheduler.has_unfinished_requests():
                break
            self.step()
            self.scheduler.check_integrity()
        assert not self.requests, f"{sorted(self.requests)} unfinished after {bound} steps"
        self.check_idle()

    def check_idle(self) -> None:
        scheduler = self.scheduler
        assert scheduler.get_num_unfinished_requests() == 0
        scheduler.check_integrity()
        assert scheduler.kv_cache_manager.pool.num_free == scheduler.kv_cache_config.num_blocks - 1
