# SPDX-License-Identifier: Apache-2.0
"""Faults that engines of this kind have had in the field, as variants of the machines; #: of vllm-project/vllm."""

from __future__ import annotations

from typing import Any

from simulation.world import Agreement, Rank

from vllm.v1.engine.messages import Abort, Add, Message, Wake, Woke
from vllm.v1.engine.protocol import Commands, Effects, FrontProtocol, RankProtocol, _InFlight


class SkipsEmptySteps(Rank):
    """#43547: a step in which nothing can be scheduled ends before the agreement."""

    def vote(self, commands: Commands) -> list[Message]:
        told = super().vote(commands)
        if self.scheduler.waiting and not self.tokens:
            self.call, self.agreement = None, Agreement((), True, False)
            return told + self.end()
        return told


class PausesAlone(Rank):
    """#39366: asked to end, a rank with nothing to do stands still within a run, and not when all agree on it."""

    @property
    def is_due(self) -> bool:
        protocol, scheduler = self.protocol, self.scheduler
        works = scheduler.waiting or scheduler.running or protocol._additions
        return super().is_due and not (protocol.running and protocol._stopping and not works)


class WaitsForItsOwnWake(Rank):
    """#39366, in review: who asks for a wake counts on being woken itself, and is left out of the wake."""

    told = -1

    @property
    def is_due(self) -> bool:
        return super().is_due and (self._is_woken or self.told < self.protocol.step)

    @property
    def _is_woken(self) -> bool:
        return self.protocol.running or self.protocol._woken_for >= self.protocol.step

    def begin(self) -> list[Message]:
        if self._is_woken:
            return super().begin()
        self.told = self.protocol.step
        return [Woke(self.told)]


class DecidesDummiesAlone(Rank):
    """A rank runs a dummy where it has requests itself, and not where any rank has tokens."""

    def should_run(self, agreement: Agreement) -> bool:
        return self.tokens > 0


class LeavesAlone(Rank):
    """Told to stop, a rank leaves by a step without requests, whether or not the others are told as well."""

    def resume(self, outcome: Any) -> list[Message]:
        if isinstance(outcome, Agreement):
            outcome = outcome._replace(all_stopping=self.commands.stopping)
        return super().resume(outcome)


class _TakesStaleWakes(RankProtocol):
    def receive(self, number: int, message: Message) -> None:
        super().receive(number, message)
        if isinstance(message, Wake):
            self._woken_for = self.step


class TakesStaleWakes(Rank):
    """A wake for a step long taken begins the next one."""

    protocol_class = _TakesStaleWakes


class _WakesWithoutNumbers(RankProtocol):
    def receive(self, number: int, message: Message) -> None:
        super().receive(number, message)
        if isinstance(message, Wake):
            self._woken_for = 1_000_000

    def begin(self) -> tuple[Commands, list[Message]]:
        begun = super().begin()
        self._woken_for = -1
        return begun


class WakesWithoutNumbers(Rank):
    """A wake says "go on" and not for which step: one that comes in a step begins the one after it."""

    protocol_class = _WakesWithoutNumbers


class _TakesAllTwice(RankProtocol):
    def receive(self, number: int, message: Message) -> None:
        self._heard = number - 1
        super().receive(number, message)


class TakesAllTwice(Rank):
    """A rank does not know a message that comes again."""

    protocol_class = _TakesAllTwice


class HearsAllTwice(FrontProtocol):
    """A front end does not know a message that comes again."""

    def receive(self, rank: int, number: int, message: Message, now: float = 0.0) -> Effects:
        self._heard[rank] = number - 1
        return super().receive(rank, number, message, now)


class _ForgetsAborts(RankProtocol):
    def receive(self, number: int, message: Message) -> None:
        additions = self._additions
        super().receive(number, message)
        if isinstance(message, Abort):
            self._additions = additions
            self._aborts = self._aborts + message.request_ids if self.running else []


class ForgetsAborts(Rank):
    """An abort that comes in the last step before an idle one is dropped with those of requests that have ended."""

    protocol_class = _ForgetsAborts


class ReusesIds(FrontProtocol):
    """Clients' ids on the wire."""

    def add(self, request: Add, dp_rank: int | None = None) -> Effects:
        effects = super().add(request, dp_rank)
        running: _InFlight = self.requests[request.request_id]
        running.wire_id = request.request_id
        return Effects([(rank, request) for rank, _ in effects.sends])

    def _find(self, wire_id: str) -> str | None:
        return wire_id if wire_id in self.requests else None


class LosesWakes(FrontProtocol):
    """A wake goes to the ranks that have no requests, as if those that have were awake."""

    def receive(self, rank: int, number: int, message: Message, now: float = 0.0) -> Effects:
        effects = super().receive(rank, number, message, now)
        if isinstance(message, Woke):
            busy = {self.leaders[request.dp_rank] for request in self.requests.values()}
            effects.sends = [(other, wake) for other, wake in effects.sends if other not in busy]
        return effects
