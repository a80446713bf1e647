# SPDX-License-Identifier: Apache-2.0
"""Steps that are scheduled ahead give what steps one at a time give, whenever the host learns of a request's end.

On CPU a thread stands for the device (``ThreadStream``): here it is late by random delays, so that a step is prepared
while another one runs. What the two engines are given is drawn; memory that nobody wrote is NaN.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny_hybrids as hybrids
import tiny_models as tiny
import torch
from async_cases import Arrival, compare, drive, late, latest
from drawn import HealthCheck, given, settings, st
from entrypoints.engine_fakes import save_byte_llama

from vllm import SamplingParams
from vllm.forward_context import get_place, set_current_layer, set_current_step
from vllm.v1 import transfers
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

BLOCK = 16
LIMITS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 96,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "num_gpu_blocks_override": 64,
    "block_size": BLOCK,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bytes")
    save_byte_llama(path)
    return path


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[Callable[..., tuple[Any, Any]]]:
    """Of the same settings, one that schedules ahead and one that does not; made once."""
    from vllm import LLM

    made: dict[str, tuple[Any, Any]] = {}

    def make(**kwargs: Any) -> tuple[Any, Any]:
        if repr(kwargs) not in made:
            given = {**LIMITS, **kwargs}
            made[repr(kwargs)] = tuple(LLM(str(folder), async_scheduling=ahead, **given) for ahead in (True, False))
        return made[repr(kwargs)]

    yield make
    for pair in made.values():
        for llm in pair:
            llm.shutdown()


PARAMS = st.fixed_dictionaries(
    {"max_tokens": st.sampled_from([1, 1, 2, 3, 5, 9, 17]), "temperature": st.sampled_from([0.0, 1.0])},
    optional={
        "ignore_eos": st.just(True),
        "stop_token_ids": st.lists(st.integers(3, 259), min_size=20, max_size=40),
        "stop": st.lists(st.sampled_from(list("abcdefghij0123456789 ")), min_size=5, max_size=20),
        "min_tokens": st.just(1),
        "logprobs": st.sampled_from([0, 2]),
        "prompt_logprobs": st.just(1),
        "repetition_penalty": st.just(1.3),
        "frequency_penalty": st.just(0.5),
        "top_k": st.just(30),
        "structured_outputs": st.sampled_from(
            [{"regex": "[a-f]{2,6}"}, {"choice": ["abc", "abd", "xyz12"]}, {"regex": "(ab|b)*c"}]
        ),
    },
)
# Prompts that begin alike, so that prefixes are found.
PROMPTS = st.builds(
    lambda common, length: tiny.prompt(64)[:common] + tiny.prompt(length, seed=1),
    st.sampled_from([0, 16, 33]),
    st.integers(1, 20),
)


@st.composite
def _arrivals(draw: Any, num_calls: int, most: int, aborts: bool) -> list[Arrival]:
    arrivals = []
    for seed in range(draw(st.integers(1, most))):
        at = draw(st.integers(0, num_calls))
        aborted_at = at + draw(st.integers(1, 8)) if aborts and draw(st.integers(0, 3)) == 0 else None
        arrivals.append(Arrival(at, draw(PROMPTS), {"seed": seed, **draw(PARAMS)}, aborted_at))
    return arrivals


ROOM = {"max_num_seqs": 32, "max_num_batched_tokens": 2048, "num_gpu_blocks_override": 400}
SHORT = {"max_num_seqs": 3, "max_num_batched_tokens": 20, "num_gpu_blocks_override": 8}
FUZZ = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True, "database": None}


@given(arrivals=_arrivals(12, 5, aborts=True), resets=st.sets(st.integers(1, 14), max_size=2))
@settings(max_examples=25, **FUZZ)
@pytest.mark.usefixtures("nan_poison")
def test_the_same_comes_of_steps_ahead(engines: Any, arrivals: list[Arrival], resets: set[int]) -> None:
    """Room for all: cached tokens are the same, too. Prefixes are forgotten while a step is in flight."""
    ahead, one_by_one = engines(**ROOM)
    for llm in (ahead, one_by_one):
        llm.reset_prefix_cache()
    with late(0.002):
        found = drive(ahead, arrivals, resets=resets)
    compare(found, drive(one_by_one, arrivals, resets=resets))


@given(arrivals=_arrivals(6, 7, aborts=True))
@settings(max_examples=15, **FUZZ)
@pytest.mark.usefixtures("nan_poison")
def test_the_same_comes_of_steps_ahead_where_blocks_are_short(engines: Any, arrivals: list[Arrival]) -> None:
    """Requests are preempted, wait for rows, and run in chunks; prefixes are found when they are."""
    ahead, one_by_one = engines(**SHORT)
    with late(0.002):
        found = drive(ahead, arrivals)
    compare(found, drive(one_by_one, arrivals), cached=False)


# --- what the host learns late ----------------------------------------------------------------------------------------


def rows_of_steps(llm: Any) -> list[tuple[int, list[bool]]]:
    """Step by step the requests that run and those that sample; filled in as the engine steps."""
    runner, seen = llm.llm_engine.worker.runner, []
    launch = runner.launch

    def noted(output: Any, has_unfinished: bool) -> Any:
        seen.append((len(output.requests), list(output.samples)))
        return launch(output, has_unfinished)

    runner.launch = noted
    return seen


@pytest.mark.parametrize(
    ("params", "num_rows"),
    [
        ({"max_tokens": 1}, [1, 0]),
        ({"max_tokens": 4}, [1, 1, 1, 1, 0]),  # known to end: nothing is run for it
        ({"max_tokens": 9, "stop_token_ids": "third"}, [1, 1, 1, 1, 0]),  # the host learns late: one row
        ({"max_tokens": 3, "repetition_penalty": 1.5}, [1, 1, 1, 0]),  # each waits for its token
    ],
)
def test_a_late_end_costs_at_most_one_row(engines: Any, params: dict[str, Any], num_rows: list[int]) -> None:
    llm, other = engines(**ROOM)
    prompt = tiny.prompt(7, seed=3)
    given = {"temperature": 0, "ignore_eos": True, **params}
    if "stop_token_ids" in params:
        free = drive(other, [Arrival(0, prompt, {"temperature": 0, "ignore_eos": True, "max_tokens": 3})])
        assert free[0].token_ids.count(free[0].token_ids[2]) == 1
        given["stop_token_ids"] = [free[0].token_ids[2]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.llm_engine.worker.runner, "launch", llm.llm_engine.worker.runner.launch)
        seen = rows_of_steps(llm)
        found = drive(llm, [Arrival(0, prompt, given)])
    assert [rows for rows, _ in seen] == num_rows
    compare(found, drive(other, [Arrival(0, prompt, given)]))


def test_steps_overlap(engines: Any) -> None:
    """The next step is launched before the last one has begun, whose tokens it reads."""
    llm, other = engines(**ROOM)
    runner, unfinished, most = llm.llm_engine.worker.runner, 0, 0
    launch, finish = runner.launch, runner.finish

    def launched(*args: Any) -> Any:
        nonlocal unfinished, most
        unfinished += 1
        most = max(most, unfinished)
        return launch(*args)

    def finished(step: Any) -> Any:
        nonlocal unfinished
        unfinished -= 1
        return finish(step)

    arrivals = [Arrival(0, tiny.prompt(9), {"temperature": 0, "max_tokens": 12, "ignore_eos": True})]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "launch", launched)
        patch.setattr(runner, "finish", finished)
        found = drive(llm, arrivals)
    assert (most, unfinished) == (2, 0)
    compare(found, drive(other, arrivals))


def test_a_request_takes_the_name_of_one_whose_last_row_is_in_flight(engines: Any) -> None:
    llm, other = engines(**ROOM)
    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for _ in range(3):
        engine.add_request("0", {"prompt_token_ids": list(tiny.prompt(9))}, params)
        engine.step()
        engine.step()
        assert engine.engine_core._in_flight is not None
        engine.abort_request("0")
    given = [Arrival(0, tiny.prompt(9), {"temperature": 0, "max_tokens": 6, "ignore_eos": True})]
    compare(drive(llm, given), drive(other, given), cached=False)


def test_nan_ends_its_request_and_those_that_began_on_its_blocks_begin_again(engines: Any) -> None:
    """The second request is admitted on the first one's blocks before the host knows that they hold NaN."""
    llm, other = engines(**ROOM)
    engine, prompt, calls = llm.llm_engine, tiny.prompt(34), []
    params = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
    later = (*prompt[:32], 5, 6, 7)

    def spoil(_: Any, args: tuple[torch.Tensor, torch.Tensor]) -> None:
        calls.append(args[1].shape[0])
        if len(calls) == 1:
            args[1].fill_(torch.nan)

    handle = engine.worker.get_model().model.layers[0].self_attn.register_forward_pre_hook(spoil)
    engine.add_request("bad", {"prompt_token_ids": list(prompt)}, SamplingParams(**params))
    engine.step()
    engine.add_request("good", {"prompt_token_ids": list(later)}, SamplingParams(**params))
    ended = {}
    while engine.has_unfinished_requests():
        ended |= {o.request_id: o.outputs[0] for o in engine.step() if o.finished}
    handle.remove()
    assert {name: output.finish_reason for name, output in ended.items()} == {"bad": "error", "good": "length"}
    # The whole prompt; a token of the first request beside the rest of the second, which began on 32 tokens of NaN.
    assert calls[:3] == [34, 1 + 3, 35]
    assert ended["good"].token_ids == drive(other, [Arrival(0, later, params)])[0].token_ids
    engine.scheduler.check_integrity()


