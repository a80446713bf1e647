# SPDX-License-Identifier: Apache-2.0
"""What runs in a step, in which order, and how requests end. The tokens are checked by the simulator in each step."""

from __future__ import annotations

import gc
import sys

import pytest
from kv_simulator import EOS, Simulator, digests, make_scheduler, next_token

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus


def ids(step) -> list[str]:
    return [r.request_id for r in step.requests]


def prompt(length: int, seed: int = 1) -> list[int]:
    return [(seed * 7 + i * i) % 5 for i in range(length)]


def test_running_first_then_admitted_and_chunked_under_the_budget():
    sim = Simulator(make_scheduler(budget=10))
    sim.add("a", prompt(4))
    sim.add("b", prompt(9, 2))
    step = sim.schedule()
    assert (ids(step), step.num_scheduled_tokens, step.started) == (["a", "b"], [4, 6], {"a", "b"})
    sim.update(step, sim.execute(step))
    sim.add("c", prompt(12, 3))
    step = sim.schedule()
    assert (ids(step), step.num_scheduled_tokens, step.started) == (["a", "b", "c"], [1, 3, 6], {"c"})
    sim.update(step, sim.execute(step))
    sim.finish()


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunks_do_not_change_tokens(chunk):
    sim = Simulator(make_scheduler(budget=chunk, max_num_seqs=1, caching=False))
    sim.add("a", prompt(40), max_tokens=20)
    sim.finish()
    assert sim.num_steps == -(-40 // chunk) + 19


def test_without_chunked_prefill_a_prompt_runs_whole():
    sim = Simulator(make_scheduler(budget=64, chunked=False, caching=False))
    sim.add("a", prompt(40))
    sim.add("b", prompt(30, 2))
    sim.add("c", prompt(3, 3))
    step = sim.schedule()
    assert (ids(step), step.num_scheduled_tokens) == (["a"], [40]), "b does not fit whole, c may not pass it"
    sim.update(step, sim.execute(step))
    step = sim.schedule()
    assert (ids(step), step.num_scheduled_tokens) == (["a", "b", "c"], [1, 30, 3])
    sim.update(step, sim.execute(step))
    sim.finish()


def test_without_chunked_prefill_a_waiting_prompt_evicts_nothing():
    sim = Simulator(make_scheduler(num_blocks=17, budget=64, chunked=False, max_model_len=64))
    sim.add("old", prompt(20, 5), max_tokens=1)
    sim.finish()
    sim.add("a", prompt(31), max_tokens=2)
    sim.add("b", prompt(40, 2), max_tokens=2)
    cached = len(sim.scheduler.kv_cache_manager.pool.cached)
    step = sim.schedule()
    assert ids(step) == ["a"]
    sim.update(step, sim.execute(step))
    assert len(sim.scheduler.kv_cache_manager.pool.cached) == cached + 31 // 4
    sim.finish()


def test_max_num_seqs_bounds_the_running_requests():
    sim = Simulator(make_scheduler(max_num_seqs=3))
    for i in range(7):
        sim.add(str(i), prompt(5, i), max_tokens=4)
    step = sim.schedule()
    assert ids(step) == ["0", "1", "2"]
    sim.update(step, sim.execute(step))
    sim.finish()


def test_the_last_request_gives_way_and_is_first_to_come_back():
    sim = Simulator(make_scheduler(num_blocks=1 + 6, block_size=4, max_model_len=24, caching=False))
    a = sim.add("a", prompt(8), max_tokens=16)
    b = sim.add("b", prompt(8, 2), max_tokens=8)
    sim.add("c", prompt(12, 3), max_tokens=1)
    sim.step()
    step = sim.schedule()
    assert (ids(step), step.preempted_req_ids, step.started) == (["a", "b"], frozenset(), frozenset())
    sim.update(step, sim.execute(step))
    while not (step := sim.schedule()).preempted_req_ids:
        sim.update(step, sim.execute(step))
    assert (ids(step), step.preempted_req_ids) == (["a"], {"b"})
    assert (b.status, b.num_computed_tokens, b.block_ids) == (RequestStatus.PREEMPTED, 0, [])
    assert [r.request_id for r in sim.scheduler.waiting] == ["b", "c"]
    sim.update(step, sim.execute(step))
    sim.finish()
    assert b.num_preemptions >= 1
    assert a.num_preemptions == 0


def test_a_request_that_preempts_itself_waits():
    sim = Simulator(make_scheduler(num_blocks=1 + 4, max_model_len=16, caching=False))
    a = sim.add("a", prompt(8), max_tokens=8)
    sim.step()
    pool = sim.scheduler.kv_cache_manager.pool
    others = pool.allocate(pool.num_free)
    step = sim.schedule()
    assert (ids(step), step.preempted_req_ids, a.status) == ([], {"a"}, RequestStatus.PREEMPTED)
    sim.update(step, sim.execute(step))
    pool.free(others)
    sim.finish()


def test_a_long_request_is_not_starved_by_short_ones():
    sim = Simulator(make_scheduler(num_blocks=1 + 8, max_model_len=32, max_num_seqs=4, caching=False))
    for i in range(4):
        sim.add(f"early{i}", prompt(4, i), max_tokens=4)
    sim.add("long", prompt(24, 9), max_tokens=8)
    finished = []
    for i in range(60):
        if i < 40:
            sim.add(f"short{i}", prompt(3, i), max_tokens=3)
        finished += [output.request_id for output in sim.step() if output.finished]
    assert finished.index("long") == 4, finished
    sim.finish()


def test_first_come_first_served_to_the_end():
    sim = Simulator(make_scheduler(num_blocks=1 + 12, max_model_len=32, max_num_seqs=3))
    finished = []
    for i in range(12):
        sim.add(str(i), prompt(6, i), max_tokens=6)
    while sim.requests:
        finished += [int(output.request_id) for output in sim.step() if output.finished]
    assert finished == sorted(finished)


@pytest.mark.parametrize(
    ("length", "max_tokens", "numbers"),
    [
        (0, 4, ["prompt of 0 tokens"]),
        (32, 4, ["32", "max_model_len=32"]),
        (9, 20, ["prompt of 9", "max_tokens=20", "need 8", "has 7", "28 tokens"]),
    ],
)
def test_what_can_never_fit_is_refused_with_the_numbers(length, max_tokens, numbers):
    sim = Simulator(make_scheduler(num_blocks=1 + 7, max_model_len=32))
    other = sim.add("other", prompt(4))
    with pytest.raises(ValueError) as raised:
        sim.scheduler.add_request(Request("bad", prompt(length), type(other.sampling_params)(max_tokens=max_tokens)))
    assert all(number in str(raised.value) for number in numbers), raised.value
    assert list(sim.scheduler.requests) == ["other"]
    sim.add("fits", prompt(20), max_tokens=8)
    sim.finish()


def test_an_id_in_use_is_refused():
    sim = Simulator(make_scheduler())
    sim.add("a", prompt(4))
    with pytest.raises(ValueError, match="'a' is in use"):
        sim.scheduler.add_request(Request("a", prompt(3), sim.requests["a"].sampling_params))
    sim.finish()


def _greedy(tokens: list[int], count: int) -> list[int]:
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(next_token(digests(tokens)[-1]))
    return tokens[-count:]


def test_stop_rules():
    start = next(p for i in range(99) if EOS in _greedy(p := prompt(6, i), 4)[1:3])
    output = _greedy(start, 12)
    at = output.index(EOS)
    ended = {}
    sim = Simulator(make_scheduler())
    requests = {
        "eos": sim.add("eos", start, ignore_eos=False, max_tokens=12),
        "ignored": sim.add("ignored", start, ignore_eos=True, max_tokens=12),
        "stop": sim.add("stop", start, stop_token_ids=[output[0]], max_tokens=12),
        "min": sim.add("min", start, ignore_eos=False, min_tokens=at + 2, max_tokens=12),
        "min_met": sim.add("min_met", start, ignore_eos=False, min_tokens=at + 1, max_tokens=12),
        "eos_as_stop": sim.add("eos_as_stop", start, stop_token_ids=[EOS], max_tokens=12),
        "both": sim.add("both", start, ignore_eos=False, max_tokens=at + 1),
    }
    while sim.requests:
        ended |= {o.request_id: (o.finish_reason, o.stop_reason) for o in sim.step() if o.finished}
    assert ended["eos"] == ("stop", None)
    assert ended["ignored"] == ("length", None)
    assert ended["stop"] == ("stop", output[0])
    assert ended["eos_as_stop"] == ("stop", EOS)
    assert ended["both"] == ("stop", None), "an end token in the last place is a stop, not a length"
    lengths = {name: request.num_output_tokens for name, request in requests.items()}
    assert (lengths["eos"], lengths["ignored"], lengths["stop"]) == (at + 1, 12, 1)
    assert lengths["min"] > at + 1
    assert lengths["min_met"] == at + 1, "the last of min_tokens may be an end token"


def test_max_model_len_caps_whatever_min_tokens_asks():
    sim = Simulator(make_scheduler(max_model_len=10))
    a = sim.add("a", prompt(6), max_tokens=100, min_tokens=50)
    sim.finish()
    assert (a.num_tokens, a.status) == (10, RequestStatus.FINISHED_LENGTH_CAPPED)


def test_abort_between_schedule_and_update_is_skipped():
    sim = Simulator(make_scheduler())
    a, b = sim.add("a", prompt(6)), sim.add("b", prompt(9, 2))
    step = sim.schedule()
    result = sim.execute(step)
    sim.abort("a")
    assert [o.request_id for o in sim.update(step, result)] == ["b"]
    assert (a.status.finish_reason, a.num_output_tokens, a.block_ids) == ("abort", 0, [])
    assert b.num_output_tokens == 1
    step = sim.schedule()
    assert step.finished_req_ids == {"a"}
    sim.update(step, sim.execute(step))
    sim.finish()


def test_an_aborted_prefill_leaves_nothing_to_find():
    sim = Simulator(make_scheduler())
    sim.add("a", prompt(16))
    step = sim.schedule()
    result = sim.execute(step)
    sim.abort("a")
    sim.update(step, result)
    assert not sim.scheduler.kv_cache_manager.pool.cached
    sim.check_idle()


def test_unknown_and_finished_ids_are_ignored():
    sim = Simulator(make_scheduler())
    sim.add("a", prompt(4), max_tokens=1)
    sim.finish()
    sim.scheduler.finish_requests(["a", "never"], RequestStatus.FINISHED_ABORTED)
    sim.scheduler.finish_requests("never", RequestStatus.FINISHED_STOPPED)
    sim.scheduler.drop_cached_blocks("never")
    assert sim.schedule().finished_req_ids == {"a"}


def test_nan_ends_the_request_and_its_blocks_are_not_reused():
    sim = Simulator(make_scheduler())
    shared = prompt(16)
    sim.add("a", shared, max_tokens=8)
    sim.step()
    b = sim.add("b", shared, max_tokens=8)
    sim.step()
    assert b.num_cached_tokens == 12
    of_a, of_b = sim.step(nan=frozenset(["a"]))
    assert (of_a.request_id, of_a.finish_reason, of_a.new_token_ids) == ("a", "error", [])
    assert (of_b.request_id, of_b.finish_reason, len(of_b.new_token_ids)) == ("b", None, 1)
    c = sim.add("c", shared, max_tokens=8)
    sim.finish()
    assert c.num_cached_tokens == 0


def test_prompt_logprobs_read_no_cache_and_come_once_though_preempted():
    sim = Simulator(make_scheduler(num_blocks=1 + 6, max_model_len=24, budget=8))
    tokens = prompt(12)
    sim.add("warm", tokens, max_tokens=1)
    sim.finish()
    a = sim.add("a", tokens, max_tokens=4, prompt_logprobs=0)
    got: list[int] = []

    def step() -> None:
        plan = sim.schedule()
        result = sim.execute(plan)
        for request, start, count in zip(
            plan.requests, plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True
        ):
            rows = list(range(start, min(start + count, request.num_prompt_tokens - 1)))
            if rows:
                result.prompt_logprobs["a"] = LogprobsLists([[r] for r in rows], [[0.0]] * len(rows), [1] * len(rows))
        for output in sim.update(plan, result):
            got.extend(row[0] for row in (output.new_prompt_logprobs or LogprobsLists([], [], [])).token_ids)

    step()
    assert a.num_cached_tokens == 0
    assert got == list(range(8))
    sim.scheduler._preempt(sim.scheduler.running.pop())
    sim.rows.clear()
    while sim.requests:
        step()
    assert got == list(range(11))


def test_one_output_only_where_there_is_news():
    sim = Simulator(make_scheduler(budget=8))
    sim.add("a", prompt(12), max_tokens=2)
    assert sim.step() == []
    first, second = sim.step(), sim.step()
    assert [(len(o.new_token_ids), o.finished) for o in first + second] == [(1, False), (1, True)]


def test_case_1_a_rank_that_can_schedule_nothing_returns_an_empty_step():
    """A full pool: the rank has an unfinished request, runs 50 empty steps beside its neighbour, then goes on."""
    idle, busy = Simulator(make_scheduler()), Simulator(make_scheduler(max_model_len=64))
    pool = idle.scheduler.kv_cache_manager.pool
    foreign = pool.allocate(pool.num_free)
    idle.add("stuck", prompt(5))
    busy.add("busy", prompt(4), max_tokens=51)
    for _ in range(51):
        step = idle.schedule()
        assert (step.total_num_scheduled_tokens, step.requests) == (0, [])
        assert idle.scheduler.has_unfinished_requests()
        assert idle.scheduler.update_from_output(step, ModelRunnerOutput()) == []
        busy.step()
    busy.check_idle()
    pool.free(foreign)
    idle.finish()


def test_case_16_a_prefix_hit_after_others_finished_equals_a_cold_run():
    sim = Simulator(make_scheduler())
    for i in range(3):
        sim.add(str(i), [*prompt(16), i], max_tokens=3)
    sim.finish()
    hit = sim.add("hit", [*prompt(16), 4, 4], max_tokens=8)
    sim.finish()
    assert hit.num_cached_tokens == 16
    hybrid = Simulator(make_scheduler(caching=False, num_state_slots=9))
    for i in range(3):
        hybrid.add(str(i), [*prompt(16), i], max_tokens=3)
    hybrid.finish()
    cold = hybrid.add("hit", [*prompt(16), 4, 4], max_tokens=8)
    hybrid.finish()
    assert cold.num_cached_tokens == 0
    assert cold.output_token_ids == hit.output_token_ids


def test_case_17_blocks_and_slots_of_a_finished_request_have_one_new_owner():
    sim = Simulator(make_scheduler(num_blocks=1 + 8, max_model_len=32, caching=False, num_state_slots=6))
    first = sim.add("0", prompt(5), max_tokens=1)
    others = [sim.add(str(i), prompt(5, i), max_tokens=6) for i in (1, 2, 3)]
    step = sim.schedule()
    blocks, slot = list(first.block_ids), first.state_slot
    sim.update(step, sim.execute(step))
    assert (first.block_ids, first.state_slot) == ([], -1)
    new = sim.add("4", prompt(6, 4), max_tokens=2)
    step = sim.schedule()
    assert step.finished_req_ids == {"0"}
    assert set(new.block_ids) == set(blocks)
    assert new.state_slot == slot
    assert not set(new.block_ids) & {block for r in others for block in r.block_ids}
    sim.update(step, sim.execute(step))
    sim.scheduler.check_integrity()
    sim.finish()


def test_state_slots_bound_the_running_requests_and_all_come_back():
    sim = Simulator(make_scheduler(caching=False, num_state_slots=3))
    for i in range(5):
        sim.add(str(i), prompt(5, i), max_tokens=3)
    step = sim.schedule()
    assert [r.state_slot for r in step.requests] == [1, 2]
    sim.update(step, sim.execute(step))
    sim.finish()
    assert sorted(sim.scheduler.kv_cache_manager.free_state_slots) == [1, 2]


def test_state_slots_with_prefix_caching_are_refused():
    with pytest.raises(AssertionError, match="3 state slots and prefix caching"):
        make_scheduler(caching=True, num_state_slots=3)


def test_a_decode_step_costs_the_same_at_any_length():
    """Python calls of a decode step, counted: no work over blocks or tokens."""

    def calls(length: int) -> int:
        sim = Simulator(make_scheduler(num_blocks=5000, budget=20000, max_num_seqs=32, max_model_len=1000))
        for i in range(32):
            sim.add(str(i), prompt(length, i), max_tokens=9)
        sim.step()
        count = 0

        def profile(_frame, event, _argument):
            nonlocal count
            count += event in ("call", "c_call")

        gc.collect()
        gc.disable()  # a collection in between would have its callbacks and finalisers counted
        try:
            sys.setprofile(profile)
            step = sim.scheduler.schedule()
            sys.setprofile(None)
            result = sim.execute(step)
            sys.setprofile(profile)
            sim.scheduler.update_from_output(step, result)
        finally:
            sys.setprofile(None)
            gc.enable()
        return count

    short, long = calls(5), calls(501)
    assert short == long
    assert short < 32 * 25


def _fault_free_twice(monkeypatch):
    end = Scheduler._end

    def twice(self, request, status):
        blocks = list(request.block_ids)
        end(self, request, status)
        self.kv_cache_manager.pool.free(blocks)

    monkeypatch.setattr(Scheduler, "_end", twice)


def test_fault_put_back_freeing_twice(monkeypatch):
    _fault_free_twice(monkeypatch)
    sim = Simulator(make_scheduler())
    sim.add("a", prompt(4), max_tokens=1)
    with pytest.raises(AssertionError, match="block 1 freed with 0 holders"):
        sim.step()


def test_fault_put_back_a_forgotten_free_is_named():
    sim = Simulator(make_scheduler())
    a = sim.add("a", prompt(6), max_tokens=2)
    sim.step()
    leaked = a.block_ids.pop()
    sim.abort("a")
    with pytest.raises(AssertionError, match=rf"leaked.*{{{leaked}: '1 recorded, held by \[\]'}}"):
        sim.scheduler.check_integrity()


def test_fault_put_back_a_block_with_two_owners_is_named():
    sim = Simulator(make_scheduler())
    a, b = sim.add("a", prompt(6)), sim.add("b", prompt(6, 2))
    sim.step()
    b.block_ids[1] = a.block_ids[1]
    with pytest.raises(AssertionError, match=rf"{a.block_ids[1]}: \"1 recorded, held by \['a', 'b'\]"):
        sim.scheduler.check_integrity()
