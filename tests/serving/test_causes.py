# SPDX-License-Identifier: Apache-2.0
"""What a front end names as lost where it finds its agent and its ranks gone at once."""

from __future__ import annotations

import socket
import subprocess
from types import SimpleNamespace

import pytest

from vllm.v1.engine.core_client import RankClient
from vllm.v1.engine.launch import LOST, Launch, RankFailed

KILLED, FAILED = RankFailed(0, -9), RankFailed(0, 1)
IN_WORDS = "was killed by SIGKILL (memory ran out, where nobody sent it)"


@pytest.mark.parametrize(
    ("said", "code", "rank", "how", "named"),
    [
        (None, None, 1, None, "rank 1 ended without a word"),
        (KILLED, 2, 0, None, f"rank 0 {IN_WORDS}"),
        (KILLED, 2, 1, None, f"rank 0 {IN_WORDS}"),
        (KILLED, 2, 1, "failed: its peer has gone", f"rank 0 {IN_WORDS}"),
        (FAILED, 2, 0, None, "rank 0 ended with code 1"),
        (FAILED, 2, 0, "failed: no memory", "rank 0 failed: no memory"),
        (FAILED, 2, 1, "failed: no memory", "rank 1 failed: no memory"),
        (FAILED, 2, 1, None, "rank 1 ended without a word"),
        (RankFailed(10, -9), 2, 1, None, f"rank 10 {IN_WORDS}"),
        (None, -9, 1, None, "the agent that started the ranks was killed by SIGKILL"),
        (None, 143, 1, None, "the agent that started the ranks ended with code 143"),
    ],
)
def test_the_cause(said: RankFailed | None, code: int | None, rank: int, how: str | None, named: str) -> None:
    """A rank that was killed makes its peers fail and its agent end; one that fails says why itself, and its exit code
    says nothing more; an agent that is killed takes its ranks with it."""
    client = RankClient(Launch({}, 11), 1, lambda effects, dp_rank: None)
    here, there = socket.socketpair()
    here.setblocking(False)

    def wait(seconds: float) -> int:
        if code is None:
            raise subprocess.TimeoutExpired("agent", seconds)
        return code

    with here, there, client.lock:
        if said is not None:
            there.sendall(LOST + str(said).encode())
        client._agent = SimpleNamespace(socket=here, process=SimpleNamespace(wait=wait))  # type: ignore[assignment]
        client._lose_rank(rank, how)
    assert client.dead == f"the engine was lost: {named}"
