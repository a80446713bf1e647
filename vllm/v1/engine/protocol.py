# SPDX-License-Identifier: Apache-2.0
"""The two sides of a served engine, a front end and its ranks, as pure state machines: no clock, socket or thread.

Why it cannot hang. Ranks stop only by a decision that all took in one step's agreement (``RankProtocol.agreed``), so
those that stand still all stand before the same step, and that step's number is all that a wake has to say. A rank that
begins it on its own account tells the front end, which tells all others. A wake for a step that a rank has taken says
nothing new; none can be for a step beyond the next one, since that one needs every rank. The end is such a step too:
a rank votes to leave, and all leave by the agreement in which all did.

Requests go to the first TP rank of a DP group (its leader), which hands what it begins a step with to the others of its
group; so they add and drop the same requests before the same step.

Neither machine is thread-safe: each belongs to one thread, or to one lock.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from vllm.v1.engine.messages import Abort, Add, Alive, Failed, Left, Message, Outputs, Stop, Wake, Woke
from vllm.v1.outputs import EngineCoreOutput


class ProtocolError(RuntimeError):
    """A peer said what it cannot say where it stands: the engine is lost."""


class Commands(NamedTuple):
    """What the ranks of a DP group do before a step: add and drop; ``stopping``: vote to leave."""

    additions: tuple[Add, ...] = ()
    aborts: tuple[str, ...] = ()
    stopping: bool = False


class Silence:
    """Which of ``peers`` have said nothing for longer than ``bound``, in time through which this side was awake.

    A process that was stopped for long has words to read when it goes on, so a leap of its clock counts as a quarter of
    the bound: none is taken for dead before the words that wait are read.
    """

    def __init__(self, peers: Iterable[Hashable], bound: float, now: float = 0.0) -> None:
        self.bound, self._now, self._awake = bound, now, 0.0
        self._heard_at = dict.fromkeys(peers, 0.0)

    def _advance(self, now: float) -> None:
        self._awake += min(max(now - self._now, 0.0), self.bound / 4)
        self._now = max(now, self._now)

    def heard(self, peer: Hashable, now: float) -> None:
        self._advance(now)
        self._heard_at[peer] = self._awake

    def forget(self, peer: Hashable) -> None:
        self._heard_at.pop(peer, None)

    def silent(self, now: float) -> list[Hashable]:
        """Call it a few times within ``bound``."""
        self._advance(now)
        return [peer for peer, at in self._heard_at.items() if self._awake - at > self.bound]


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
        self._stopping = self._stop_is_new = False

    def receive(self, number: int, message: Message) -> None:
        """Take in what the front end says, at any moment."""
        if number <= self._heard:
            return
        if number != self._heard + 1:
            raise ProtocolError(f"message {number} of the front end came after message {self._heard}")
        self._heard = number
        if isinstance(message, Wake):
            if message.step > self.step + self.running:
                raise ProtocolError(f"woken for step {message.step} before step {self.step} was agreed on")
            self._woken_for = message.step
        elif isinstance(message, Add | Abort | Stop) and not self.is_leader:
            raise ProtocolError(f"{message} came to a rank that is not its DP group's first")
        elif isinstance(message, Add):
            self._additions.append(message)
        elif isinstance(message, Abort):
            dropped = set(message.request_ids)
            kept = [request for request in self._additions if request.request_id not in dropped]
            dropped -= {request.request_id for request in self._additions}
            self._additions = kept
            if self.running:  # else no rank holds requests
                self._aborts += dropped
        elif isinstance(message, Stop):
            self._stopping = self._stop_is_new = True

    @property
    def is_due(self) -> bool:
        """Whether the next step begins now; else nothing is to be done until a message comes."""
        return not self.left and (
            self.running or self._woken_for >= self.step or bool(self._additions) or self._stop_is_new
        )

    def begin(self) -> tuple[Commands, list[Message]]:
        """Begin step ``step``: what it starts with, and what to tell the front end.

        Of a rank that is no leader the commands are empty: its group's leader hands it those that count.
        """
        assert self.is_due, f"step {self.step} begins without a cause"
        tell: list[Message] = []
        if not self.running and self._woken_for < self.step and self.num_ranks > 1:
            tell.append(Woke(self.step))
        self.running, self._stop_is_new = True, False
        commands = Commands(tuple(self._additions), tuple(self._aborts), self._stopping)
        self._additions, self._aborts = [], []
        return commands, tell

    def agreed(self, any_unfinished: bool, all_stopping: bool) -> list[Message]:
        """Step ``step`` was agreed on by all ranks: whether any has requests left, whether all vote to leave.

        Returns what to tell the front end after the step's outputs. Where only some vote to leave, all may stand still:
        each of the others begins a step when it is told to stop.
        """
        assert self.running, f"step {self.step} was agreed on and never begun"
        self.running = any_unfinished
        self.left = all_stopping and not any_unfinished
        if not self.running:
            self._aborts.clear()  # without requests on any rank they can only name those that have ended
        self.step += 1
        return [Left(self.step - 1)] if self.left else []


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
    wire_id: str
    dp_rank: int
    waiting_tokens: int


def cause_of_loss(rank: int, how: str | None) -> str:
    """``how`` ``rank`` ended, None where without a word, as the reason for which the engine is lost."""
    return f"rank {rank} {how or 'ended without a word'}"


class FrontProtocol:
    """The front end of the ranks at ``places``; once ``lost`` is set it hands out nothing more.

    ``silence``: in the caller's units of time, how long a rank may be silent. Time is what the caller says it is.
    ``cause_of``: what to name as the cause where a rank ended, as ``cause_of_loss``.
    ``left``: the ranks that said that they leave. On the wire a request's id ends in ``#`` and a count, so that nothing
    said of an aborted request is taken for a word on a later one of the same id.
    """

    def __init__(
        self,
        places: Mapping[int, Place],
        silence: float,
        now: float = 0.0,
        cause_of: Callable[[int, str | None], str] = cause_of_loss,
    ) -> None:
        self.places, self._cause_of = dict(places), cause_of
        leaders = {place.dp_rank: rank for rank, place in self.places.items() if place.is_leader}
        assert sorted(leaders) == list(range(len(leaders))), f"leaders of DP ranks {sorted(leaders)}"
        self.leaders = [leaders[dp_rank] for dp_rank in range(len(leaders))]
        self.requests: dict[str, _InFlight] = {}
        self.lost: str | None = None
        self.stopping = False
        self.left: set[int] = set()
        self._added, self._last_wake = 0, -1
        self._heard = dict.fromkeys(self.places, 0)
        self._silence = Silence(self.places, silence, now)
        self._loads = [[0, 0] for _ in self.leaders]  # by DP rank: tokens that wait, requests

    @property
    def has_ended(self) -> bool:
        """All ranks said that they leave."""
        return len(self.left) == len(self.places)

    def waiting_tokens(self, dp_rank: int) -> int:
        """Prompt tokens of the requests of ``dp_rank`` that have given nothing yet."""
        return self._loads[dp_rank][0]

    def choose_rank(self) -> int:
        """The DP rank with the fewest tokens waiting, of those the one with the fewest requests."""
        return min(range(len(self._loads)), key=self._loads.__getitem__)

    def check_rank(self, dp_rank: int) -> None:
        if not 0 <= dp_rank < len(self.leaders):
            raise ValueError(f"data_parallel_rank={dp_rank}: there are ranks 0 to {len(self.leaders) - 1}")

    def hold(self, dp_rank: int, tokens: int, requests: int = 1) -> None:
        """Count requests of ``dp_rank`` that will be added later; take them back, with -1, before they are."""
        self._loads[dp_rank][0] += tokens * requests
        self._loads[dp_rank][1] += requests

    def add(self, request: Add, dp_rank: int | None = None) -> Effects:
        """Give ``request`` to ``dp_rank``, by default the least loaded.

        Raises ``ValueError`` for an id in use and a rank that does not exist, ``RuntimeError`` where none is taken.
        """
        if self.lost or self.stopping:
            raise RuntimeError(self.lost or "the engine is shutting down: it takes no more requests")
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use by an unfinished request; give another")
        if dp_rank is None:
            dp_rank = self.choose_rank()
        self.check_rank(dp_rank)
        self._added += 1
        wire_id, waiting = f"{request.request_id}#{self._added}", len(request.prompt_token_ids)
        self.requests[request.request_id] = _InFlight(wire_id, dp_rank, waiting)
        self._loads[dp_rank][0] += waiting
        self._loads[dp_rank][1] += 1
        return Effects([(self.leaders[dp_rank], msgspec.structs.replace(request, request_id=wire_id))])

    def abort(self, request_ids: list[str]) -> Effects:
        """Drop requests: nothing more comes of them. Ids that have ended are ignored."""
        by_rank: dict[int, list[str]] = {}
        for request_id in request_ids:
            if request_id in self.requests:
                request = self._end(request_id)
                by_rank.setdefault(self.leaders[request.dp_rank], []).append(request.wire_id)
        return Effects([(rank, Abort(ids)) for rank, ids in by_rank.items()])

    def _end(self, request_id: str) -> _InFlight:
        request = self.requests.pop(request_id)
        self._loads[request.dp_rank][0] -= request.waiting_tokens
        self._loads[request.dp_rank][1] -= 1
        return request

    def _find(self, wire_id: str) -> str | None:
        """The id that clients know it by; None where it has ended."""
        request_id = wire_id.rpartition("#")[0]
        request = self.requests.get(request_id)
        return request_id if request is not None and request.wire_id == wire_id else None

    def stop(self) -> Effects:
        """Let the ranks leave; requests that run go on to their end, new ones are refused."""
        sends: list[tuple[int, Message]] = [] if self.stopping or self.lost else [(r, Stop()) for r in self.leaders]
        self.stopping = True
        return Effects(sends)

    def receive(self, rank: int, number: int, message: Message, now: float = 0.0) -> Effects:
        """Take in what ``rank`` says."""
        if self.lost or number <= self._heard[rank]:
            return Effects()
        if number != self._heard[rank] + 1:
            return self.lose(f"message {number} of rank {rank} came after message {self._heard[rank]}")
        self._heard[rank] = number
        self._silence.heard(rank, now)
        effects = Effects()
        if isinstance(message, Failed):
            return self.lose(self._cause_of(rank, f"failed: {message.reason}"))
        if isinstance(message, Left):
            self.left.add(rank)
            self._silence.forget(rank)
        elif isinstance(message, Woke) and message.step > self._last_wake:
            self._last_wake = message.step
            effects.sends = [(other, Wake(message.step)) for other in self.places if other != rank]
        elif isinstance(message, Outputs):
            for output in message.outputs:
                if (request_id := self._find(output.request_id)) is None:
                    continue
                output.request_id, request = request_id, self.requests[request_id]
                self._loads[request.dp_rank][0] -= request.waiting_tokens
                request.waiting_tokens = 0
                effects.outputs.append(output)
                if output.finished:
                    self._end(request_id)
            for wire_id, reason in message.rejected.items():
                if (request_id := self._find(wire_id)) is not None:
                    self._end(request_id)
                    effects.failed[request_id] = (reason, True)
        return effects

    def closed(self, rank: int, how: str | None = None) -> Effects:
        """Nothing more comes from ``rank``: its channel is closed, or its process is gone."""
        return Effects() if rank in self.left else self.lose(self._cause_of(rank, how))

    def tick(self, now: float) -> Effects:
        """Time has passed: say that this side lives, and find ranks that no longer do."""
        if self.lost:
            return Effects()
        if silent := self._silence.silent(now):
            names = ", ".join(map(str, silent))
            return self.lose(f"rank {names} has given no sign of life for {self._silence.bound:g} s")
        return Effects([(rank, Alive()) for rank in self.places if rank not in self.left])

    def lose(self, reason: str) -> Effects:
        """The engine is gone: every request in flight ends with ``reason``, none waits."""
        if self.lost:
            return Effects()
        self.lost = reason
        failed = dict.fromkeys(self.requests, (reason, False))
        for request_id in list(self.requests):
            self._end(request_id)
        return Effects(failed=failed, lost=reason)
