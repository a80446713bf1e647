# SPDX-License-Identifier: Apache-2.0
"""Where the front end sends requests, under random arrivals, outputs, aborts and refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

from drawn import given, settings, st

from vllm.v1.engine.messages import Abort, Add, Outputs
from vllm.v1.engine.protocol import FrontProtocol, Place
from vllm.v1.outputs import EngineCoreOutput

TP = 2


@dataclasses.dataclass
class Running:
    dp_rank: int
    prompt: int
    wire_id: str
    has_answered: bool = False


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 6))
def test_the_least_loaded_rank_is_chosen(data: Any, dp: int) -> None:
    front = FrontProtocol({rank: Place(rank // TP, rank % TP == 0) for rank in range(dp * TP)}, silence=8.0)
    running: dict[str, Running] = {}
    said = [0] * dp * TP

    def waiting(dp_rank: int) -> int:
        return sum(r.prompt for r in running.values() if r.dp_rank == dp_rank and not r.has_answered)

    def hear(one: Running, outputs: list[EngineCoreOutput], rejected: dict[str, str]) -> Any:
        leader = front.leaders[one.dp_rank]
        said[leader] += 1
        return front.receive(leader, said[leader], Outputs(0, outputs, rejected))

    kinds = st.sampled_from(["add", "add", "add", "answer", "finish", "abort", "refuse"])
    for count, kind in enumerate(data.draw(st.lists(kinds, max_size=40))):
        if kind == "add":
            client_id = f"c{count}" if data.draw(st.booleans()) else "again"
            if client_id in running:
                continue
            pinned = data.draw(st.none() | st.integers(0, dp - 1))
            loads = [(waiting(d), sum(r.dp_rank == d for r in running.values()), d) for d in range(dp)]
            prompt = data.draw(st.integers(1, 100))
            ((to, message),) = front.add(Add(client_id, [5] * prompt, {}), pinned).sends
            expected = min(loads)[2] if pinned is None else pinned
            assert to == front.leaders[expected] == expected * TP
            assert isinstance(message, Add)
            running[client_id] = Running(expected, prompt, message.request_id)
        elif running:
            client_id = data.draw(st.sampled_from(sorted(running)))
            one = running[client_id]
            if kind == "abort":
                del running[client_id]
                assert front.abort([client_id, "nobody"]).sends == [(one.dp_rank * TP, Abort([one.wire_id]))]
                late = EngineCoreOutput(one.wire_id, [1], finish_reason="length")
                assert hear(one, [late], {}).outputs == []
            elif kind == "refuse":
                del running[client_id]
                assert hear(one, [], {one.wire_id: "too long"}).failed == {client_id: ("too long", True)}
            else:
                one.has_answered = True
                if kind == "finish":
                    del running[client_id]
                output = EngineCoreOutput(one.wire_id, [1], finish_reason="stop" if kind == "finish" else None)
                assert [o.request_id for o in hear(one, [output], {}).outputs] == [client_id]
        assert [front.waiting_tokens(d) for d in range(dp)] == [waiting(d) for d in range(dp)]
        assert set(front.requests) == set(running)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 16), st.lists(st.integers(1, 1000), min_size=1, max_size=80))
def test_no_rank_waits_for_more_than_one_request_longer_than_another(dp: int, prompts: list[int]) -> None:
    front = FrontProtocol({rank: Place(rank, True) for rank in range(dp)}, silence=8.0)
    for index, prompt in enumerate(prompts):
        front.add(Add(str(index), [5] * prompt, {}))
        waiting = [front.waiting_tokens(dp_rank) for dp_rank in range(dp)]
        assert max(waiting) - min(waiting) <= max(prompts[: index + 1])
