# SPDX-License-Identifier: Apache-2.0
"""Random runs of a large engine, in simulated time: seeded, so that a run can be had again.

    PYTHONPATH=.:tests python -m simulation.timed SEED RANKS STEPS

A seed gives the layout, how slow messages and ranks are, what clients do, and how it ends: told to stop, a rank that
dies silently or with a word, one that is stopped and never goes on, or a front end that is stopped for a while. The
messages of a channel keep their order, come late by random times and now and then twice.

Counted are engine steps (agreements) and rank steps, which are steps times ranks.
"""

from __future__ import annotations

import heapq
import math
import random
import sys
import time
from dataclasses import dataclass
from typing import Any

from simulation.world import Front, Job, Layout, Rank, Violation, check_rest, complete

from vllm.v1.engine.messages import Alive, Failed, Message
from vllm.v1.engine.protocol import FrontProtocol

SILENCE, TICK = 8.0, 1.0  # seconds
ENDS = ("stop", "stop early", "die", "fail", "freeze", "front sleeps")


@dataclass
class Summary:
    seed: int
    layout: Layout
    end: str
    steps: int = 0
    requests: int = 0
    aborted: int = 0
    rests: int = 0  # nothing was under way but clients' next doing
    idle: int = 0  # collectives after which ranks stood still
    events: int = 0
    seconds: float = 0.0  # simulated
    named_after: float | None = None


