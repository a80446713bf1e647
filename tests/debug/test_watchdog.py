# SPDX-License-Identifier: Apache-2.0
"""The stall watchdog: it ends what does not move, says where, and leaves everything else alone."""

from __future__ import annotations

import os
import re
import threading
import time
from typing import Any

import faulty_runs
import launcher
import pytest
import tiny_models as tiny

from vllm import forward_context
from vllm.v1.debug import watchdog
from vllm.v1.debug.ledger import Ledger
from vllm.v1.transfers import ThreadStream

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_rank_prints_where_it_is_and_ends(world_size: int) -> None:
    """The collectives would wait for hours, the watchdog does not. Who waits in one gets an exception."""
    outcomes = faulty_runs.outcomes_of("sleeps for ever", world_size)
    for outcome in outcomes:
        slept = outcome.rank == faulty_runs.FAULTY_RANK
        assert (outcome.status, outcome.exitcode) == (("died", 1) if slept else ("raised", 0))
        assert outcome.seconds < 50
        assert outcome.output.count("[STALL] stacks of all threads") == 1
        assert outcome.output.count(f"[STALL] rank={outcome.rank} ") == 1
        assert "in step 3, layer layers.1.mlp" in outcome.output
        assert f"[LEDGER] rank={outcome.rank} n=" in outcome.output
        assert "faulty_runs.py" in outcome.output, "no stack of the main thread"
        assert ("NOT FINISHED" in outcome.output) == (outcome.rank != faulty_runs.FAULTY_RANK)


def test_sleeper_prints_when_the_others_give_up() -> None:
    """Its own limit is far; it hears from the ranks whose backend gave up, and is ended."""
    outcomes = faulty_runs.outcomes_of("sleeps for ever", 2, 60, VLLM_COLLECTIVE_TIMEOUT_S="6")
    assert outcomes[0].status == "raised"
    sleeper = outcomes[1].output
    assert "[STALL] rank=1 rank 0 reports: " in sleeper
    assert "failed" in sleeper
    assert "time.sleep" in sleeper or "run_step" in sleeper
    assert (outcomes[1].status, outcomes[1].exitcode) == ("died", 1)
    assert re.search(r"\[FAIL\] rank=1 ended: computes in step 3, layer layers.1.mlp 4 s after rank 0 reports", sleeper)


def engine_sleeps(folder: str) -> None:
    from test_step import make_llm, runner_of

    llm = make_llm(folder, 1, 2)
    diagnosis = watchdog._installed
    assert diagnosis is not None
    limit_s, diagnosis.stall_timeout_s = diagnosis.stall_timeout_s, 60.0  # until the test begins
    tiny.generate(llm, [tiny.prompt(6)], 2)
    diagnosis.stall_timeout_s = limit_s
    time.sleep(limit_s + 1)  # idle, longer than the limit
    diagnosis.stall_timeout_s = 60.0
    steps = runner_of(llm).step

    def in_second_layer(*_: object) -> None:
        if os.environ["RANK"] == "1" and runner_of(llm).step == steps + 3:
            diagnosis.stall_timeout_s = limit_s
            time.sleep(3600)

    runner_of(llm).model.model.layers[1].mlp.register_forward_pre_hook(in_second_layer)
    print("second run", flush=True)
    tiny.generate(llm, [tiny.prompt(6)], 60)


def test_engine_stall_and_idle_engine() -> None:
    env = {"VLLM_STALL_TIMEOUT_S": "2"}
    for outcome in launcher.rank_outcomes(engine_sleeps, 2, tiny.checkpoint("mixtral"), deadline_s=120, env=env):
        assert outcome.status == ("died" if outcome.rank == 1 else "raised"), outcome.error
        before, after = outcome.output.split("second run")
        assert "[STALL]" not in before, "an idle engine is no stall"
        assert f"[STALL] rank={outcome.rank} " in after
        assert "model.layers.1" in after


