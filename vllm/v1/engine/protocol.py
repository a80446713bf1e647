# SPDX-License-Identifier: Apache-2.0
"""The two sides of a served engine, a front end and its ranks, as pure state machines: no clock, socket or thread.

Why it cannot hang. Ranks stop only by a decision that all took in one step's agreement (``RankProtocol.agreed``), so
those that stand still all stand before the same step, and that step's number is all that a wake has to say. A rank that
begins it on its own account tells the front end, which tells all others. A wake for a step that a rank has taken says
nothing new; none can be for a step beyond the next one, since that one needs every rank. The end is such a step too:
a rank votes to leave, and all leave by the agreement in which all did.

Requests go to the first TP rank of a DP group (its leader), which hands what it begins a step with to the others of its
group; so they add and drop the same requests before the same step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.engine.messages import Abort, Add, Alive, Failed, Message, Outputs, Stop, Wake, Woke
from vllm.v1.outputs import EngineCoreOutput


class ProtocolError(RuntimeError):
    """A peer said what it cannot say where it stands: the engine is lost."""


class Commands(NamedTuple):
    """What the ranks of a DP group do before a step: add, then drop; ``stopping``: vote to leave."""

    additions: tuple[Add, ...] = ()
    aborts: tuple[str, ...] = ()
    stopping: bool = False


class RankProtocol:
    """One rank. ``num_ranks``: of the engine; ``is_leader``: the first TP rank of its DP group.

    ``step``: the number of the step that it is in or before; ``left``: all agreed to leave.
    """

    def __init__(self, num_ranks: int, is_leader: bool = True, step: int = 0) -> None:
        self.num_ranks, self.is_leader, self.step = num_ranks, is_leader, step
        self.running = self.left = False
        self._woken_for, self._heard = -1, 0
        self._additions: list[Add] = []
        self._aborts: list[str] = []
        self._stop = False

    def receive(self, number: int, message: Message) -> None:
        """Take in what the front end says, at any moment."""
        if number <= self._heard:
            return
        self._heard = number
        if isinstance(message, Wake):
            if message.step > self.step + self.running:
                raise ProtocolError(f"woken for step {message.step} before step {self.step} was agreed on")
            self._woken_for = max(self._woken_for, message.step)
        elif isinstance(message, Add):
            assert self.is_leader, f"request {message.request_id} came to a rank that is not its DP group's first"
            self._additions.append(message)
        elif isinstance(message, Abort):
            self._aborts += message.request_ids
        elif isinstance(message, Stop):
            self._stop = self.is_leader

    @property
    def is_due(self) -> bool:
        """Whether the next step begins now; else nothing is to be done until a message comes."""
        return not self.left and (self.running or self._woken_for >= self.step or self._has_cause)

    @property
    def _has_cause(self) -> bool:
        return bool(self._additions) or self._stop

    def begin(self) -> tuple[Commands, list[Message]]:
        """Begin step ``step``: what it starts with, and what to tell the front end.

        Of a rank that is no leader the commands are empty: its group's leader hands it those that count.
        """
        assert self.is_due, f"step {self.step} begins without a cause"
        tell: list[Message] = []
        if not self.running and self._woken_for < self.step and self.num_ranks > 1:
            tell.append(Woke(self.step))
        self.running = True
        commands = Commands(tuple(self._additions), tuple(self._aborts), self._stop)
        self._additions, self._aborts = [], []
        return commands, tell

    def agreed(self, any_unfinished: bool, any_stopping: bool, all_stopping: bool) -> None:
        """Step ``step`` was agreed on by all ranks: whether any has requests left, whether any or all vote to leave."""
        assert self.running, f"step {self.step} was agreed on and never begun"
        self.step += 1
        self.left = all_stopping and not any_unfinished
        # Where one votes to leave, all go on until all do, some milliseconds later.
        self.running = not self.left and (any_unfinished or any_stopping)
        if not self.running:
            self._aborts.clear()  # without requests on any rank they can only name those that have ended


class Place(NamedTuple):
    dp_rank: int
    is_leader: bool


@dataclass
class Effects:
    """What an event makes the front end do: messages to ranks in order, outputs and ends to hand to clients.

    ``failed``: request id → (why, whether the request itself is at fault). ``lost``: why the engine is gone.
    """

    sends: list[tuple[int, Message]] = field(default_factory=list)
    outputs: list[EngineCoreOutput] = field(default_factory=list)
    failed: dict[str, tuple[str, bool]] = field(default_factory=dict)
    lost: str | None = None


@dataclass
class _InFlight:
    dp_rank: int
    waiting_tokens: int


class FrontProtocol:
    """The front end of the ranks at ``places``; once ``lost`` is set it hands out nothing more.

    ``silence``: in the caller's units of time, how long a rank may be silent. Time is what the caller says it is.
    """

    def __init__(self, places: Mapping[int, Place], silence: float, now: float = 0.0) -> None:
        self.places, self.silence = dict(places), silence
        leaders = {place.dp_rank: rank for rank, place in self.places.items() if place.is_leader}
        assert sorted(leaders) == list(range(len(leaders))), f"leaders of DP ranks {sorted(leaders)}"
        self.leaders = [leaders[dp_rank] for dp_rank in range(len(leaders))]
        self.requests: dict[str, _InFlight] = {}
        self.lost: str | None = None
        self.stopping = False
        self._last_wake = -1
        self._heard = dict.fromkeys(self.places, 0)
        self._heard_at = dict.fromkeys(self.places, now)

    def waiting_tokens(self, dp_rank: int) -> int:
        """Prompt tokens of the requests of ``dp_rank`` that have given nothing yet."""
        return sum(r.waiting_tokens for r in self.requests.values() if r.dp_rank == dp_rank)

    def choose_rank(self) -> int:
        """The DP rank with the fewest tokens waiting, of those the one with the fewest requests."""
        load = [[0, 0, dp_rank] for dp_rank in range(len(self.leaders))]
        for request in self.requests.values():
            load[request.dp_rank][0] += request.waiting_tokens
            load[request.dp_rank][1] += 1
        return min(load)[2]

    def add(self, request: Add, dp_rank: int | None = None) -> Effects:
        """Give ``request`` to ``dp_rank``, by default the least loaded. Raises ``ValueError`` where it cannot."""
        if self.lost or self.stopping:
            raise ValueError(self.lost or "the engine is shutting down: it takes no more requests")
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use by an unfinished request; give another")
        if dp_rank is None:
            dp_rank = self.choose_rank()
        if not 0 <= dp_rank < len(self.leaders):
            raise ValueError(f"data_parallel_rank={dp_rank}: there are ranks 0 to {len(self.leaders) - 1}")
        self.requests[request.request_id] = _InFlight(dp_rank, len(request.prompt_token_ids))
        return Effects([(self.leaders[dp_rank], request)])

    def abort(self, request_ids: list[str]) -> Effects:
        """Drop requests: nothing more comes of them. Ids that have ended are ignored."""
        by_rank: dict[int, list[str]] = {}
        for request_id in request_ids:
            if (request := self.requests.pop(request_id, None)) is not None:
                by_rank.setdefault(self.leaders[request.dp_rank], []).append(request_id)
        return Effects([] if self.lost else [(rank, Abort(ids)) for rank, ids in by_rank.items()])

    def stop(self) -> Effects:
        """Let the ranks leave; requests that run go on to their end, new ones are refused."""
        sends: list[tuple[int, Message]] = [] if self.stopping or self.lost else [(r, Stop()) for r in self.places]
        self.stopping = True
        return Effects(sends)

    def receive(self, rank: int, number: int, message: Message, now: float = 0.0) -> Effects:
        """Take in what ``rank`` says."""
        if self.lost or number <= self._heard[rank]:
            return Effects()
        self._heard[rank], self._heard_at[rank] = number, now
        if isinstance(message, Failed):
            return self.lose(f"rank {rank} failed: {message.reason}")
        effects = Effects()
        if isinstance(message, Woke) and message.step > self._last_wake:
            self._last_wake = message.step
            effects.sends = [(other, Wake(message.step)) for other in self.places if other != rank]
        elif isinstance(message, Outputs):
            for output in message.outputs:
                if (request := self.requests.get(output.request_id)) is None:
                    continue
                request.waiting_tokens = 0
                effects.outputs.append(output)
                if output.finished:
                    del self.requests[output.request_id]
            for request_id, reason in message.rejected.items():
                if self.requests.pop(request_id, None) is not None:
                    effects.failed[request_id] = (reason, True)
        return effects

    def tick(self, now: float) -> Effects:
        """Time has passed: say that this side lives, and find ranks that no longer do."""
        if self.lost:
            return Effects()
        silent = [rank for rank, heard in self._heard_at.items() if now - heard > self.silence]
        if silent:
            return self.lose(f"rank {silent[0]} has given no sign of life for {self.silence:g} s")
        return Effects([(rank, Alive()) for rank in self.places])

    def lose(self, reason: str) -> Effects:
        """The engine is gone: every request in flight ends with ``reason``, none waits."""
        if self.lost:
            return Effects()
        self.lost = reason
        failed = dict.fromkeys(self.requests, (reason, False))
        self.requests.clear()
        return Effects(failed=failed, lost=reason)
