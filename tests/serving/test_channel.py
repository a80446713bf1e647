# SPDX-License-Identifier: Apache-2.0
"""What carries messages: between a front end and its ranks, and from the first rank of a group to its others."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import threading
from multiprocessing import AuthenticationError
from typing import Any

import launcher
import msgspec
import pytest

from vllm import SamplingParams
from vllm.distributed import get_tp_group, init_distributed_environment, initialize_model_parallel
from vllm.v1.engine.channel import Channel, accept, connect
from vllm.v1.engine.messages import (
    Abort,
    Add,
    Alive,
    Message,
    Outputs,
    Stop,
    params_from_the_wire,
    params_on_the_wire,
)
from vllm.v1.engine.protocol import Commands
from vllm.v1.engine.rank import share
from vllm.v1.outputs import EngineCoreOutput, LogprobsLists

ADD = Add("a#1", list(range(3000)), {"temperature": 0.5, "logit_bias": {7: -1.5}}, 2, 1.5)
OUTPUT = EngineCoreOutput("a#1", [5], LogprobsLists([[5, 6]], [[-0.1, -2.0]], [1]), None, "stop", 5, 3)


def _pair() -> tuple[Channel, Channel]:
    left, right = socket.socketpair()
    return Channel(left), Channel(right)


def test_messages_come_whole_numbered_and_in_order() -> None:
    left, right = _pair()
    said: list[Message] = [ADD, Abort(["x"]), Outputs(4, [OUTPUT], {"b#2": "no"}, {"running": 1.0}), Stop()]
    for message in said:
        left.send(message)
        left.send(Alive(), counted=False)
    left.write()
    got = right.read()
    assert got[::2] == list(enumerate(said, start=1))
    assert got[1::2] == [(0, Alive())] * 4


def test_a_peer_that_does_not_read_holds_up_nobody() -> None:
    left, right = _pair()
    count = 2000
    for _ in range(count):
        left.send(ADD)
    left.write()
    assert left.has_unsent
    got: list[tuple[int, Message]] = []
    while len(got) < count:
        got += right.read()
        left.write()
    assert not left.has_unsent
    assert [number for number, _ in got] == list(range(1, count + 1))
    assert got[-1][1] == ADD


def test_the_end_and_nonsense_are_told_apart() -> None:
    left, right = _pair()
    left.socket.send(b"\x03\x00\x00\x00abc")
    with pytest.raises(msgspec.DecodeError):
        right.read()
    left, right = _pair()
    left.socket.send(b"\xff\xff\xff\xff")
    with pytest.raises(msgspec.DecodeError, match="4294967295 bytes"):
        right.read()
    left, right = _pair()
    left.close()
    with pytest.raises(EOFError):
        right.read()


def test_only_who_has_the_key_gets_in() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port, outcomes = listener.getsockname()[1], []

        def serve() -> None:
            try:
                outcomes.append(accept(listener.accept()[0], b"right"))
            except Exception as error:
                outcomes.append(error)

        for key in (b"right", b"wrong"):
            thread = threading.Thread(target=serve)
            thread.start()
            if key == b"right":
                channel = connect("127.0.0.1", port, key)
            else:
                with pytest.raises(AuthenticationError):
                    connect("127.0.0.1", port, key)
            thread.join(60)
        accepted, refused = outcomes
        assert isinstance(refused, AuthenticationError)
        channel.send(Stop())
        channel.write()
        accepted.socket.setblocking(True)
        assert accepted.read() == [(1, Stop())]
        channel.close()
        accepted.close()


def test_the_sampler_gets_what_the_client_asked_for() -> None:
    asked = SamplingParams(
        n=2, temperature=0.7, top_p=0.9, seed=11, stop=["x"], bad_words=["y"], logit_bias={3: 2.0}, max_tokens=None
    )
    asked.bad_words_token_ids, asked.max_tokens = [[4, 5]], 30
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(Add("a", [1], params_on_the_wire(asked))), type=Add).params
    got = params_from_the_wire(wire)
    assert "stop" not in wire
    expected = {**vars(asked), "n": 1, "stop": []}
    assert {name: getattr(got, name) for name in expected} == expected


def share_commands() -> list[Commands]:
    init_distributed_environment()
    initialize_model_parallel(tensor_model_parallel_size=2)
    tp = get_tp_group()
    given = [
        Commands(),
        Commands((ADD,), ("b#2",), True),
        Commands((), ("c",) * 400),
        Commands(aborts=("d" * (504 - 6),)),
    ]
    return [share(commands if tp.rank_in_group == 0 else Commands(), tp) for commands in given]


@pytest.mark.multiprocess
def test_all_ranks_of_a_group_get_the_same_commands() -> None:
    first, second = launcher.run_ranks(share_commands, 2, deadline_s=180)
    assert first == second
    assert [len(commands.aborts) for commands in second] == [0, 1, 400, 1]
    assert second[1].additions[0] == ADD


def test_parameters_of_the_front_end_stay_there() -> None:
    everything: dict[str, Any] = params_on_the_wire(SamplingParams())
    assert everything == {}


@pytest.mark.parametrize("unread", [False, True])
def test_an_agent_ends_with_its_front_end(unread: bool):
    """Also where the front end is killed with words of the agent unread, which resets the connection."""
    front, other = socket.socketpair()
    program = (
        "import socket, sys; from vllm.v1.engine.agent import _follow;"
        "_follow(socket.socket(fileno=int(sys.argv[1])), 600.0, 0, print)"
    )
    command = [sys.executable, "-c", program, str(other.fileno())]
    with other, subprocess.Popen(command, stderr=subprocess.PIPE, text=True, pass_fds=[other.fileno()]) as agent:
        try:
            assert front.recv(1)
            if unread:
                assert select.select([front], [], [], 120)[0], "the agent has not said again that it lives"
            front.close()
            _, said = agent.communicate(timeout=120)
        finally:
            agent.kill()
    assert (agent.returncode, "the front end has ended" in said) == (1, True), said
