# SPDX-License-Identifier: Apache-2.0
"""Ranks that are started again find each other in a store that still holds what those before them said.

A thread stands for a rank, with a connection of its own to a store that, like an elastic agent's, outlives them all.
"""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.distributed import launch_round
from vllm.distributed.launch_round import enter_round

PATIENCE = timedelta(seconds=20)


def connect(server: dist.TCPStore) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=PATIENCE)


def serve() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def meet(server: dist.TCPStore, ranks: set[int], world_size: int, patience: timedelta, seed: int) -> list[str | None]:
    """What each of ``ranks`` reads of a word that one rank leaves in the round; None for those that give up."""
    delays = [random.Random(seed * 100 + rank).uniform(0, 0.05) for rank in range(world_size)]

    def run(rank: int) -> str | None:
        time.sleep(delays[rank])
        try:
            mine = enter_round(connect(server), rank, world_size, patience)
            assert mine.compare_set("word", "", f"{seed} of {rank}")
            mine.set(f"end/{rank}", "")
            mine.wait([f"end/{other}" for other in range(world_size)], patience)
        except RuntimeError:
            return None
        return mine.get("word").decode()

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, sorted(ranks)))


@settings(max_examples=12, deadline=None)
@given(
    world_size=st.integers(2, 4),
    earlier=st.lists(st.sets(st.integers(0, 3)), max_size=3),
    seed=st.integers(0, 10**6),
)
def test_only_those_who_are_here_meet(world_size: int, earlier: list[set[int]], seed: int) -> None:
    """Earlier rounds in which some ranks were lost before they met, or none was; and then one to which all come."""
    server = serve()
    for number, came in enumerate(earlier):
        ranks = {rank for rank in came if rank < world_size}
        words = meet(
            server, ranks, world_size, PATIENCE if len(ranks) == world_size else timedelta(seconds=0.2), number
        )
        assert len(set(words)) <= 1
    words = meet(server, set(range(world_size)), world_size, PATIENCE, seed)
    assert None not in words
    assert len(set(words)) == 1
    assert str(words[0]).startswith(f"{seed} of ")


def test_who_did_not_come_is_named() -> None:
    server = serve()
    with pytest.raises(RuntimeError, match=r"ranks \[1, 2\] of the 3 that were started did not come within 0.1 s"):
        enter_round(connect(server), 0, 3, timedelta(seconds=0.1))
    with pytest.raises(RuntimeError, match=r"rank 0 did not answer rank 2 within 0.1 s"):
        enter_round(connect(server), 2, 3, timedelta(seconds=0.1))


def test_whose_store_outlives_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for told, is_kept in (("True", True), ("False", False), (None, False)):
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        if told is not None:
            monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", told)
        assert launch_round.is_kept_over_rounds() is is_kept
