# SPDX-License-Identifier: Apache-2.0
"""A rank that dies, raises, stalls or is stopped in the middle of a run: all others end, non-zero, and say who.

Each drill runs the engine on real processes under torchrun's variables. Death and exceptions end all ranks within 10 s
with every limit as shipped; a stall does after ``VLLM_STALL_TIMEOUT_S``.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import launcher
import pytest
import rank_checks
import tiny_models as tiny

from vllm.distributed import get_world_group
from vllm.distributed.parallel_state import get_store
from vllm.forward_context import get_place
from vllm.v1.debug import watchdog

pytestmark = pytest.mark.multiprocess

STALL_S = 3
FAILING_RANK = 1


def run_with_fault(folder: str, tp: int, dp: int, fault: str, ahead: bool) -> None:
    """One rank fails in its sixth step, number 5, when the others have come as far; their exceptions gain the seconds
    that they took to notice. The limit on standing still counts from the fault on."""
    from test_step import make_llm, runner_of

    llm = make_llm(folder, tp, dp, async_scheduling=ahead)
    processes = get_world_group().all_gather_object(os.getpid())
    rank, store, here = rank_checks.own_rank(), get_store(), []
    others = [f"drill/{other}" for other in range(tp * dp) if other != FAILING_RANK]
    diagnosis = watchdog._installed
    assert diagnosis is not None
    limit_s, diagnosis.stall_timeout_s = diagnosis.stall_timeout_s, 100.0
    if rank != FAILING_RANK:
        watchdog._LET_GO_S = 30.0  # a survivor leaves with its exception, however late it runs
    host_is_there = threading.Event()  # where the drill wants the host of the failing rank, which is in no hurry
    if fault not in ("raises unasked", "raises alone"):
        host_is_there.set()

    def in_second_layer(*_: Any) -> None:
        if get_place().step < 5 or here:
            return
        here.append(True)
        if rank != FAILING_RANK:
            store.set(f"drill/{rank}", "")
            return
        store.wait(others, timedelta(seconds=60))
        assert host_is_there.wait(60), "the host is elsewhere"
        diagnosis.stall_timeout_s = limit_s
        store.set("drill/fault", str(time.monotonic()))
        if fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.startswith("raises"):
            raise ValueError("injected fault")
        elif fault == "is stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)

    def limit_from_fault_on(store: Any) -> None:
        store.wait(["drill/fault"], timedelta(seconds=100))
        diagnosis.stall_timeout_s = limit_s

    if fault == "is stopped" and rank != FAILING_RANK:
        threading.Thread(target=limit_from_fault_on, args=(get_store(),), daemon=True).start()

    runner = runner_of(llm)
    finish, agree = runner.finish, runner._agree

    def finish_late(step: Any) -> Any:
        if step.plan.step == 5:
            host_is_there.set()
            time.sleep(60)
        return finish(step)

    def agree_alone(*args: Any) -> Any:
        if runner.step == 6:
            host_is_there.set()
        return agree(*args)

    if rank == FAILING_RANK:
        if fault == "raises unasked":
            runner.finish = finish_late
        elif fault == "raises alone":
            runner._agree = agree_alone
    elif fault == "raises alone":
        type(llm.llm_engine.scheduler).must_wait = property(lambda _: True)
    runner.model.model.layers[1].mlp.register_forward_pre_hook(in_second_layer)
    try:
        tiny.generate(llm, [tiny.prompt(6)], 60)
    except RuntimeError as error:
        error.add_note(f"noticed after {time.monotonic() - float(store.get('drill/fault')):.1f} s")
        if fault == "is stopped":
            os.kill(processes[FAILING_RANK], signal.SIGKILL)
        raise


NAMED = {
    "dies": r"rank 1 is gone: its process \d+ has ended",
    "raises": r"rank 1 reports: step 5 failed, layer model\.layers\.1\.\S+: ValueError\('injected fault'\)",
    "stalls": rf"rank 1 reports: no progress for VLLM_STALL_TIMEOUT_S={STALL_S} s in step 5, layer model.layers.1\S+,",
    "is stopped": r"no progress for .* inside .* for ranks? 1\b.*: rank 1 has been silent for \d+ s \(stopped,",
}


def left_in_shared_memory(before: set[str], patience_s: float = 20) -> set[str]:
    """What has come since ``before`` and stays without a process that has it: others run beside these ranks."""
    until = time.monotonic() + patience_s
    while left := shared_memory() - before:
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                held = {os.readlink(file) for file in (process / "fd").iterdir()}
                held.update((process / "maps").read_text().split())
                left = {path for path in left if path not in held}
        if not left or time.monotonic() > until:
            break
        time.sleep(0.2)
    return left


def shared_memory() -> set[str]:
    return {str(path) for path in Path("/dev/shm").iterdir()}


# In the larger layout the failing rank has one beside it in each kind of group; in the smaller, no other.
@pytest.mark.parametrize(("tp", "dp"), [pytest.param(1, 2, marks=pytest.mark.slow), (2, 2)])
@pytest.mark.parametrize(
    ("fault", "ahead"),
    [
        *[pytest.param(fault, False, id=fault) for fault in NAMED],
        *[pytest.param(fault, True, id=f"{fault}-ahead") for fault in ("dies", "raises", "stalls")],
        pytest.param("is stopped", True, id="is stopped-ahead", marks=pytest.mark.slow),
    ],
)
def test_survivors_end_soon_and_name_rank_and_collective(fault: str, tp: int, dp: int, ahead: bool) -> None:
    slow = fault in ("stalls", "is stopped")
    before = shared_memory()
    outcomes = launcher.rank_outcomes(
        run_with_fault,
        tp * dp,
        tiny.checkpoint("mixtral"),
        tp,
        dp,
        fault,
        ahead,
        deadline_s=120,
        env={"VLLM_STALL_TIMEOUT_S": str(STALL_S)} if slow else {},
    )
    for outcome in outcomes:
        if outcome.rank == FAILING_RANK:
            assert outcome.status == ("raised" if fault == "raises" else "died")
            continue
        check_survivor(outcome, fault, 10 + slow * (STALL_S + 2))
    assert launcher.living_ranks() == []
    assert not left_in_shared_memory(before)


def check_survivor(outcome: launcher.RankOutcome, fault: str, seconds: float) -> None:
    assert outcome.status == "raised", f"rank {outcome.rank} {outcome.status}\n{outcome.output}"
    assert re.search(rf"rank {outcome.rank}\b", outcome.error), outcome.error
    assert re.search(r"step [5-9]", outcome.error), outcome.error
    assert re.search(r"(all_gatherv|reduce_scatterv|all_reduce|coordinate_batch_across_dp)", outcome.error)
    assert re.search(NAMED[fault], outcome.error), outcome.error
    noticed = re.search(r"noticed after ([\d.]+) s", outcome.error)
    assert noticed, outcome.error
    assert float(noticed[1]) < seconds


@pytest.mark.parametrize("fault", ["raises unasked", "raises alone"])
def test_a_step_ahead_that_fails_is_told_before_its_host_asks(fault: str) -> None:
    """The host of the rank that fails waits for nothing from its device, for a minute; or it waits for the other's,
    which waits for its device and so for this one."""
    args = tiny.checkpoint("mixtral"), 1, 2, fault, True
    survivor, failing = launcher.rank_outcomes(run_with_fault, 2, *args, deadline_s=50)
    check_survivor(survivor, "raises", 10)
    assert "[FAIL] rank=1 failed: step 5 failed, layer model.layers.1." in failing.output
    assert failing.status == ("died" if fault == "raises unasked" else "raised"), failing
    if fault == "raises alone":
        assert "CollectiveError" in failing.error
        assert failing.error.endswith("\nValueError: injected fault\n"), failing.error


def fails_to_load(folder: str) -> None:
    from test_step import make_llm

    from vllm.v1.worker import gpu_worker

    if rank_checks.own_rank() == 0:
        watchdog._LET_GO_S = 30.0  # it serves the board, where one that runs late must still read the reason

    if rank_checks.own_rank() == FAILING_RANK:

        def broken(_: Any) -> None:
            raise FileNotFoundError("no weights here")

        gpu_worker.get_model = broken
    make_llm(folder, 2, 2)


def test_a_rank_that_cannot_load_ends_the_start_of_all() -> None:
    """Its barrier cannot be left with an exception: the first process that waits there ends and breaks it for all."""
    for outcome in launcher.rank_outcomes(fails_to_load, 4, tiny.checkpoint("mixtral"), deadline_s=150):
        assert outcome.seconds < 100
        if outcome.rank == FAILING_RANK:
            assert "FileNotFoundError: no weights here" in outcome.error
        else:
            assert outcome.status in ("died", "raised")
            told = "rank 1 reports: the engine's start failed: FileNotFoundError('no weights here')"
            assert told in outcome.output, outcome
