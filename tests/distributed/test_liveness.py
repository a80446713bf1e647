# SPDX-License-Identifier: Apache-2.0
"""A rank that is slow or comes late is waited for, and named; a call that fails on one rank costs only that rank.

Death, exceptions and stalls: ``test_fault_drills.py``.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from datetime import timedelta
from typing import Any

import launcher
import pytest
import rank_checks
import tiny_models as tiny

pytestmark = pytest.mark.multiprocess

SLOW_RANK = 1


def made(folder: str, tp: int, dp: int, ep: bool = True) -> Any:
    from test_step import make_llm

    return make_llm(folder, tp, dp, ep)


# --- slow is not dead -------------------------------------------------------------------------------------------------


DOING = {"step": r"computes in step \d+, layer model.layers.[01]\S+", "late": "is between two steps"}


def told_by_rank_0(slow: str) -> str:
    return rf"rank 0 has waited for \d+ s inside .* for ranks? 1\b.*: rank 1 {DOING[slow]}"


def slow_rank(folder: str, tp: int, dp: int, ep: bool, slow: str, seconds: float) -> list[tuple[int, ...]]:
    """One rank sleeps once, in a step or before it comes to ``generate``: so many seconds, or until rank 0 has told of
    it, which then is soon."""
    from test_step import runner_of

    from vllm.distributed.parallel_state import get_store
    from vllm.v1.debug import watchdog

    if not seconds:
        watchdog._TELL_AFTER_S = watchdog._TELL_AGAIN_S = 0.5
    llm = made(folder, tp, dp, ep)
    tiny.generate(llm, [tiny.prompt(9)], 2)
    slept, store = [], get_store()

    def note(record: logging.LogRecord) -> None:
        if re.search(told_by_rank_0(slow), record.getMessage()):
            store.set("told", "")

    if rank_checks.own_rank() == 0:
        handler = logging.Handler()
        handler.emit = note  # type: ignore[method-assign]
        logging.getLogger(watchdog.__name__).addHandler(handler)

    def sleep() -> None:
        if seconds:
            time.sleep(seconds)
        else:
            store.wait(["told"], timedelta(seconds=60))

    def in_second_layer(*_: Any) -> None:
        if not slept:
            slept.append(True)
            sleep()

    if rank_checks.own_rank() == SLOW_RANK and slow == "step":
        runner_of(llm).model.model.layers[1].mlp.register_forward_pre_hook(in_second_layer)
    elif rank_checks.own_rank() == SLOW_RANK:
        sleep()
    tokens = tiny.tokens(tiny.generate(llm, [tiny.prompt(6)], 4))
    llm.shutdown()
    return tokens


def check_slow_rank(tp: int, dp: int, ep: bool, slow: str, seconds: float, **env: str) -> None:
    outcomes = launcher.rank_outcomes(
        slow_rank, tp * dp, tiny.checkpoint("mixtral"), tp, dp, ep, slow, seconds, deadline_s=150, env=env
    )
    expected = [tiny.greedy("mixtral", tiny.prompt(6), 4)]
    assert [outcome.value for outcome in outcomes] == [expected] * (tp * dp), [o.error + o.output for o in outcomes]
    assert re.search(told_by_rank_0(slow), outcomes[0].output)
    assert "[STALL]" not in "".join(outcome.output for outcome in outcomes)


@pytest.mark.parametrize("slow", ["step", "late"])
@pytest.mark.parametrize(("tp", "dp", "ep"), [(1, 2, False), (2, 1, True)])
def test_slow_rank_is_waited_for_and_named(tp: int, dp: int, ep: bool, slow: str) -> None:
    check_slow_rank(tp, dp, ep, slow, 0)


@pytest.mark.slow
@pytest.mark.parametrize("slow", ["step", "late"])
@pytest.mark.parametrize(("tp", "dp", "ep"), [(1, 2, False), (2, 2, True)])
def test_25_seconds_with_every_limit_as_shipped(tp: int, dp: int, ep: bool, slow: str) -> None:
    check_slow_rank(tp, dp, ep, slow, 25)


def dies_unwatched(folder: str) -> None:
    llm = made(folder, 2, 2)
    if rank_checks.own_rank() == SLOW_RANK:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        tiny.generate(llm, [tiny.prompt(6)], 60)
    except RuntimeError as error:
        print(error, flush=True)
        os._exit(3)


def test_death_ends_a_run_that_nothing_watches() -> None:
    """Without any diagnosis the backend tells the neighbours, and their end tells the others."""
    outcomes = launcher.rank_outcomes(
        dies_unwatched, 4, tiny.checkpoint("mixtral"), env={"VLLM_STALL_TIMEOUT_S": "0"}, deadline_s=150
    )
    assert [outcome.exitcode for outcome in outcomes] == [3, -signal.SIGKILL, 3, 3]
    assert all(outcome.seconds < 100 for outcome in outcomes)


def leaves_while_waited_for(folder: str) -> str:
    llm = made(folder, 1, 2)
    if rank_checks.own_rank() == SLOW_RANK:
        llm.shutdown()
        time.sleep(4)
        return ""
    with pytest.raises(RuntimeError) as caught:
        tiny.generate(llm, [tiny.prompt(6)], 60)
    return str(caught.value)


def test_a_rank_that_has_left_is_not_waited_for() -> None:
    message = launcher.run_ranks(leaves_while_waited_for, 2, tiny.checkpoint("mixtral"))[0]
    assert "rank 1 has left the run: it shut down its engine" in message


# --- one call that fails on one rank ----------------------------------------------------------------------------------


class Bar:
    """A progress bar that fails at the first finished request, or counts."""

    def __init__(self, fails: bool, **_: Any) -> None:
        self.fails = fails

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def set_postfix_str(self, *_: object) -> None:
        if self.fails:
            raise OSError("the bar broke")

    def update(self, _: int) -> None:
        pass


class Broken(list):
    def __iter__(self) -> Any:
        raise ZeroDivisionError


def interrupt_after_two_steps(llm: Any) -> None:
    step, steps = llm.llm_engine.step, []

    def counted() -> Any:
        steps.append(True)
        if len(steps) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    llm.llm_engine.step = counted


def bad_call(llm: Any, what: str) -> Any:
    """What a caller does wrong, or what befalls it."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    good = {"prompt_token_ids": list(tiny.prompt(5))}
    if what == "prompt too long":
        return llm.generate([good, {"prompt_token_ids": [3] * 500}], params, use_tqdm=False)
    if what == "too few sampling_params":
        return llm.generate([good, good], [params], use_tqdm=False)
    if what == "unknown argument":
        return llm.generate([good], params, use_tqdm=False, no_such_argument=1)
    if what == "conversation":
        return llm.chat([{"role": "user"}], params, use_tqdm=False)
    if what == "prompts that raise":
        return llm.generate(Broken([good]), params, use_tqdm=False)
    if what == "bar":
        short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
        return llm.generate([good], short, use_tqdm=lambda **kwargs: Bar(True, **kwargs))
    assert what == "interrupt"
    signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt_after_two_steps(llm)
    return llm.generate([good], params, use_tqdm=False)


