# SPDX-License-Identifier: Apache-2.0
"""The consensus check: every way to leave the lockstep is named before a collective runs, and nothing else is."""

from __future__ import annotations

import re

import faulty_runs
import launcher
import pytest
import rank_checks
import torch
import torch.distributed as dist

from vllm.distributed import get_ep_group, observer
from vllm.forward_context import set_current_layer
from vllm.v1.debug import watchdog
from vllm.v1.debug.ledger import agreed_fields, disagreements

pytestmark = pytest.mark.multiprocess

WAITS = r"rank \d waits in all_reduce #\d+ of [et]p:0 \(step 3, layer layers.1.mlp\) "
WAITS += r"for ranks? ([023], )*1(, [23])*, but rank 1 "
NAMED = {
    "skips a step": r"the ranks of dp:\d disagree on collective #3: step: (3 on rank 0, 4|4 on rank 1, 3) on rank",
    "swaps two collectives": r"the ranks of [et]p:0 disagree on collective #\d+: "
    r'layer: "layers.0.mlp" on ranks? (0|0, 2, 3), "layers.1.mlp" on rank 1\b',
    "gathers another size": r"the ranks of ep:0 disagree on collective #\d+: "
    r"sizes: \[3, 4.* on ranks? (0|0, 2, 3), \[3, 5.* on rank 1\b",
    "sleeps for ever": WAITS
    + "reports: no progress for VLLM_STALL_TIMEOUT_S=2 s in step 3, layer layers.1.mlp, outside",
    "dies": WAITS + r"is gone: its process \d+ has ended",
}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("fault", faulty_runs.FAULTS)
def test_fault_is_named_and_all_ranks_stop(fault: str, world_size: int) -> None:
    outcomes = faulty_runs.outcomes_of(fault, world_size, VLLM_CHECK_COLLECTIVES="1")
    told = faulty_runs.told_by(outcomes)
    assert any(re.search(NAMED[fault], text) for text in told.values()), told
    for outcome in outcomes:
        assert outcome.status in ("raised", "died"), outcome
        assert outcome.seconds < 50
        if outcome.rank != faulty_runs.FAULTY_RANK:
            assert outcome.status == "raised"
            assert "ConsensusError" in outcome.error


def test_a_rank_that_does_not_come_is_placed() -> None:
    env = {"VLLM_CHECK_COLLECTIVES": "1", "VLLM_COLLECTIVE_TIMEOUT_S": "6"}
    told = faulty_runs.told_by(faulty_runs.outcomes_of("sleeps for ever", 2, 60, **env))[0]
    left = r"1, not there after 6 s\..*Rank 1 left reduce_scatterv #\d+ of ep:0 \(step 3, layer layers.0.mlp\) at "
    assert re.search(left + r"[\d:.]+; it is alive", told), told


def swap_under_torch_detail() -> float:
    """Torch's own check of collectives passes the swap, and each rank adds apples to pears."""
    faulty_runs.start_groups()
    values = {"layers.0.mlp": 1.0, "layers.1.mlp": 10.0}
    order = list(values) if rank_checks.own_rank() == 0 else list(reversed(values))
    sums = []
    for layer in order:
        set_current_layer(layer)
        sums.append(float(get_ep_group().all_reduce(torch.tensor([values[layer]]))))
    return sums[0]


def test_torch_detail_mode_passes_the_swap() -> None:
    env = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    assert launcher.run_ranks(swap_under_torch_detail, 2, env=env) == [11.0, 11.0]
    outcomes = launcher.rank_outcomes(swap_under_torch_detail, 2, env={**env, "VLLM_CHECK_COLLECTIVES": "1"})
    assert all("ConsensusError" in outcome.error for outcome in outcomes)


def healthy(num_steps: int) -> tuple[int, int]:
    """Collectives that ran under the check, and messages left on the board."""
    faulty_runs.start_groups()
    installed = watchdog._installed
    for step in range(num_steps):
        faulty_runs.run_step(step, layers=faulty_runs.LAYERS[:1], max_delay_s=0.001)
    events, store = installed.ledger.events, installed.guard.board.store
    dist.barrier()
    left = store.num_keys()
    watchdog.uninstall()
    assert observer.get_collective_observer() is None
    return events, left


def test_no_false_alarm_in_2000_healthy_steps_with_delays() -> None:
    env = {"VLLM_CHECK_COLLECTIVES": "1", "VLLM_STALL_TIMEOUT_S": "20", "VLLM_COLLECTIVE_TIMEOUT_S": "30"}
    outcomes = launcher.rank_outcomes(healthy, 2, 2000, deadline_s=300, env=env)
    for outcome in outcomes:
        assert outcome.status == "ok", outcome.error
        events, left = outcome.value
        assert events == 2 * 2000 * 4
        assert left < 50, "messages pile up on the board"
        assert "[STALL]" not in outcome.output


def test_uneven_settings_are_refused() -> None:
    outcomes = launcher.rank_outcomes(uneven_settings, 2)
    assert all("VLLM_CHECK_COLLECTIVES differs between the ranks" in o.error for o in outcomes)


def uneven_settings() -> None:
    import os

    os.environ["VLLM_CHECK_COLLECTIVES"] = str(rank_checks.own_rank())
    faulty_runs.start_groups()


def fields(**changes: object) -> dict[str, object]:
    base = {"op": "all_gatherv", "path": "variable-size", "ranks": [4, 6], "rank": 4, "sizes": [26, 30]}
    return {**base, "shapes": [[26, 8], [26, 2]], "dtypes": ["float32", "int64"], "step": 1, "layer": "a", **changes}


def test_ragged_gathers_agree_and_others_do_not() -> None:
    own = agreed_fields(fields())
    assert disagreements({4: own, 6: agreed_fields(fields(rank=6, shapes=[[30, 8], [30, 2]]))}) == ""
    wide = agreed_fields(fields(rank=6, shapes=[[30, 9], [30, 2]]))
    assert disagreements({4: own, 6: wide}) == "shapes: [[8], [2]] on rank 4, [[9], [2]] on rank 6"
    # A gather along dim 1 whose rows happen to be as many as another extent.
    sideways = [agreed_fields(fields(rank=r, shapes=[[30, n, 26]], sizes=[26, 30])) for r, n in ((4, 26), (6, 30))]
    assert disagreements({4: sideways[0], 6: sideways[1]}) == ""
    odd = agreed_fields(fields(op="all_reduce", path="uniform", sizes=None))
    assert disagreements({0: own, 1: own, 2: odd}).endswith("(rank 2 against the majority)")