class World:
    """``steps``: how many before it ends. Raises ``Violation`` with the seed."""

    def __init__(self, seed: int, size: int, steps: int, rank_class: type = Rank, end: str | None = None) -> None:
        self.random = rng = random.Random(seed)
        tp = rng.choice([t for t in (1, 2, 4, 8) if size % t == 0 and size // t >= 2])
        self.layout = layout = Layout(
            tp, size // tp, blocks=rng.choice([2, 4, 16]), max_num_seqs=rng.choice([1, 4, 16])
        )
        self.target, self.end = steps, end or rng.choice(ENDS)
        self.delay = rng.choice([1e-4, 1e-3, 2e-2])  # mean of a message's
        self.jitter = rng.choice([1e-5, 1e-3])  # mean of a rank's before a step
        self.forward = rng.choice([2e-3, 2e-2])
        self.slow = {rng.randrange(size): rng.choice([5.0, 50.0]) for _ in range(rng.randrange(3))}
        self.twice = rng.choice([0.0, 0.02])
        self.leaving = rng.choice([0.0, 0.3])  # share of requests that are aborted
        self.longest, self.burst_size = (
            rng.choice([1, 4, 20]),
            rng.choice([0.5, 3.0]),
        )  # tokens; requests that come at once
        self.patience = self.forward * rng.choice([0.2, 5.0])
        self.ranks = [rank_class(index, layout, max_empty=60) for index in range(size)]
        self.front = Front(FrontProtocol(layout.places(), SILENCE), forgets=True)
        self.members = {f"tp{d}": layout.members(f"tp{d}") for d in range(layout.dp)}
        self.members |= {f"dp{t}": layout.members(f"dp{t}") for t in range(tp)} | {"world": range(size)}
        self.sizes = {name: len(members) for name, members in self.members.items()}
        self.arrived = dict.fromkeys(self.members, 0)
        self.heap: list[tuple[float, int, Any, Any, Any]] = []
        self.burst: list[tuple[float, int]] = []  # ranks that begin a step, the next one last
        self.waking = [False] * size
        self.frozen: int | None = None
        self.last_up, self.last_down = [0.0] * size, [0.0] * size
        self.number = self.events = self.added = self.under_way = 0
        self.outside = {self.client, self.leave, self.tick}  # nobody waits for these
        self.now = 0.0
        self.closing = False
        self.ended_at: float | None = None
        self.summary = Summary(seed, layout, self.end)

    # ---- time

    def at(self, when: float, what: Any, a: Any = None, b: Any = None) -> None:
        self.number += 1
        self.under_way += what not in self.outside
        heapq.heappush(self.heap, (when, self.number, what, a, b))

    def late(self) -> float:
        return -math.log(1.0 - self.random.random()) * self.delay

    def send(self, sends: list[tuple[int, int, Message]]) -> None:
        for rank, number, message in sends:
            when = self.last_down[rank] = max(self.last_down[rank], self.now + self.late())
            self.at(when, self.take, rank, (number, message))
            if self.twice and self.random.random() < self.twice:
                self.at(when + 3 * self.late(), self.take, rank, (number, message))

    def say(self, rank: Rank, messages: list[Message]) -> None:
        r = rank.index
        for message in messages:
            rank.said += 1
            when = self.last_up[r] = max(self.last_up[r], self.now + self.late())
            self.at(when, self.hear, r, (rank.said, message))
            if self.twice and self.random.random() < self.twice:
                self.at(when + 3 * self.late(), self.hear, r, (rank.said, message))

    # ---- ranks

    def take(self, r: int, numbered: tuple[int, Message]) -> None:
        rank = self.ranks[r]
        if rank.dead or r == self.frozen:
            return
        rank.receive(*numbered)
        if not self.waking[r] and rank.is_due:
            self.waking[r] = True
            self.at(self.now + self.random.random() * 2 * self.jitter * self.slow.get(r, 1.0), self.begin, r)

    def begin(self, r: int, _: Any = None) -> None:
        self.waking[r] = False
        rank = self.ranks[r]
        if rank.is_due and r != self.frozen:
            tell = rank.begin()
            if tell:
                self.say(rank, tell)
            if rank.call is not None:
                self.arrive(rank.call.group, 1)

    def arrive(self, name: str, more: int) -> None:
        if not more:
            return
        self.arrived[name] = count = self.arrived[name] + more
        if count == self.sizes[name]:
            took = self.forward if name == "world" else 1e-5 * math.log2(1 + count)
            self.at(self.now + took * (0.5 + self.random.random()), self.complete, name)

    def complete(self, name: str, _: Any = None) -> None:
        ranks = [self.ranks[r] for r in self.members[name]]
        calls = [rank.call for rank in ranks]
        if None in calls:
            return  # a rank died in it
        self.arrived[name] = 0
        outcome = complete(calls)
        if name == "dp0":
            self.summary.steps += 1
        frozen, now, jitter, slow, uniform = self.frozen, self.now, 2 * self.jitter, self.slow, self.random.random
        ready: list[tuple[float, int]] = []
        moved, to = 0, ""
        for rank in ranks:
            r = rank.index
            if r == frozen:
                continue
            tell = rank.resume(outcome)
            if tell:
                self.say(rank, tell)
            if rank.call is not None:
                if rank.call.group == to:
                    moved += 1
                else:
                    self.arrive(to, moved)
                    to, moved = rank.call.group, 1
            elif rank.protocol.running or rank.is_due:
                self.waking[r] = True
                ready.append((now + uniform() * jitter * (slow.get(r, 1.0) if slow else 1.0), r))
        self.arrive(to, moved)
        if ready:
            self.burst = sorted(self.burst + ready, reverse=True)
        elif not to:
            self.summary.idle += not ranks[0].protocol.running

    # ---- the front end and its clients

    def hear(self, r: int, numbered: tuple[int, Message] | None) -> None:
        if numbered is None:
            self.send(self.front.take(self.front.protocol.closed(r)))
        else:
            self.send(self.front.receive(r, *numbered, now=self.now))

    def tick(self, _: Any = None, __: Any = None) -> None:
        self.send(self.front.take(self.front.protocol.tick(self.now)))
        for rank in self.ranks:
            if not (rank.dead or rank.index == self.frozen or rank.protocol.left):
                self.say(rank, [Alive()])
        self.at(self.now + TICK, self.tick)

    def client(self, _: Any = None, __: Any = None) -> None:
        """Some requests come; then nobody does anything for a time in which the engine may come to rest."""
        rng, protocol = self.random, self.front.protocol
        if protocol.lost or protocol.stopping:
            return
        for _n in range(min(1 + int(rng.expovariate(1 / self.burst_size)), 40)):
            client_id = f"c{rng.randrange(4 * self.layout.dp)}"
            if client_id in protocol.requests:
                continue
            pinned = rng.randrange(self.layout.dp) if rng.random() < 0.3 else None
            blocks = 99 if rng.random() < 0.01 else rng.randint(1, 2)
            hold = rng.randint(1, 5) if rng.random() < 0.05 else 0
            job = Job(client_id, pinned, rng.randint(1, 50), rng.randint(1, self.longest), blocks, hold)
            index, self.added = self.added, self.added + 1
            self.send(self.front.add(index, job))
            if rng.random() < self.leaving:
                self.at(self.now + rng.expovariate(1 / self.patience), self.leave, index)
        if self.summary.steps < self.target:
            pause = rng.choice([0.1, 2.0, 30.0]) * self.forward
            self.at(self.now + rng.expovariate(1 / pause), self.client)
        elif not self.closing:
            self.closing = True
            if self.end != "stop":
                self.finish()

    def leave(self, index: int, _: Any = None) -> None:
        if index in self.front.ledger:
            self.summary.aborted += 1
            self.send(self.front.abort(index))

    def finish(self) -> None:
        """The end that the seed has drawn."""
        self.ended_at = self.now
        victim = self.random.choice(self.ranks)
        self.victim = victim.index
        if self.end.startswith("stop"):
            self.send(self.front.take(self.front.protocol.stop()))
        elif self.end == "freeze":
            self.frozen = victim.index
        elif self.end == "front sleeps":  # all that comes to it meanwhile waits, and its clock leaps
            wakes = self.now + 3 * SILENCE
            self.last_up = [max(at, wakes) for at in self.last_up]
            asleep = (self.hear, self.tick, self.client, self.leave)
            self.heap = [(max(e[0], wakes) if e[2] in asleep else e[0], *e[1:]) for e in self.heap]
            heapq.heapify(self.heap)
            self.end = "stop"
        else:
            if self.end == "fail":
                self.say(victim, [Failed("out of memory")])
            victim.dead = True
            if victim.call is not None:
                self.arrived[victim.call.group] -= 1
                victim.call = None
            when = max(self.last_up[victim.index], self.now + self.late())
            self.at(when, self.hear, victim.index)

    # ---- the run

    def run(self) -> Summary:
        try:
            self._run()
        except (Violation, KeyError, AssertionError) as error:
            size = self.layout.size
            raise Violation(f"{error}; again by seed {self.summary.seed}, {size} ranks, {self.target} steps") from error
        self.summary.requests, self.summary.events, self.summary.seconds = self.added, self.events, self.now
        return self.summary

    def _run(self) -> None:
        front, heap = self.front, self.heap
        self.at(0.0, self.client)
        self.at(TICK / 2, self.tick)
        while front.protocol.lost is None:
            self.events += 1
            heap, burst = self.heap, self.burst
            if burst and burst[-1][0] <= heap[0][0]:
                self.now, r = burst.pop()
                self.begin(r)
                continue
            self.now, _, what, a, b = heapq.heappop(heap)
            if what in self.outside:
                what(a, b)
                continue
            self.under_way -= 1
            what(a, b)
            if self.under_way == 0 and not self.burst:
                self.summary.rests += 1
                if self.frozen is None:
                    check_rest(front, self.ranks)
                if front.protocol.has_ended:
                    return
                if self.closing and (self.ended_at is None or (self.end == "stop" and not front.protocol.stopping)):
                    self.finish()
            if self.ended_at is not None and self.now > self.ended_at + 10_000:
                raise Violation(f"waits for ever: {self.end} at {self.ended_at:.3f} s and no end")
        assert self.ended_at is not None, f"lost without a cause: {front.protocol.lost}"
        self.summary.named_after = self.now - self.ended_at
        bound = 60 * self.delay + (SILENCE + 2 * TICK if self.end == "freeze" else 0)
        if f"rank {self.victim} " not in front.protocol.lost or self.summary.named_after > bound:
            raise Violation(f"unnamed: {self.victim} after {self.summary.named_after:.3f} s: {front.protocol.lost}")
        front.check_rest()


if __name__ == "__main__":
    seed, size, steps = map(int, sys.argv[1:])
    began = time.process_time()
    world = World(seed, size, steps)
    summary = world.run()
    took = time.process_time() - began
    print(summary)
    print(f"{took:.1f} s of processor time, {summary.steps * size / took:,.0f} rank steps/s")
