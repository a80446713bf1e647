# SPDX-License-Identifier: Apache-2.0
"""Every order of events of a small engine: a search over all its states.

A state is the local states of the front end and the ranks, what is in each channel, and what clients and misfortune may
still do. Local states and messages are numbered, and what an event makes of one is computed once, by the real classes;
the search itself works on tuples of numbers.

Two kinds of events are not interleaved, since they change nothing that another event sees: a rank enters its next
collective, and ends its step, as soon as a collective is complete. (That ``agreed`` gives the same before and after any
message that can come then is checked on every local state met.) Where a rank dies, it is told how many collectives more
it takes part in; so nothing is left out by that.

No event can be undone: steps, numbers of messages and of requests only grow. So the search ends, and where in each
state that has no event but clients' doing all is answered and all ranks stand alike, nobody waits for ever.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from simulation.world import Front, Job, Layout, Rank, Violation, check_rest, complete

from vllm.v1.engine.messages import Failed, Left, Message, Outputs, Wake
from vllm.v1.engine.protocol import FrontProtocol

CLOSED = -1  # in a channel: the rank's end of it is closed


def freeze(value: Any) -> Any:
    """A hashable twin: equal for equal contents."""
    if value is None or isinstance(value, int | str | float):
        return value
    if isinstance(value, dict):
        return tuple((key, freeze(value[key])) for key in sorted(value))
    if isinstance(value, list | tuple):
        return tuple(map(freeze, value))
    if isinstance(value, set | frozenset):
        return tuple(sorted(value))
    if isinstance(value, msgspec.Struct):
        return type(value).__name__, freeze(msgspec.structs.astuple(value))
    return type(value).__name__, freeze(vars(value))


@dataclass(frozen=True)
class Script:
    """What may happen, at any moment: ``jobs`` are added in order, ``aborts``, ``deaths`` and ``duplicates`` at most.

    A death is silent or with a last word, between steps or in one.
    """

    layout: Layout
    jobs: Sequence[Job]
    aborts: int = 0
    stop: bool = False
    deaths: int = 0
    duplicates: int = 0
    max_empty: int = 1


class Explorer:
    def __init__(
        self, script: Script, rank_class: type = Rank, front_class: type = FrontProtocol, reduce: bool = True
    ) -> None:
        self.script, self.size, self.reduce = script, script.layout.size, reduce
        self.objects: list[Any] = []
        self._ids: dict[Any, int] = {}
        self._memo: dict[Any, Any] = {}
        self._facts: dict[int, Any] = {}
        layout = script.layout
        ranks = tuple(self.keep(rank_class(index, layout, script.max_empty)) for index in range(self.size))
        front = self.keep(Front(front_class(layout.places(), silence=8.0)))
        groups = [f"tp{d}" for d in range(layout.dp)] if layout.tp > 1 else []
        groups += [f"dp{t}" for t in range(layout.tp)] + ["world"]
        self.groups = {name: layout.members(name) for name in groups}
        empty: tuple[tuple[int, ...], ...] = ((),) * self.size
        self.start = (front, ranks, empty, empty, (0, script.aborts, script.stop, script.deaths, script.duplicates))
        self.transitions = self.rests = self.last_step = 0

    def keep(self, value: Any) -> int:
        key = freeze(value)
        if (number := self._ids.get(key)) is None:
            number = self._ids[key] = len(self.objects)
            self.objects.append(value)
        return number

    # ---- what an event makes of one local state

    def _event(self, number: int, name: str, *args: Any) -> Any:
        """(new local state, what it says): computed once; a violation is raised each time."""
        key = (number, name, *args)
        if (result := self._memo.get(key)) is None:
            result = self._memo[key] = getattr(self, "_" + name)(copy.deepcopy(self.objects[number]), *args)
        return result

    def _said(self, rank: Rank, messages: list[Message]) -> tuple[int, tuple[int, ...]]:
        said = []
        for message in messages:
            rank.said += 1
            said.append(self.keep((rank.said, message)))
        if rank.dead:
            said.append(CLOSED)
        return self.keep(rank), tuple(said)

    def _take(self, rank: Rank, message: int) -> Any:
        rank.receive(*copy.deepcopy(self.objects[message]))
        return self._said(rank, [])

    def _begin(self, rank: Rank) -> Any:
        return self._said(rank, rank.begin())

    def _resume(self, rank: Rank, outcome: int) -> Any:
        doomed = getattr(rank, "doomed", None)
        if doomed == 0:
            rank.call, rank.dead = None, True
            return self._said(rank, [Failed("out of memory")] if rank.last_word else [])  # type: ignore[attr-defined]
        tell = rank.resume(copy.deepcopy(self.objects[outcome]))
        if doomed is not None:
            rank.doomed = doomed - 1 if rank.call is not None else 0  # type: ignore[attr-defined]
            rank.dead = rank.call is None
        return self._said(rank, tell)

    def _die(self, rank: Rank, after: int, last_word: bool) -> Any:
        if after == 0 or rank.call is None:
            rank.call, rank.dead = None, True
            return self._said(rank, [Failed("out of memory")] if last_word else [])
        rank.doomed, rank.last_word = after - 1, last_word  # type: ignore[attr-defined]
        return self._said(rank, [])

    def _sent(self, front: Front, sends: list[tuple[int, int, Message]]) -> Any:
        return self.keep(front), tuple((rank, self.keep((number, message))) for rank, number, message in sends)

    def _hear(self, front: Front, rank: int, message: int) -> Any:
        if message == CLOSED:
            return self._sent(front, front.take(front.protocol.closed(rank)))
        return self._sent(front, front.receive(rank, *copy.deepcopy(self.objects[message])))

    def _add(self, front: Front, index: int) -> Any:
        return self._sent(front, front.add(index, self.script.jobs[index]))

    def _abort(self, front: Front, index: int) -> Any:
        return self._sent(front, front.abort(index))

    def _stop(self, front: Front) -> Any:
        return self._sent(front, front.take(front.protocol.stop()))

    # ---- facts about a local state

    def _rank_facts(self, number: int) -> tuple[str | None, bool, bool]:
        """(group that it waits in, whether it is due, whether it is dead)."""
        if (facts := self._facts.get(number)) is None:
            rank = self.objects[number]
            facts = self._facts[number] = (rank.call and rank.call.group, rank.is_due, rank.dead)
            self.last_step = max(self.last_step, rank.protocol.step)
            if rank.protocol.step > 60:
                raise Violation("empty: steps without end")
        return facts

    def _front_facts(self, number: int) -> tuple[bool, bool, tuple[int, ...], frozenset[str]]:
        """(lost, stopping, requests that run, ids in use)."""
        if (facts := self._facts.get(number)) is None:
            front = self.objects[number]
            live = tuple(index for index, entry in front.ledger.items() if entry.end is None)
            used = frozenset(front.ledger[index].job.client_id for index in live)
            facts = self._facts[number] = (front.protocol.lost is not None, front.protocol.stopping, live, used)
        return facts

    # ---- the search

    def _settle(self, ranks: list[int], ups: list[tuple[int, ...]]) -> None:
        """Take all collectives that are complete to their ends."""
        moved = True
        while moved:
            moved = False
            for name, members in self.groups.items():
                if all(self._rank_facts(ranks[r])[0] == name for r in members):
                    key = ("complete", *(ranks[r] for r in members))
                    if (outcome := self._memo.get(key)) is None:
                        calls = [self.objects[ranks[r]].call for r in members]
                        outcome = self._memo[key] = self.keep(complete(calls))
                    for r in members:
                        ranks[r], said = self._event(ranks[r], "resume", outcome)
                        ups[r] += said
                    moved = True

    def _by_rank(self, state: Any, r: int, event: Any, down: Any = None) -> Any:
        front, ranks, downs, ups, left = state
        ranks, ups = list(ranks), list(ups)
        ranks[r], said = event
        ups[r] += said
        self._settle(ranks, ups)
        return front, tuple(ranks), downs if down is None else (*downs[:r], down, *downs[r + 1 :]), tuple(ups), left

    def _by_front(self, state: Any, event: Any, ups: Any = None, left: Any = None) -> Any:
        front, sends = event
        downs = state[2]
        if sends:
            channels = list(downs)
            for rank, message in sends:
                channels[rank] += (message,)
            downs = tuple(channels)
        return front, state[1], downs, state[3] if ups is None else ups, state[4] if left is None else left

    def _hears(self, state: Any, r: int) -> Iterator[tuple[str, Any]]:
        front, _, _, ups, left = state
        head, rest = ups[r][0], ups[r][1:]
        event = self._event(front, "hear", r, head)
        yield f"front hears {r}", self._by_front(state, event, (*ups[:r], rest, *ups[r + 1 :]))
        if left[4] and head != CLOSED and CLOSED not in rest:
            again = (*ups[:r], (*rest, head), *ups[r + 1 :])
            yield f"front hears {r} and will again", self._by_front(state, event, again, (*left[:4], left[4] - 1))

    def _takes(self, state: Any, r: int) -> Iterator[tuple[str, Any]]:
        _, ranks, downs, _, left = state
        head, rest = downs[r][0], downs[r][1:]
        event = self._event(ranks[r], "take", head)
        yield f"{r} takes", self._by_rank(state, r, event, rest)
        if left[4]:
            again = (*state[:4], (*left[:4], left[4] - 1))
            yield f"{r} takes and will again", self._by_rank(again, r, event, (*rest, head))

    def _begins(self, state: Any, r: int) -> Iterator[tuple[str, Any]]:
        yield f"{r} begins", self._by_rank(state, r, self._event(state[1][r], "begin"))

    def events(self, state: Any) -> Iterator[tuple[str, Any]]:
        """(what happens, the state after) of the system."""
        _, ranks, downs, ups, _ = state
        for r in range(self.size):
            if ups[r]:
                yield from self._hears(state, r)
            _, due, dead = self._rank_facts(ranks[r])
            if downs[r] and not dead:
                yield from self._takes(state, r)
            if due:
                yield from self._begins(state, r)

    def first(self, state: Any) -> Iterator[tuple[str, Any]] | None:
        """Events that change nothing for any other, now or later, so that it is enough to let them come first."""
        front, ranks, downs, ups, (added, aborts, stop, deaths, _) = state
        for r in range(self.size):
            if ups[r] and ups[r][0] != CLOSED:
                message = self.objects[ups[r][0]][1]
                if (
                    self._event(front, "hear", r, ups[r][0]) == (front, ())
                    or isinstance(message, Left)
                    or (isinstance(message, Outputs) and self._ends_nothing_wanted(message, added, aborts))
                ):
                    return self._hears(state, r)
        for r in range(self.size):
            rank = self.objects[ranks[r]]
            protocol = rank.protocol
            if rank.dead:
                continue
            if downs[r]:
                message = self.objects[downs[r][0]][1]
                if self._event(ranks[r], "take", downs[r][0])[0] == ranks[r] or (
                    isinstance(message, Wake)
                    and (not protocol.is_leader or message.step < protocol.step + protocol.running)
                ):
                    return self._takes(state, r)
            if not deaths and rank.is_due and (protocol.running or protocol._woken_for >= protocol.step):
                live = self._front_facts(front)[2] if aborts else ()
                jobs = [*self.script.jobs[added:], *(self.script.jobs[index] for index in live)]
                if not protocol.is_leader or not (
                    stop
                    or any(not isinstance(self.objects[m][1], Wake) for m in downs[r])
                    or any(job.dp_rank in (None, r // self.script.layout.tp) for job in jobs)
                ):
                    return self._begins(state, r)
        return None

    def _ends_nothing_wanted(self, message: Outputs, added: int, aborts: int) -> bool:
        ended = {o.request_id.rpartition("#")[0] for o in message.outputs if o.finished}
        ended |= {wire_id.rpartition("#")[0] for wire_id in message.rejected}
        return not ended or (not aborts and ended.isdisjoint(job.client_id for job in self.script.jobs[added:]))

    def doings(self, state: Any) -> Iterator[tuple[str, Any]]:
        """The same of clients and misfortune."""
        front, ranks, _, _, (added, aborts, stop, deaths, duplicates) = state
        _, stopping, live, used = self._front_facts(front)
        jobs = self.script.jobs
        if added < len(jobs) and not stopping and jobs[added].client_id not in used:
            left = (added + 1, aborts, stop, deaths, duplicates)
            yield f"add {added}", self._by_front(state, self._event(front, "add", added), left=left)
        if aborts:
            left = (added, aborts - 1, stop, deaths, duplicates)
            for index in live:
                yield f"abort {index}", self._by_front(state, self._event(front, "abort", index), left=left)
        if stop:
            left = (added, aborts, False, deaths, duplicates)
            yield "stop", self._by_front(state, self._event(front, "stop"), left=left)
        if deaths:
            rest = (*state[:4], (added, aborts, stop, deaths - 1, duplicates))
            for r in range(self.size):
                group, _, dead = self._rank_facts(ranks[r])
                if dead or self.objects[ranks[r]].protocol.left:
                    continue
                for after in range(1 if group is None else 3):
                    for last_word in (False, True):
                        event = self._event(ranks[r], "die", after, last_word)
                        yield f"{r} dies after {after}", self._by_rank(rest, r, event)

    def check(self, state: Any) -> None:
        self.rests += 1
        check_rest(self.objects[state[0]], [self.objects[number] for number in state[1]])

    def run(self, limit: int = 10_000_000) -> int:
        """The number of states. Raises the first ``Violation`` with the events that lead to it."""
        seen = {self.start}
        path: list[str] = []
        stack: list[Iterator[tuple[str, Any]]] = [self._expand(self.start)]
        try:
            while stack:
                for name, state in stack[-1]:
                    self.transitions += 1
                    if state not in seen:
                        seen.add(state)
                        path.append(name)
                        stack.append(self._expand(state))
                        break
                else:
                    stack.pop()
                    if path:
                        path.pop()
                if len(seen) > limit:
                    raise RuntimeError(f"more than {limit} states")
        except Violation as violation:
            raise Violation(f"{violation}\n  after: {'; '.join(path)}") from violation
        self.states = len(seen)
        return len(seen)

    def _expand(self, state: Any) -> Iterator[tuple[str, Any]]:
        if self._front_facts(state[0])[
            0
        ]:  # lost: all processes are ended, and what still comes from them changes nothing
            self.check(state)
            for r in range(self.size):
                if state[3][r] and self._event(state[0], "hear", r, state[3][r][0]) != (state[0], ()):
                    raise Violation("after the end: the front end changes when a rank is heard")
            return
        if self.reduce and (first := self.first(state)) is not None:
            yield from first
            return
        rests = True
        for event in self.events(state):
            rests = False
            yield event
        if rests:
            self.check(state)
        yield from self.doings(state)