def test_work_that_fails_is_told_to_whoever_waits_and_nothing_runs_after_it() -> None:
    stream, ran = transfers.ThreadStream(), []
    event = stream.make_event()
    stream.launch(lambda: {}["work"])
    stream.launch(lambda: ran.append(1))
    event.record()
    with pytest.raises(KeyError, match="work"):
        event.synchronize()
    with pytest.raises(KeyError, match="work"):
        stream.wait()
    stream.close()
    assert ran == []


def test_a_failure_is_told_at_once_with_the_step_and_layer_of_its_thread() -> None:
    set_current_step(8)
    told, is_told = [], threading.Event()

    def tell(error: BaseException) -> None:
        told.append((repr(error), str(get_place())))
        is_told.set()

    def fails() -> None:
        set_current_step(7)
        set_current_layer("layers.1")
        raise KeyError("work")

    stream = transfers.ThreadStream(tell)
    stream.launch(fails)
    assert is_told.wait(60), "nobody waits, and nobody is told"
    stream.close()
    assert told == [("KeyError('work')", "step 7, layer layers.1")]
    assert str(get_place()) == "step 8, layer none"
    set_current_step(-1)


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize("where", ["host", "device"])
def test_a_step_that_fails_is_named_and_none_follows(folder: Path, where: str, ahead: bool) -> None:
    from vllm import LLM
    from vllm.v1.debug import watchdog
    from vllm.v1.engine.exceptions import EngineDeadError

    llm = LLM(str(folder), async_scheduling=ahead, **LIMITS)
    params, prompts = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True), ["hello", "you"]

    def fails(*_: Any) -> None:
        if get_place().step == 3:
            raise ValueError("injected")

    layer, buffers = "none", llm.llm_engine.worker.runner.buffers
    if where == "host":
        filling = buffers.filling
        buffers.filling = lambda: fails() or filling()
    else:
        layer = r"model\.layers\.1\.\S+"
        handle = llm.llm_engine.worker.get_model().model.layers[1].mlp.register_forward_pre_hook(fails)
    with pytest.raises(ValueError, match="injected"):
        llm.generate(prompts, params, use_tqdm=False)
    named = rf"failed: step 3 failed, layer {layer}: ValueError\('injected'\)"
    assert re.fullmatch(named, watchdog._installed.ledger.state)
    if where == "host":
        buffers.filling = filling
    else:
        handle.remove()
    for call in (lambda: llm.generate(prompts, params, use_tqdm=False), llm.llm_engine.step):
        assert not llm.llm_engine.has_unfinished_requests()
        with pytest.raises(EngineDeadError, match=r"no step follows one that failed, with ValueError\('injected'\)"):
            call()
    llm.shutdown()


