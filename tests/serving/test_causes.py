# SPDX-License-Identifier: Apache-2.0
"""What a front end names as lost where it finds its agent and its ranks gone at once."""

from __future__ import annotations

import selectors
import socket
import subprocess
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from vllm.v1.engine.channel import Channel
from vllm.v1.engine.core_client import RankClient
from vllm.v1.engine.launch import LOST, Launch, RankFailed
from vllm.v1.engine.messages import Alive

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
        if code is not None:  # its end resets the channel, since it leaves words unread
            here.sendall(b"a sign of life")
            there.close()
        client._agent = SimpleNamespace(socket=here, process=SimpleNamespace(wait=wait))  # type: ignore[assignment]
        client._closed(rank, how)
    assert client.dead == f"the engine was lost: {named}"


@pytest.mark.parametrize("unsent", [[], [0], [0, 1]])
def test_all_ranks_found_lost_in_one_look(unsent: list[int]) -> None:
    """The first that is read, or written to, closes the channels of all; the others must not be touched any more, or
    the thread that would start the ranks again ends."""

    def lost(*_: object) -> None:
        client.is_restarting = False  # so that the loop ends, once it has seen what it had found

    client = RankClient(Launch({}, 2, max_restarts=1), 1, lost)
    client._ready = set(client.places)

    def runs(*_: object) -> int:
        raise subprocess.TimeoutExpired("agent", 0)

    process = SimpleNamespace(wait=runs, poll=lambda: None)
    client._agent = SimpleNamespace(process=process, tell=lambda *_: None)  # type: ignore[assignment]
    client._agent_silence = None
    with ExitStack() as stack:
        client._selector = stack.enter_context(selectors.DefaultSelector())
        for rank in client.places:
            here, there = socket.socketpair()
            stack.enter_context(here)
            client._channels[rank] = channel = Channel(here)
            client._selector.register(channel, selectors.EVENT_READ, lambda c=channel, r=rank: client._hear(c, r))
            there.close()
        client._tick = lambda now: [client._channels[rank].send(Alive()) for rank in unsent]  # type: ignore
        client._loop()
    assert client.dead is not None
    assert client.dead.startswith("the engine was lost: rank 0 ended without a word; its ranks are being started again")
