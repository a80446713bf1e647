# SPDX-License-Identifier: Apache-2.0
"""What a front end and the ranks of its engine tell each other. On the wire: msgpack, of these types and no others."""

from __future__ import annotations

from typing import Any

import msgspec

from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import EngineCoreOutput


class Message(msgspec.Struct, tag=True, frozen=True):
    """Each channel carries these with a number that counts from 1 without gaps: one that comes twice is known."""


class Hello(Message, frozen=True):
    """The first word of a rank, outside the count. ``round``: the name of those who were started together;
    ``attempt``: how often its launcher had started ranks before; ``pid``: 0 on a machine without the front end;
    ``node``: its machine, where its launcher told it."""

    rank: int
    round: str
    attempt: int = 0
    pid: int = 0
    node: str = ""


class Ready(Message, frozen=True):
    """Outside the count: a rank can begin. ``max_model_len``: as its cache allows."""

    max_model_len: int
    num_gpu_blocks: int


class Alive(Message, frozen=True):
    """Once a second: who is silent for long is taken for dead. ``waits_for``: ranks that hold this one up."""

    waits_for: list[int] = []


class Add(Message, frozen=True):
    """Run a request. ``params``: the fields of a ``SamplingParams`` that are not at their defaults."""

    request_id: str
    prompt_token_ids: list[int]
    params: dict[str, Any]
    eos_token_id: int | None = None
    arrival_time: float = 0.0


class Prepare(Message, frozen=True):
    """Outside the count: make what the grammar of a later request needs, off the thread that steps."""

    number: int
    structured_outputs: dict[str, Any]


class Prepared(Message, frozen=True):
    """Outside the count: the answer, also where it cannot be made, of which the request will say why."""

    number: int


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


# What becomes of the tokens is the front end's business.
_OF_THE_FRONT = frozenset(
    """n stop detokenize skip_special_tokens spaces_between_special_tokens include_stop_str_in_output output_kind
    truncate_prompt_tokens""".split()  # noqa: SIM905
)


def params_on_the_wire(params: SamplingParams) -> dict[str, Any]:
    """Of checked parameters, what the sampler and the scheduler read and is not at its default."""
    return {
        name: value
        for name, value in vars(params).items()
        if name not in _OF_THE_FRONT and value != getattr(_DEFAULTS, name)
    }


def params_from_the_wire(given: dict[str, Any]) -> SamplingParams:
    fields = dict(given)
    token_ids = fields.pop("bad_words_token_ids", [])
    params = SamplingParams(**fields)
    params.bad_words_token_ids = token_ids
    return params


_DEFAULTS = SamplingParams()