# --- what is changed between two steps, one of them in flight --------------------------------------------------------


@contextmanager
def slow_device() -> Iterator[None]:
    """Each forward pass begins late enough for the host to change what it has not read yet."""
    forward = GPUModelRunner._forward

    def delayed(*args: Any) -> None:
        time.sleep(0.05)
        forward(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GPUModelRunner, "_forward", delayed)
        yield


def of_other_weights(model: Any) -> Any:
    return model.load_weights((n, p.detach()) for n, p in tiny.reference_model("qwen3", seed=3).named_parameters())


def zero_the_head(model: Any) -> None:
    with torch.no_grad():
        model.model.norm.weight.zero_()


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "a trainer's weights, by a model that it keeps": lambda llm, kept: of_other_weights(kept),
    "a weight, on the path that trainers take": lambda llm, kept: zero_the_head(
        llm.llm_engine.model_executor.driver_worker.model_runner.model
    ),
    "a weight, in the worker": lambda llm, kept: llm.collective_rpc(lambda w: zero_the_head(w.runner.model)),
    "a weight, in the model": lambda llm, kept: llm.apply_model(zero_the_head),
}


def changed_in_the_middle(change: Callable[[Any, Any], Any] | None, ahead: bool) -> tuple[list[int], ...]:
    """Tokens of a request that runs for 4 calls before the change, and of one that comes after it."""
    llm = tiny.make_llm("qwen3", async_scheduling=ahead, enable_prefix_caching=True)
    engine, found = llm.llm_engine, dict[str, list[int]]()
    kept = engine.model_executor.driver_worker.model_runner.model
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)
    engine.add_request("0", {"prompt_token_ids": list(tiny.prompt(20))}, params)
    for call in range(40):
        if call == 4:
            if change is not None:
                change(llm, kept)
            engine.add_request("1", {"prompt_token_ids": list(tiny.prompt(20))}, params)
        for output in engine.step():
            found[output.request_id] = list(output.outputs[0].token_ids)
        if not engine.has_unfinished_requests():
            break
    llm.shutdown()
    return found["0"], found["1"]


