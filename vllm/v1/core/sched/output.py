# SPDX-License-Identifier: Apache-2.0
"""What the scheduler decided for one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.v1.request import Request


@dataclass(frozen=True)
class SchedulerOutput:
    """The requests of a step and what each runs, in numbers of the moment when it was scheduled: later steps may be
    scheduled before this one has ended, so what a request says of itself belongs to one of them.

    ``num_scheduled_tokens[i]`` tokens of ``requests[i]`` run, starting at position ``num_computed_tokens[i]``;
    ``samples[i]``: they are the last that it has by then, and another is sampled. ``new_block_ids[i]`` are the cache
    blocks that request got in this step; for a request in ``started`` (first step, or first after a preemption) they
    are all its blocks, and the host knows all its tokens; later ones are on the device as they were sampled.
    ``finished_req_ids`` and ``preempted_req_ids`` ended since the step before: the runner frees their rows, before it
    looks at ``started`` (an id may come again), and ignores ids that it has no row for.
    """

    requests: list[Request]
    num_scheduled_tokens: list[int]
    new_block_ids: list[list[int]]
    num_computed_tokens: list[int]
    samples: list[bool]
    started: frozenset[str] = frozenset()
    finished_req_ids: frozenset[str] = frozenset()
    preempted_req_ids: frozenset[str] = frozenset()
    total_num_scheduled_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total_num_scheduled_tokens", sum(self.num_scheduled_tokens))
