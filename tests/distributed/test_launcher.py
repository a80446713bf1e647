# SPDX-License-Identifier: Apache-2.0
"""The launcher itself: what comes back from ranks that return, raise, die and stall."""

from __future__ import annotations

import os
import time

import launcher
import pytest
import torch
from poison import PATTERNS

pytestmark = pytest.mark.multiprocess


def _fate(fates: list[str]) -> tuple[int, str, int]:
    rank = int(os.environ["RANK"])
    fate = fates[rank]
    print(f"rank {rank} will {fate}", flush=True)
    if fate == "raise":
        raise ValueError(f"raised by rank {rank}")
    if fate == "die":
        os._exit(7)
    if fate == "stall":
        time.sleep(1000)
    return rank, os.environ["WORLD_SIZE"], torch.get_num_threads()


def test_values_come_back_by_rank() -> None:
    assert launcher.run_ranks(_fate, 3, ["return"] * 3) == [(rank, "3", 1) for rank in range(3)]


def test_each_fate_is_told_and_nothing_is_left() -> None:
    start = time.monotonic()
    outcomes = launcher.rank_outcomes(_fate, 4, ["return", "raise", "die", "stall"], deadline_s=8)
    assert time.monotonic() - start < 60
    assert [o.status for o in outcomes] == ["ok", "raised", "died", "deadline"]
    assert isinstance(outcomes[1].exception, ValueError)
    assert "raised by rank 1" in outcomes[1].error
    assert outcomes[2].exitcode == 7
    assert "rank 3 will stall" in outcomes[3].output
    assert "in _fate" in outcomes[3].output  # its stack
    assert launcher.living_ranks() == []


def test_a_failed_rank_fails_the_run() -> None:
    with pytest.raises(AssertionError, match=r"(?s)1 of 2 ranks failed.*raised by rank 1"):
        launcher.run_ranks(_fate, 2, ["return", "raise"])


def _poisoned() -> tuple[bool, int]:
    return bool(torch.isnan(torch.empty(100)).all()), int(torch.empty(1).view(torch.int32)) & 0xFFFFFFFF


def test_poison_reaches_the_ranks() -> None:
    """Each rank in its own pattern, all five over five ranks."""
    found = launcher.run_ranks(_poisoned, len(PATTERNS), poison=True)
    assert all(nan for nan, _ in found)
    assert {word for _, word in found} == set(PATTERNS)
