# SPDX-License-Identifier: Apache-2.0
"""A rank that dies, raises, stalls or is stopped in the middle of a run: all others end, non-zero, and say who.

Each drill runs the engine on real processes under torchrun's variables. Death and exceptions end all ranks within 10 s
with every limit as shipped; a stall does after ``VLLM_STALL_TIMEOUT_S``.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import launcher
import pytest
import rank_checks
import tiny_models as tiny

from vllm.distributed import get_world_group

pytestmark = pytest.mark.multiprocess

STALL_S = 3
FAILING_RANK = 1


def run_with_fault(folder: str, tp: int, dp: int, fault: str) -> None:
    """One rank fails in its sixth step, number 5; the others' exceptions gain the seconds that they took to notice."""
    from test_step import make_llm, runner_of

    llm = make_llm(folder, tp, dp)
    processes = get_world_group().all_gather_object(os.getpid())
    happened: list[float] = []

    def in_second_layer(*_: Any) -> None:
        if runner_of(llm).step <= 5 or happened:
            return
        happened.append(time.monotonic())
        if rank_checks.own_rank() != FAILING_RANK:
            return
        if fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "raises":
            raise ValueError("injected fault")
        elif fault == "is stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)

    runner_of(llm).model.model.layers[1].mlp.register_forward_pre_hook(in_second_layer)
    try:
        tiny.generate(llm, [tiny.prompt(6)], 60)
    except RuntimeError as error:
        error.add_note(f"noticed after {time.monotonic() - happened[0]:.1f} s")
        if fault == "is stopped":
            os.kill(processes[FAILING_RANK], signal.SIGKILL)
        raise


NAMED = {
    "dies": r"rank 1 is gone: its process \d+ has ended",
    "raises": r"rank 1 reports: step [5-9] failed, layer \S+: ValueError\('injected fault'\)",
    "stalls": rf"rank 1 reports: no progress for VLLM_STALL_TIMEOUT_S={STALL_S} s in step [5-9], layer \S+, outside",
    "is stopped": r"no progress for .* inside .* for ranks? 1\b.*: rank 1 has been silent for \d s \(stopped,",
}


def left_in_shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


# In the larger layout the failing rank has one beside it in each kind of group; in the smaller, no other.
@pytest.mark.parametrize("fault", NAMED)
@pytest.mark.parametrize(("tp", "dp"), [pytest.param(1, 2, marks=pytest.mark.slow), (2, 2)])
def test_survivors_end_soon_and_name_rank_and_collective(fault: str, tp: int, dp: int) -> None:
    slow = fault in ("stalls", "is stopped")
    before = left_in_shared_memory()
    outcomes = launcher.rank_outcomes(
        run_with_fault,
        tp * dp,
        tiny.checkpoint("mixtral"),
        tp,
        dp,
        fault,
        deadline_s=120,
        env={"VLLM_STALL_TIMEOUT_S": str(STALL_S)} if slow else {},
    )
    for outcome in outcomes:
        if outcome.rank == FAILING_RANK:
            assert outcome.status == ("raised" if fault == "raises" else "died")
            continue
        assert outcome.status == "raised", f"rank {outcome.rank} {outcome.status}\n{outcome.output}"
        assert re.search(rf"rank {outcome.rank}\b", outcome.error), outcome.error
        assert re.search(r"step [5-9]", outcome.error), outcome.error
        assert re.search(r"(all_gatherv|reduce_scatterv|all_reduce|coordinate_batch_across_dp)", outcome.error)
        assert re.search(NAMED[fault], outcome.error), outcome.error
        noticed = re.search(r"noticed after ([\d.]+) s", outcome.error)
        assert noticed, outcome.error
        assert float(noticed[1]) < 10 + slow * (STALL_S + 2)
    assert launcher.living_ranks() == []
    assert left_in_shared_memory() <= before


def fails_to_load(folder: str) -> None:
    from test_step import make_llm

    from vllm.v1.worker import gpu_worker

    if rank_checks.own_rank() == FAILING_RANK:

        def broken(_: Any) -> None:
            raise FileNotFoundError("no weights here")

        gpu_worker.get_model = broken
    make_llm(folder, 2, 2)


def test_a_rank_that_cannot_load_ends_the_start_of_all() -> None:
    """Its barrier cannot be left with an exception: the first process that waits there ends and breaks it for all."""
    for outcome in launcher.rank_outcomes(fails_to_load, 4, tiny.checkpoint("mixtral")):
        assert outcome.seconds < 30
        if outcome.rank == FAILING_RANK:
            assert "FileNotFoundError: no weights here" in outcome.error
        else:
            assert outcome.status in ("died", "raised")
            told = "rank 1 reports: the engine's start failed: FileNotFoundError('no weights here')"
            assert told in outcome.output, outcome