def device_stalls() -> None:
    """The thread that stands for the device, while its host is between two steps."""
    guard = watchdog.Diagnosis(Ledger(0, 1, "run"), stall_timeout_s=0.5)
    guard.start()
    stream = ThreadStream()

    def work() -> None:
        forward_context.set_current_step(7)
        forward_context.set_current_layer("layers.1")
        time.sleep(60)

    with guard.running(0, 8):
        stream.launch(work)
    time.sleep(60)


def test_a_device_that_stalls_between_two_steps_of_its_host() -> None:
    (outcome,) = launcher.rank_outcomes(device_stalls, 1, deadline_s=50)
    assert outcome.status == "died"
    assert "s in step 7, layer layers.1, outside any collective" in outcome.output


def in_a_circle() -> None:
    """Three ranks, each in a collective that the next one does not come to."""
    import torch

    from vllm.distributed import get_dp_group, get_ep_group, get_tp_group, get_world_group

    faulty_runs.start_groups()
    groups = [get_world_group(), get_tp_group(), get_ep_group(), get_dp_group()]
    with watchdog.running(0, 0):
        group = groups[int(os.environ["RANK"])]
        group.all_reduce(torch.ones(1))


def test_ranks_that_wait_for_each_other_are_told_at_once() -> None:
    """TP {0, 1} and {2, 3}, DP {0, 2} and {1, 3}: 0 waits for all, 1 for 0 in TP, 2 for all in EP, 3 for 1 in DP."""
    outcomes = launcher.rank_outcomes(in_a_circle, 4)
    for outcome in outcomes:
        assert outcome.status == "raised", outcome
        circle = r"ranks wait for each other: rank \d waits in all_reduce #\d+ of \w+:\d .* for rank \d; rank \d wa"
        assert re.search(circle, outcome.error), outcome.error


def test_progress_of_another_rank_is_progress() -> None:
    """A step of several layers takes longer than the limit, each layer less: those that wait do not stall either."""
    outcomes = launcher.rank_outcomes(slow_layers, 2, env={"VLLM_STALL_TIMEOUT_S": "5"})
    assert [outcome.status for outcome in outcomes] == ["ok", "ok"], [o.error + o.output for o in outcomes]


def slow_layers() -> None:
    import torch

    from vllm.distributed import get_world_group

    faulty_runs.start_groups()
    with watchdog.running(0, 0):
        for layer in range(10 * int(os.environ["RANK"])):
            forward_context.set_current_layer(f"layers.{layer}")
            time.sleep(0.8)
        get_world_group().all_reduce(torch.ones(1))
    watchdog.uninstall()


def slow_but_moving(num_polls: int, limit_s: float) -> bool:
    """A step of so many polls in which only the layer's name changes, at every second one; True when it came to its
    end. The watchdog counts its polls: here one follows another when the step says so."""
    polled, may_poll = threading.Semaphore(0), threading.Semaphore(0)

    def wait(*_: Any) -> bool:
        polled.release()
        may_poll.acquire()
        return False

    watchdog.TerminationNotice.wait = wait  # type: ignore[method-assign]
    guard = watchdog.Diagnosis(Ledger(0, 1, "run"), stall_timeout_s=limit_s)
    guard.start()
    with guard.running(0, 7):
        for poll in range(num_polls):
            polled.acquire()
            forward_context.set_current_layer(f"layers.{poll // 2}")
            may_poll.release()
        polled.acquire()
    guard._stop.set()
    may_poll.release()
    guard.stop()
    return True


def test_long_step_below_the_limit_and_loading() -> None:
    outcomes = [
        launcher.rank_outcomes(slow_but_moving, 1, 12, 3 * watchdog._POLL_S)[0],
        launcher.rank_outcomes(loads_slowly, 1)[0],
    ]
    assert [outcome.value for outcome in outcomes] == [True, True], outcomes


def loads_slowly() -> bool:
    guard = watchdog.Diagnosis(Ledger(0, 1, "run"), stall_timeout_s=0.5)
    guard.start()
    time.sleep(1.2)
    guard.stop()
    return True