@pytest.mark.parametrize("change", CHANGES)
def test_a_step_in_flight_reads_nothing_that_comes_after_it(change: str) -> None:
    expected = changed_in_the_middle(CHANGES[change], ahead=False)
    assert expected[0][:4] != expected[1][:4], "the change changes nothing"
    with slow_device():
        assert changed_in_the_middle(CHANGES[change], ahead=True) == expected


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_takes_in_the_step_in_flight(level: int) -> None:
    """Its row is of a request that has ended, or was aborted; nothing is due after it, and the engine is as it was."""
    llm = tiny.make_llm("qwen3", async_scheduling=True)
    engine, expected = llm.llm_engine, tiny.greedy("qwen3", tiny.prompt(9), 12)
    for aborts in (True, False):
        params = SamplingParams(temperature=0, max_tokens=12, detokenize=False, stop_token_ids=[expected[2]])
        engine.add_request("0", {"prompt_token_ids": list(tiny.prompt(9))}, params)
        with slow_device():
            while engine.get_num_unfinished_requests():
                engine.step()
                if aborts:
                    engine.abort_request("0")
            assert engine.engine_core._in_flight is not None
            llm.sleep(level)
        assert not engine.has_unfinished_requests()
        assert not engine.scheduler._in_flight
        llm.wake_up()
        if level == 2:
            given = tiny.reference_model("qwen3").named_parameters()
            engine.worker.get_model().load_weights((name, value.detach()) for name, value in given)
        assert tiny.tokens(tiny.generate(llm, [tiny.prompt(9)], 12)) == [expected]
    llm.shutdown()


# --- the races that others had, put back ------------------------------------------------------------------------------


def tiny_llm(like: Any) -> Any:
    """One that schedules ahead, to be spoilt."""
    from vllm import LLM

    return LLM(like.llm_engine.model_config.model, async_scheduling=True, **{**LIMITS, **ROOM})


def many(num: int, **params: Any) -> list[Arrival]:
    given = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, **params}
    return [Arrival(i, tiny.prompt(5 + i, seed=4), given) for i in range(num)]


