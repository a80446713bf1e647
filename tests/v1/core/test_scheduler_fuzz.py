# SPDX-License-Identifier: Apache-2.0
"""Random arrivals, aborts, preemptions, prefix sharing, resets and NaN, checked against requests that run alone."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_simulator import EOS, Simulator, make_scheduler

MAX_MODEL_LEN = 24
SHARED = [1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0, 1, 0, 0, 1]
PROMPTS = st.builds(
    lambda shared, tail: SHARED[:shared] + tail,
    st.sampled_from([0, 3, 4, 7, 8, 11, 12, 16]),
    st.lists(st.integers(0, 1), min_size=1, max_size=3),
)


class SchedulerMachine(RuleBasedStateMachine):
    simulator: Simulator

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        spare=st.integers(0, 8),
        budget=st.integers(4, 30),
        max_num_seqs=st.integers(2, 4),
        kind=st.sampled_from(["caching", "caching", "caching", "plain", "hybrid"]),
        chunked=st.booleans(),
    )
    def start(self, block_size, spare, budget, max_num_seqs, kind, chunked):
        self.simulator = Simulator(
            make_scheduler(
                num_blocks=1 + -(-MAX_MODEL_LEN // block_size) + spare,
                block_size=block_size,
                budget=budget if chunked else max(budget, MAX_MODEL_LEN),
                max_num_seqs=max_num_seqs,
                max_model_len=MAX_MODEL_LEN,
                caching=kind == "caching",
                chunked=chunked,
                num_state_slots=max_num_seqs + 1 if kind == "hybrid" else 0,
            )
        )
        self.count = 0

    def _name(self, data) -> str:
        return data.draw(st.sampled_from(sorted(self.simulator.requests)))

    @rule(
        prompts=st.lists(PROMPTS, min_size=1, max_size=4),
        max_tokens=st.integers(1, 14),
        min_tokens=st.integers(0, 3),
        ends=st.sampled_from(["length", "length", "eos", "stop"]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
    )
    def add(self, prompts, max_tokens, min_tokens, ends, prompt_logprobs):
        for prompt in prompts:
            self.count += 1
            self.simulator.add(
                f"r{self.count}",
                prompt,
                max_tokens=max_tokens,
                min_tokens=min(min_tokens, max_tokens),
                ignore_eos=ends != "eos",
                stop_token_ids=[EOS + 1] if ends == "stop" else [],
                prompt_logprobs=prompt_logprobs,
            )

    @rule(times=st.integers(1, 8))
    def step(self, times):
        for _ in range(times):
            self.simulator.step()
            self.sound()

    @precondition(lambda self: self.simulator.requests)
    @rule(data=st.data())
    def abort(self, data):
        self.simulator.abort(self._name(data), "unknown")

    @precondition(lambda self: self.simulator.requests)
    @rule(data=st.data(), reuse_id=st.booleans())
    def abort_during_step(self, data, reuse_id):
        step = self.simulator.schedule()
        result = self.simulator.execute(step)
        name = self._name(data)
        self.simulator.abort(name)
        if reuse_id:
            self.simulator.add(name, [1, 0, 1], max_tokens=2)
        assert name not in {output.request_id for output in self.simulator.update(step, result)}

    @precondition(lambda self: self.simulator.scheduler.running)
    @rule(data=st.data())
    def nan(self, data):
        step = self.simulator.schedule()
        if step.requests:
            name = data.draw(st.sampled_from([r.request_id for r in step.requests]))
            outputs = self.simulator.update(step, self.simulator.execute(step, frozenset([name])))
            assert [o.new_token_ids for o in outputs if o.finish_reason == "error"] == [[]]
        else:
            self.simulator.update(step, self.simulator.execute(step))

    @rule()
    def reset(self):
        self.simulator.reset()

    @precondition(lambda self: self.simulator.requests)
    @rule(data=st.data())
    def drop(self, data):
        self.simulator.scheduler.drop_cached_blocks(self._name(data))

    @invariant()
    def sound(self):
        if hasattr(self, "simulator"):
            scheduler = self.simulator.scheduler
            scheduler.check_integrity()
            order = [r.request_id for r in [*scheduler.running, *scheduler.waiting]]
            assert order == list(scheduler.requests), "not in order of arrival"

    def teardown(self):
        if hasattr(self, "simulator"):
            self.simulator.finish()


SchedulerMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
TestScheduler = SchedulerMachine.TestCase


@pytest.mark.slow
class TestSchedulerLong(SchedulerMachine.TestCase):
    settings = settings(
        max_examples=1000, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
    )
