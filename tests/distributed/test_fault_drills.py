# SPDX-License-Identifier: Apache-2.0
"""A rank that dies, raises or stalls in the middle of a run: all others end within 30 s, non-zero, and say where.

Each drill runs the engine on real processes under torchrun's variables, with the collective timeout as shipped or
shorter, and looks for the rank, the step and the collective in what the survivors print.
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

pytestmark = pytest.mark.multiprocess

TIMEOUT_S = 6
FAILING_RANK = 1


def run_with_fault(folder: str, tp: int, dp: int, fault: str) -> None:
    """One rank fails in its sixth step, number 5; the others' exceptions gain the seconds that they took to notice."""
    from test_step import make_llm, runner_of

    llm = make_llm(folder, tp, dp)
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
        time.sleep(3 * TIMEOUT_S)

    runner_of(llm).model.model.layers[1].mlp.register_forward_pre_hook(in_second_layer)
    try:
        tiny.generate(llm, [tiny.prompt(6)], 60)
    except RuntimeError as error:
        error.add_note(f"noticed after {time.monotonic() - happened[0]:.1f} s")
        raise


@pytest.mark.parametrize("fault", ["dies", "raises", "stalls"])
@pytest.mark.parametrize(("tp", "dp"), [(1, 2), (2, 2)])
def test_survivors_end_soon_and_name_the_collective(fault: str, tp: int, dp: int) -> None:
    outcomes = launcher.rank_outcomes(
        run_with_fault,
        tp * dp,
        tiny.checkpoint("mixtral"),
        tp,
        dp,
        fault,
        deadline_s=120,
        env={"VLLM_COLLECTIVE_TIMEOUT_S": str(TIMEOUT_S)},
    )
    for outcome in outcomes:
        if outcome.rank == FAILING_RANK:
            assert outcome.status == ("died" if fault == "dies" else "raised")
            continue
        assert outcome.status == "raised", f"rank {outcome.rank} {outcome.status}\n{outcome.output}"
        assert re.search(rf"rank {outcome.rank}\b", outcome.error), outcome.error
        assert re.search(r"step [5-9]", outcome.error), outcome.error
        assert re.search(r"(all_gatherv|reduce_scatterv|all_reduce|coordinate_batch_across_dp)", outcome.error)
        noticed = re.search(r"noticed after ([\d.]+) s", outcome.error)
        assert noticed, outcome.error
        assert float(noticed[1]) < 30
    assert launcher.living_ranks() == []


def left_in_shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def test_nothing_is_left_in_shared_memory() -> None:
    before = left_in_shared_memory()
    launcher.rank_outcomes(
        run_with_fault, 2, tiny.checkpoint("mixtral"), 1, 2, "dies", env={"VLLM_COLLECTIVE_TIMEOUT_S": str(TIMEOUT_S)}
    )
    assert left_in_shared_memory() <= before