def test_put_back_staging_memory_that_is_written_too_early(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-project/vllm#54269: what a pending copy reads is overwritten by the next step."""
    _, other = engines(**ROOM)
    expected = drive(other, many(4))

    @contextmanager
    def at_once(self: transfers.Staging) -> Iterator[None]:
        self.is_open, self.current = True, 0
        yield

    llm = tiny_llm(other)
    with late(0.02):
        compare(drive(llm, many(4)), expected, cached=False)
    with latest():
        compare(drive(llm, many(4)), expected, cached=False)
        monkeypatch.setattr(transfers.Staging, "filling", at_once)
        try:
            found = [result.token_ids for result in drive(llm, many(4))]
        except AssertionError as error:  # inputs of two steps in one
            found = [str(error)]
    llm.shutdown()
    assert found != [result.token_ids for result in expected]


def test_put_back_a_state_slot_given_away_while_its_last_row_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host clears it at once, and the row of the request that ended writes it again: hybrids' blocks."""
    limits = {"max_num_seqs": 1, "async_scheduling": True}
    llm = hybrids.make_llm("qwen3.5-moe", **limits)
    prompts = [tiny.prompt(9), tiny.prompt(6), tiny.prompt(7)]
    expected = [hybrids.greedy("qwen3.5-moe", prompt, 8) for prompt in prompts]

    def answers() -> list[tuple[int, ...]]:
        """Each request but the last ends by its third token, which the host learns late."""
        given = {"temperature": 0, "ignore_eos": True, "max_tokens": 8}
        arrivals = [Arrival(0, p, {**given, "stop_token_ids": [e[2]]}) for p, e in zip(prompts, expected, strict=True)]
        return [tuple(result.token_ids) for result in drive(llm, arrivals)]

    stops = [list(e[: e.index(e[2]) + 1]) for e in expected]
    with late(0.01):
        assert answers() == [tuple(s) for s in stops]
    with latest():
        assert answers() == [tuple(s) for s in stops]
        runner = llm.llm_engine.worker.runner
        layers = [layer for layer in runner.cached_layers.values() if hasattr(layer, "clear_state")]
        monkeypatch.setattr(
            runner, "_clear_state", lambda slot: [layer.clear_state(slot) for layer in layers if slot >= 0]
        )
        assert answers() != [tuple(s) for s in stops]
    llm.shutdown()


def test_put_back_blocks_given_away_while_a_last_row_is_in_flight(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a stream that lets the thrown-away row of a request that ended come after the prompt of the one that got its
    blocks: its key and value lie where the prompt's are."""
    from vllm import LLM

    _, other = engines(**ROOM)
    first, second = tiny.prompt(20, seed=4), tiny.prompt(40, seed=5)
    free = {"temperature": 0, "ignore_eos": True, "max_tokens": 8}
    one, two = (drive(other, [Arrival(0, prompt, free)])[0].token_ids for prompt in (first, second))
    assert one[2] not in one[:2]
    arrivals = [Arrival(0, first, {**free, "stop_token_ids": [one[2]]}), Arrival(0, second, free)]
    limits = {**LIMITS, "max_num_seqs": 1, "num_gpu_blocks_override": 7, "enable_prefix_caching": False}
    llm = LLM(other.llm_engine.model_config.model, async_scheduling=True, **limits)
    assert [result.token_ids for result in drive(llm, arrivals)] == [one[:3], two]
    runner, held = llm.llm_engine.worker.runner, []
    stream, thrown_away = runner.stream, runner.step + 4
    launch = stream.launch

    def disordered(work: Callable[[], Any]) -> None:
        name = work.func.__name__ if isinstance(work, functools.partial) else "upload"
        if runner.step != thrown_away:
            launch(work)
        elif name != "_sample_and_score":
            held.append(work)
        if runner.step == thrown_away + 1 and name == "_sample_and_score":
            while held:
                launch(held.pop(0))
            stream.wait()

    monkeypatch.setattr(stream, "launch", disordered)
    found = [result.token_ids for result in drive(llm, arrivals)]
    llm.shutdown()
    assert found[0] == one[:3]
    assert found[1] != two


# --- long -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("nan_poison")
def test_ten_thousand_steps_ahead(engines: Any) -> None:
    steps = 0

    @given(arrivals=_arrivals(40, 25, aborts=True), tight=st.booleans(), seed=st.integers(0, 1 << 20))
    @settings(max_examples=20, **{**FUZZ, "derandomize": False})
    def run(arrivals: list[Arrival], tight: bool, seed: int) -> None:
        nonlocal steps
        ahead, one_by_one = engines(**(SHORT if tight else ROOM))
        for llm in (ahead, one_by_one):
            llm.reset_prefix_cache()
        before = ahead.llm_engine.worker.num_steps
        with late(0.003, seed):
            found = drive(ahead, arrivals)
        steps += ahead.llm_engine.worker.num_steps - before
        compare(found, drive(one_by_one, arrivals), cached=not tight)

    while steps < 10_000:
        run()
