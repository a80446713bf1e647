# SPDX-License-Identifier: Apache-2.0
"""A toy engine around the protocol that serving runs: ranks with a scheduler and collectives, and clients' ledger.

What a real rank does in a step, it does here: hand the commands to its TP group, agree over its DP group, run a forward
over all ranks where any has tokens, tell what came of it. Nothing here knows of time or of an order of events: drivers
call it (``explore`` in every order, ``timed`` in random ones). What must never be raises ``Violation``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.v1.engine.messages import Abort, Add, Message, Outputs
from vllm.v1.engine.protocol import Commands, Effects, FrontProtocol, Place, RankProtocol
from vllm.v1.outputs import EngineCoreOutput


class Violation(Exception):
    """An invariant does not hold; the first word names it."""


class Call(NamedTuple):
    """What a rank waits in: a collective, equal on all ranks of ``group`` but for what each brings."""

    group: str
    name: str
    step: int
    sizes: tuple[int, ...]
    brings: Any = None


class Vote(NamedTuple):
    tokens: int
    unfinished: bool
    stopping: bool


class Agreement(NamedTuple):
    sizes: tuple[int, ...]  # rows by DP rank; empty where none has tokens
    any_unfinished: bool
    all_stopping: bool
    forward: Call | None = None  # that all are in next


IDLE = Vote(0, False, False)


def decide(votes: Sequence[Vote]) -> Agreement:
    """As ``dp_utils.agree`` does (a test compares them)."""
    tokens, unfinished, stopping = zip(*votes, strict=True)
    sizes = tuple([count or 1 for count in tokens]) if any(tokens) else ()
    return Agreement(sizes, any(unfinished), all(stopping))


class Job(NamedTuple):
    """A request of a client. ``hold``: steps before it can be scheduled; ``blocks``: of the KV pool, until its end."""

    client_id: str
    dp_rank: int | None = 0
    prompt: int = 2
    tokens: int = 1
    blocks: int = 1
    hold: int = 0

    def to_add(self, index: int) -> Add:
        params = {"index": index, "tokens": self.tokens, "blocks": self.blocks, "hold": self.hold}
        return Add(self.client_id, [7] * self.prompt, params)


class Scheduler:
    """First come, first served, within a budget of blocks. The k-th token of the i-th request is 1000 i + k."""

    def __init__(self, blocks: int, max_num_seqs: int = 4) -> None:
        self.blocks, self.max_num_seqs = blocks, max_num_seqs
        self.waiting: list[list[Any]] = []  # [wire id, params, prompt tokens, steps to hold]
        self.running: list[list[Any]] = []  # [wire id, params, prompt tokens, tokens made]
        self.free = blocks
        self.starved = False

    def add(self, request: Add) -> str | None:
        params = request.params
        if any(job[0] == request.request_id for job in self.waiting + self.running):
            raise Violation(f"twice: {request.request_id} was added while it runs")
        if params["blocks"] > self.blocks:
            return f"needs {params['blocks']} blocks of {self.blocks}"
        self.waiting.append([request.request_id, params, len(request.prompt_token_ids), params["hold"]])
        return None

    def abort(self, ids: Sequence[str]) -> None:
        self.waiting = [job for job in self.waiting if job[0] not in ids]
        for job in self.running:
            self.free += job[1]["blocks"] * (job[0] in ids)
        self.running = [job for job in self.running if job[0] not in ids]

    def schedule(self) -> int:
        """The number of tokens that the step runs."""
        if self.starved:
            return 0
        tokens = len(self.running)
        while self.waiting and len(self.running) < self.max_num_seqs:
            job = self.waiting[0]
            if job[3] > 0:
                job[3] -= 1
                break
            if job[1]["blocks"] > self.free:
                break
            self.free -= job[1]["blocks"]
            tokens += job[2]
            self.running.append([*job[:3], 0])
            self.waiting.pop(0)
        return tokens

    def update(self) -> list[EngineCoreOutput]:
        outputs, kept = [], []
        for job in self.running:
            name, params, _, made = job
            job[3] = made = made + 1
            ends = made == params["tokens"]
            outputs.append(
                EngineCoreOutput(name, [1000 * params["index"] + made - 1], finish_reason="length" if ends else None)
            )
            if ends:
                self.free += params["blocks"]
            else:
                kept.append(job)
        self.running = kept
        return outputs


@dataclass(frozen=True)
class Layout:
    """``tp`` ranks a DP group, ``dp`` groups; rank = dp rank x tp + tp rank. ``blocks``: of each group's KV pool."""

    tp: int
    dp: int
    blocks: int = 2
    max_num_seqs: int = 4

    @property
    def size(self) -> int:
        return self.tp * self.dp

    def places(self) -> dict[int, Place]:
        return {rank: Place(rank // self.tp, rank % self.tp == 0) for rank in range(self.size)}

    def members(self, group: str) -> range:
        if group == "world":
            return range(self.size)
        kind, index = group[:2], int(group[2:])
        return range(index * self.tp, (index + 1) * self.tp) if kind == "tp" else range(index, self.size, self.tp)


class Rank:
    """``empty``: steps in a row, without standing still between them, in which no rank had tokens."""

    protocol_class = RankProtocol

    def __init__(self, index: int, layout: Layout, max_empty: int = 1) -> None:
        self.index, self.max_empty = index, max_empty
        self.tp_group = f"tp{index // layout.tp}" if layout.tp > 1 else None
        self.dp_group = f"dp{index % layout.tp}"
        self.protocol = self.protocol_class(layout.size, index % layout.tp == 0)
        self.scheduler = Scheduler(layout.blocks, layout.max_num_seqs)
        self.call: Call | None = None
        self.dead = False
        self.commands = Commands()
        self.rejected: dict[str, str] = {}
        self.tokens = self.empty = self.said = 0
        self.agreement: Agreement | None = None
        self.dropped: set[str] = set()  # aborts that have come
        self.due_aborts: set[str] = set()  # those that had when the step began

    def receive(self, number: int, message: Message) -> None:
        self.protocol.receive(number, message)
        if type(message) is Abort:
            self.dropped.update(message.request_ids)

    @property
    def is_due(self) -> bool:
        return self.call is None and not self.dead and self.protocol.is_due

    def begin(self) -> list[Message]:
        step = self.protocol.step
        commands, tell = self.protocol.begin()
        if self.dropped:
            self.due_aborts |= self.dropped
            self.dropped.clear()
        if self.tp_group is not None:
            self.call = Call(self.tp_group, "commands", step, (), commands)
        else:
            tell += self.vote(commands)
        return tell

    def vote(self, commands: Commands) -> list[Message]:
        scheduler = self.scheduler
        self.commands = commands
        if commands.additions or commands.aborts:
            for request in commands.additions:
                if (reason := scheduler.add(request)) is not None:
                    self.rejected[request.request_id] = reason
            scheduler.abort(commands.aborts)
        if scheduler.waiting or scheduler.running:
            self.tokens = scheduler.schedule()
            if self.due_aborts and (late := self.due_aborts.intersection([job[0] for job in scheduler.running])):
                raise Violation(f"late: {sorted(late)} run on though their abort has come")
            vote = Vote(self.tokens, True, commands.stopping)
        else:
            self.tokens, vote = 0, Vote(0, False, True) if commands.stopping else IDLE
        self.call = Call(self.dp_group, "agree", self.protocol.step, (), vote)
        return []

    def resume(self, outcome: Any) -> list[Message]:
        """The collective is over, ``outcome`` came of it. Returns what to tell the front end."""
        call, self.call = self.call, None
        assert call is not None
        if call.name == "commands":
            return self.vote(outcome)
        if call.name == "agree":
            self.agreement = outcome
            if self.should_run(outcome):
                self.empty = 0
                self.call = outcome.forward
                return []
            self.empty += 1
            if self.empty > self.max_empty:
                raise Violation(f"empty: {self.empty} steps in a row had no work")
        return self.end()

    def should_run(self, agreement: Agreement) -> bool:
        return bool(agreement.sizes)

    def end(self) -> list[Message]:
        agreement, protocol, tell = self.agreement, self.protocol, []
        assert agreement is not None
        if self.tokens or self.rejected:
            outputs = self.scheduler.update() if self.tokens else []
            if protocol.is_leader:
                tell.append(Outputs(protocol.step, outputs, self.rejected))
            self.rejected = {}
        tell += protocol.agreed(agreement.any_unfinished, agreement.all_stopping)
        if not protocol.running:
            self.empty = 0
            self.due_aborts.clear()
        return tell

    def check_rest(self) -> None:
        """To be called where nothing more happens."""
        scheduler = self.scheduler
        if scheduler.waiting or scheduler.running or scheduler.free != scheduler.blocks:
            raise Violation(f"leak: rank {self.index} keeps {scheduler.waiting + scheduler.running} at rest")
        if self.protocol._additions or self.protocol._aborts:
            raise Violation(f"leak: rank {self.index} keeps {self.protocol._additions, self.protocol._aborts} at rest")


def complete(calls: Sequence[Call]) -> Any:
    """What comes of a collective that all ranks of its group are in."""
    first = calls[0]
    for call in calls:
        if call is not first and call[:4] != first[:4]:
            raise Violation(f"diverged: ranks of one group are in {first[1:4]} and {call[1:4]}")
    if first.name == "commands":
        return first.brings
    if first.name == "agree":
        agreement = decide([call[4] for call in calls])
        return agreement._replace(forward=Call("world", "forward", first.step, agreement.sizes))
    return None


@dataclass
class Entry:
    """What a client has seen of a request. ``end``: done, aborted, rejected, or why it was lost."""

    job: Job
    tokens: int = 0
    end: str | None = None


@dataclass
class Front:
    """The front end with its clients. ``ledger``: all requests, or of a long run those that are unfinished."""

    protocol: FrontProtocol
    sent: dict[int, int] = field(default_factory=dict)
    ledger: dict[int, Entry] = field(default_factory=dict)
    in_use: dict[str, int] = field(default_factory=dict)
    forgets: bool = False

    def take(self, effects: Effects) -> list[tuple[int, int, Message]]:
        """Check what clients see; returns (rank, number, message) to send."""
        for output in effects.outputs:
            index = self.in_use[output.request_id]
            entry = self.ledger[index]
            if entry.end is not None:
                raise Violation(f"twice: {entry} gets {output.new_token_ids} after its end")
            if output.new_token_ids != [1000 * index + entry.tokens]:
                raise Violation(f"twice: {entry}, request {index}, gets {output.new_token_ids}")
            entry.tokens += 1
            if output.finished:
                if entry.tokens != entry.job.tokens:
                    raise Violation(f"lost: {entry} ended early")
                self._end(index, "done")
        for client_id, (why, own) in effects.failed.items():
            index = self.in_use[client_id]
            if self.ledger[index].end is not None:
                raise Violation(f"twice: {self.ledger[index]} fails after its end: {why}")
            self._end(index, "rejected" if own else why)
        sends = []
        for rank, message in effects.sends:
            number = self.sent[rank] = self.sent.get(rank, 0) + 1
            sends.append((rank, number, message))
        return sends

    def _end(self, index: int, how: str) -> None:
        entry = self.ledger[index]
        entry.end, entry.tokens = how, 0  # what came before the end is of no account any more
        if self.forgets:
            del self.in_use[self.ledger.pop(index).job.client_id]

    def add(self, index: int, job: Job) -> list[tuple[int, int, Message]]:
        effects = self.protocol.add(job.to_add(index), job.dp_rank)
        self.ledger[index], self.in_use[job.client_id] = Entry(job), index
        return self.take(effects)

    def abort(self, index: int) -> list[tuple[int, int, Message]]:
        client_id = self.ledger[index].job.client_id
        self._end(index, "aborted")
        return self.take(self.protocol.abort([client_id]))

    def receive(self, rank: int, number: int, message: Message, now: float = 0.0) -> list[tuple[int, int, Message]]:
        before = self.protocol.lost
        effects = self.protocol.receive(rank, number, message, now)
        if before is not None and effects != Effects():
            raise Violation(f"after the end: {effects}")
        return self.take(effects)

    def check_rest(self) -> None:
        for entry in self.ledger.values():
            if entry.end is None:
                raise Violation(f"lost: {entry} has no end")
        if self.protocol.requests or any(map(any, self.protocol._loads)):
            raise Violation(f"leak: the front end keeps {self.protocol.requests}, loads {self.protocol._loads}")


def check_rest(front: Front, ranks: Sequence[Rank]) -> None:
    """Nothing more happens without a client's doing: all is answered, and all ranks stand alike or have left."""
    if front.protocol.lost is None:
        stuck = {rank.index: rank.call[1:3] for rank in ranks if rank.call is not None}
        if stuck:
            raise Violation(f"waits for ever: rank: collective {stuck}; lost is none")
        if len({rank.protocol.step for rank in ranks}) > 1 or any(r.dead and not r.protocol.left for r in ranks):
            raise Violation(f"apart: ranks stand before steps {[rank.protocol.step for rank in ranks]}")
        ends = {rank.protocol.left for rank in ranks} | {front.protocol.has_ended, front.protocol.stopping}
        if len(ends) > 1:
            raise Violation(f"end: left {[rank.protocol.left for rank in ranks]}, stopping {front.protocol.stopping}")
        for rank in ranks:
            rank.check_rest()
    front.check_rest()