CALLS = [
    "prompt too long", "too few sampling_params", "unknown argument", "conversation", "prompts that raise", "bar",
    "interrupt",
]  # fmt: skip


def bad_calls(folder: str, tp: int, dp: int, ep: bool, bad: list[int], steps: int) -> list[Any]:
    """On the ranks of DP group ``bad`` each call fails and is caught; the others generate. What each got."""
    llm = made(folder, tp, dp, ep)
    results: list[Any] = []
    for what in CALLS:
        if rank_checks.own_rank() // tp in bad:
            step = llm.llm_engine.step
            try:
                bad_call(llm, what)
            except (Exception, KeyboardInterrupt) as error:
                results.append(type(error).__name__)
            llm.llm_engine.step = step
            assert not llm.llm_engine.scheduler.has_unfinished_requests()
        else:
            results.append(tiny.tokens(tiny.generate(llm, [tiny.prompt(6)] if steps else [], steps or 1)))
    results.append(tiny.tokens(tiny.generate(llm, [tiny.prompt(7)], 3)))
    llm.shutdown()
    return results


@pytest.mark.parametrize(
    ("tp", "dp", "ep", "steps"), [(1, 2, True, 8), (1, 2, False, 8), (2, 2, True, 8), (1, 2, False, 0), (2, 1, True, 0)]
)
def test_a_call_that_fails_costs_only_its_own_rank(tp: int, dp: int, ep: bool, steps: int) -> None:
    """Also where the others have nothing to do, and where all ranks of the world fail alike."""
    bad = [dp - 1]
    by_rank = launcher.run_ranks(
        bad_calls, tp * dp, tiny.checkpoint("mixtral"), tp, dp, ep, bad, steps, deadline_s=240,
        env={"VLLM_STALL_TIMEOUT_S": "60"},
    )  # fmt: skip
    after = [tiny.greedy("mixtral", tiny.prompt(7), 3)]
    for rank, results in enumerate(by_rank):
        if rank // tp in bad:
            names = ["ValueError"] * 2 + [
                "TypeError",
                "ValueError",
                "ZeroDivisionError",
                "OSError",
                "KeyboardInterrupt",
            ]
            assert results == [*names, after]
        else:
            got = [tiny.greedy("mixtral", tiny.prompt(6), steps)] if steps else []
            assert results == [got] * len(CALLS) + [after]


def one_tp_rank_fails(folder: str, tp: int, dp: int) -> str:
    llm = made(folder, tp, dp)
    try:
        if rank_checks.own_rank() == SLOW_RANK:
            bad_call(llm, "prompt too long")
        else:
            tiny.generate(llm, [tiny.prompt(6)], 8)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error} / {type(error.__context__).__name__}"
    return "nothing raised"


@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (2, 2)])
def test_a_call_that_fails_on_one_tp_rank_is_an_error_on_all(tp: int, dp: int) -> None:
    told = launcher.run_ranks(one_tp_rank_fails, tp * dp, tiny.checkpoint("mixtral"), tp, dp)
    for rank, message in enumerate(told):
        assert re.match(r"LockstepError: .* DP group \[?0", message), told
        assert ("/ ValueError" in message) == (rank == SLOW_RANK), told
