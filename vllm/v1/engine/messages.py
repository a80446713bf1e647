# SPDX-License-Identifier: Apache-2.0
"""What a front end and the ranks of its engine tell each other. On the wire: msgpack, of these types and no others."""

from __future__ import annotations

from typing import Any

import msgspec

from vllm.v1.outputs import EngineCoreOutput


class Message(msgspec.Struct, tag=True, frozen=True):
    """Each channel carries these with a number that counts from 1 without gaps: one that comes twice is known."""


class Alive(Message, frozen=True):
    """Nothing to say, once a second: who is silent for long is taken for dead."""


class Add(Message, frozen=True):
    """Run a request. ``params``: the fields of a ``SamplingParams`` that are not at their defaults."""

    request_id: str
    prompt_token_ids: list[int]
    params: dict[str, Any]
    eos_token_id: int | None = None
    arrival_time: float = 0.0


class Abort(Message, frozen=True):
    """Drop requests before the next step; ids that have ended are ignored."""

    request_ids: list[str]


class Stop(Message, frozen=True):
    """Nothing comes after this: leave with the other ranks once no rank has requests."""


class Wake(Message, frozen=True):
    """A rank has begun step ``step``, and waits in it for the others."""

    step: int


class Woke(Message, frozen=True):
    """This rank, which had stopped before step ``step``, begins it."""

    step: int


class Outputs(Message, frozen=True):
    """What step ``step`` brought on a DP rank. ``rejected``: request id → why the scheduler can never run it."""

    step: int
    outputs: list[EngineCoreOutput]
    rejected: dict[str, str] = {}
    stats: dict[str, float] | None = None


class Left(Message, frozen=True):
    """The last words of a rank that leaves with all others, after step ``step``."""

    step: int


class Failed(Message, frozen=True):
    """The last words of a rank: why it ends."""

    reason: str
