# SPDX-License-Identifier: Apache-2.0
"""What watches a running engine: one observer of all collectives, and a thread that notices when nothing moves.

``VLLM_STALL_TIMEOUT_S`` keeps the watchdog, ``VLLM_TRACE_COLLECTIVES`` prints the collectives or writes the ledger,
``VLLM_CHECK_COLLECTIVES`` adds the consensus check. With all three off there is no observer, and a rank learns of a
dead peer from its backend only.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from vllm import envs, forward_context
from vllm.distributed import observer
from vllm.distributed.observer import CollectiveObserver, CollectiveRecord
from vllm.distributed.parallel_state import GroupCoordinator, call_on_leaving, get_launched_world_size
from vllm.logger import init_logger
from vllm.v1.debug.consensus import Board, ConsensusGuard
from vllm.v1.debug.ledger import Entry, Ledger, describe, name_ranks
from vllm.v1.debug.termination import TerminationNotice

logger = init_logger(__name__)

_POLL_S = 0.25
# A rank that has been idle for so many polls looks less often.
_IDLE_POLLS, _IDLE_POLL_S = 20, 1.0
# A rank that fails stays this long, so that the others print before the launcher ends them.
_GRACE_S = 6 * _POLL_S
# After a failure elsewhere a rank's host leaves a collective within half a second; this is for what it cannot leave.
_LET_GO_S = 4.0
_CAUSE_S = 1.0
_CIRCLE_S = 3.0
_SILENT_S = 2.0
_TELL_AFTER_S, _TELL_AGAIN_S = 10.0, 60.0
_SHOWN = 20


@dataclass(eq=False)
class Diagnosis:
    """The observer of one rank; ``inner``, the one that was installed before, still sees everything.

    Its thread tells the others what this rank does, on the board, and reads what they do. A rank that fails says so
    there; then each prints its last collectives and all stacks, once, and leaves the step: with an exception where its
    host waits for a peer, else its process ends. ``peers``: rank → :func:`identify` of the others.
    """

    ledger: Ledger
    guard: ConsensusGuard | None = None
    board: Board | None = None
    inner: CollectiveObserver | None = None
    stall_timeout_s: float = 0.0
    peers: Mapping[int, tuple[str, int, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._step_runs = self._reported = False
        self._failed_at: float | None = None
        self._host = forward_context.get_place()  # of the thread that steps
        self.waits_for: list[int] = []
        self._alarm, self._still, self._heard = "", 0, dict[int, tuple[Any, int]]()
        here = identify()[0]
        self._processes = {rank: one[1:] for rank, one in self.peers.items() if here and one[0] == here}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="vllm-watchdog", daemon=True)

    def start(self) -> None:
        observer.set_collective_observer(self)
        self._on_board(Board.show_life, self._place())
        self._termination = TerminationNotice()
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._termination.wake()
        self._thread.join()
        self._termination.close()
        until = time.monotonic() + (_LET_GO_S if self._failed_at is None else 0)
        while not self.ledger.poll() and time.monotonic() < until:
            time.sleep(_POLL_S / 100)  # nobody waits for the last dummy step
        self._on_board(Board.show_life, {**self._place(), "doing": "shut down its engine", "left": True})
        if observer.get_collective_observer() is self:
            observer.set_collective_observer(self.inner)
        if self._failed_at is None:
            self.ledger.state = "ended"
        self.ledger.close()

    def before(self, record: CollectiveRecord) -> tuple[Entry, Any]:
        entry = self.ledger.begin(record)
        try:
            if self.guard is not None:
                self.guard.check(record)
            return entry, None if self.inner is None else self.inner.before(record)
        except Exception as error:
            self.ledger.end(entry, error)
            self.fail(str(error))
            raise

    def after(self, token: tuple[Entry, Any], error: BaseException | None = None) -> None:
        entry, inner_token = token
        if error is not None:
            self._find_cause(entry.record)
        self.ledger.end(entry, error)
        if self.inner is not None:
            self.inner.after(inner_token, error)
        if error is not None:
            self.fail(f"{describe(entry.record)} failed: {observer.lost() or error}")
        elif self.guard is not None:
            self.guard.done(entry.record)

    def queued(self, token: tuple[Entry, Any], event: Any) -> None:
        entry, inner_token = token
        self.ledger.queue(entry, event)
        if self.inner is not None:
            self.inner.queued(inner_token, event)
        if self.guard is not None:
            self.guard.done(entry.record, "queued")

    @property
    def _in_step(self) -> bool:
        """Whether a step goes on, here or on the thread that stands for the device."""
        return self._step_runs or forward_context.device_place is not None

    def running(self, dp_rank: int, step: int) -> AbstractContextManager[None]:
        """Around one step: only inside can anything stall."""
        return _Running(self, dp_rank, step)

    def step_runs(self, runs: bool) -> None:
        if runs:
            self._host = forward_context.get_place()
        self._step_runs = runs

    def fail_in_step(self, error: BaseException, grace_s: float = _GRACE_S) -> None:
        """``error`` ends the step that the calling thread is in."""
        place = forward_context.get_place()
        self.fail(f"step {place.step} failed, layer {place.layer or 'none'}: {error!r}", grace_s=grace_s)

    def fail(self, reason: str, how: str = "failed", grace_s: float = _GRACE_S) -> None:
        """This rank cannot go on: say so in the ledger and to the others, once; they get time to print."""
        if self._failed_at is None:
            self._failed_at, self.ledger.state = time.monotonic(), f"{how}: {reason}"
            self.ledger.show_life()
            if self.board is not None:
                # A launcher that sees another rank die ends this one before its exception is shown.
                os.write(2, f"[FAIL] rank={self.ledger.rank} {how}: {reason}\n".encode())
                self._on_board(Board.raise_alarm, reason)
        if self.board is not None:
            time.sleep(max(self._failed_at + grace_s - time.monotonic(), 0))

    def _on_board(self, call: Callable[..., Any], *args: Any) -> Any:
        """The board goes with the process that serves it (the launcher, or rank 0); then there is nobody to tell."""
        try:
            return None if self.board is None else call(self.board, *args)
        except dist.DistError:
            self.board = None
            return None

    def _place(self) -> dict[str, Any]:
        """What this rank does now, as the others read it."""
        device, oldest = forward_context.device_place, self.ledger.oldest
        record = None if oldest is None else oldest.record
        doing = "is between two steps" if self._host.step >= 0 else "is at work outside the steps"
        if oldest is not None:
            doing = f"{'waits' if oldest.queued is None else 'has its device wait'} in {describe(oldest.record)}"
        elif self._step_runs or device is not None:
            doing = f"computes in {device or self._host}"
        waits = None if record is None else (record.group, record.seq, record.ranks)
        return {"doing": doing, "waits": waits, "moves": self.ledger.events, "entered": observer.entered()}

    def _watch(self) -> None:
        # Time is counted in polls: a process that was suspended has not stalled.
        waits = overdue = idle = 0
        seen, waited_in = None, None
        tell_at = _TELL_AFTER_S
        while True:
            ended = self._termination.wait(self._stop, _POLL_S if idle < _IDLE_POLLS else _IDLE_POLL_S)
            if self._stop.is_set():
                return
            if ended:
                if self._in_step or self.ledger.current is not None:
                    self.fail(f"SIGTERM came while it {self._place()['doing']}", "ended", 0.0)
                self._termination.die()
            self.ledger.show_life()
            self.ledger.poll()
            place, record = self._place(), self.ledger.current
            self._on_board(Board.show_life, place)
            waits = waits + 1 if record is not None and record is waited_in else 0
            waited_in = record
            places = self._read_others() if waits > 1 else {}
            self.waits_for = [] if record is None else self._missing((record.group, record.seq, record.ranks), places)
            busy = self._in_step or record is not None
            idle = 0 if busy else idle + 1
            self._alarm = self._alarm or self._on_board(Board.read, "alarm") or ""
            if busy and not self._alarm and (dead := self._who_is_gone(places, record)):
                self._alarm_all(dead)
            if self._alarm:
                if busy:
                    self._report(self._alarm)
                observer.give_up(self._alarm)
                overdue = overdue + 1 if busy else 0
                if overdue * _POLL_S >= _LET_GO_S:
                    self._end(f"{place['doing']} {_LET_GO_S:g} s after {self._alarm}", "ended", 0.0)
            now = (place["doing"], place["moves"], {rank: (of["doing"], of["moves"]) for rank, of in places.items()})
            self._still = self._still + 1 if busy and now == seen else 0
            seen = now
            tell_at = tell_at if waits else _TELL_AFTER_S
            if waits * _POLL_S >= tell_at and (told := self._whom_for(record, places)):
                seconds = waits * _POLL_S
                logger.warning("rank %d has waited for %.0f s %s", self.ledger.rank, seconds, told)
                tell_at += _TELL_AGAIN_S
            # Who stands still outside a collective is nearer to the cause, so it speaks first.
            patience = self.stall_timeout_s + (_GRACE_S if record is not None and self.peers else 0)
            if not self._in_step:
                patience = max(patience, envs.VLLM_LOAD_TIMEOUT_S)
            if self._alarm:
                continue
            if self._still * _POLL_S >= _CIRCLE_S and (circle := self._circle(places)):
                self._alarm_all(circle)
            elif self.stall_timeout_s > 0 and patience <= self._still * _POLL_S:
                reason = self._stall(record, places)
                if record is None:
                    self._report(reason)
                    self._end(reason, "stalled")
                self._alarm_all(reason)

    def _read_others(self) -> dict[int, dict[str, Any]]:
        """What the other ranks do, each with the seconds that it has been ``silent`` for, seen from here."""
        places = self._on_board(Board.places, list(self.peers)) or {}
        for rank, place in places.items():
            told, polls = self._heard.get(rank, (None, 0))
            self._heard[rank] = (place["time"], polls + 1 if told == place["time"] else 0)
            place["silent"] = self._heard[rank][1] * _POLL_S
        return places

    @staticmethod
    def _missing(waits: tuple[str, int, Sequence[int]], places: Mapping[int, dict[str, Any]]) -> list[int]:
        """Who of ``places`` has not entered the collective: group, number in it, ranks."""
        group, seq, ranks = waits
        return [rank for rank in ranks if rank in places and places[rank]["entered"].get(group, 0) <= seq]

    def _circle(self, places: Mapping[int, dict[str, Any]]) -> str:
        """Ranks that wait for each other, this one among them: nobody will ever move. Empty where there are none."""
        me, told = self.ledger.rank, {**places, self.ledger.rank: self._place()}
        waited_by, queue = dict[int, int](), [me]
        for rank in queue:
            for other in self._missing(told[rank]["waits"], told) if told[rank]["waits"] else ():
                if other == me:
                    path = [me, rank]
                    while path[-1] != me:
                        path.append(waited_by[path[-1]])
                    steps = [f"rank {b} {told[b]['doing']} for rank {a}" for a, b in itertools.pairwise(path)]
                    return f"ranks wait for each other: {'; '.join(reversed(steps))}"
                if other not in waited_by:
                    waited_by[other] = rank
                    queue.append(other)
        return ""

    def _whom_for(self, record: CollectiveRecord | None, places: Mapping[int, dict[str, Any]]) -> str:
        """In what this rank waits for whom, and what they do; empty where it waits for nobody."""
        if record is None or not (missing := self._missing((record.group, record.seq, record.ranks), places)):
            return ""
        parts = []
        for rank in missing:
            doing, silent = places[rank]["doing"], places[rank]["silent"]
            if silent > _SILENT_S:
                doing = f"has been silent for {silent:.0f} s (stopped, or cut off; the last it told: {doing})"
            parts.append(f"rank {rank} {doing}")
        return f"inside {describe(record)} for {name_ranks(missing)}: {', '.join(parts)}"

    def _who_is_gone(self, places: Mapping[int, dict[str, Any]], record: CollectiveRecord | None) -> str:
        """The first rank that will never come: its process is gone, or it has left while this rank waits for it."""
        missing = [] if record is None else self._missing((record.group, record.seq, record.ranks), places)
        for rank in missing:
            if places[rank].get("left"):
                return f"rank {rank} has left the run: it {places[rank]['doing']}"
        for rank, (pid, started) in self._processes.items():
            if _start_of(pid) != started:
                place = (self._on_board(Board.places, [rank]) or {}).get(rank, {})
                if not place.get("left"):
                    return f"rank {rank} is gone: its process {pid} has ended"
        return ""

    def _find_cause(self, record: CollectiveRecord) -> None:
        """It broke: a peer is dying, or failed and is closing its connections. Wait a moment to learn who."""
        until = time.monotonic() + _CAUSE_S
        while self.peers and not observer.lost():
            places = self._on_board(Board.places, list(self.peers)) or {}
            if cause := self._on_board(Board.read, "alarm") or self._who_is_gone(places, record):
                observer.give_up(cause)
            if time.monotonic() > until:  # asked once at least, however late this thread runs
                return
            time.sleep(_POLL_S / 5)

    def _alarm_all(self, reason: str) -> None:
        self._on_board(Board.raise_alarm, reason)
        self._alarm = reason

    def _stall(self, record: CollectiveRecord | None, places: Mapping[int, dict[str, Any]]) -> str:
        place = "outside any collective"
        if record is not None:
            place = self._whom_for(record, places) or f"inside {describe(record)}"
        where = forward_context.device_place or self._host
        return f"no progress for VLLM_STALL_TIMEOUT_S={self.stall_timeout_s:g} s in {where}, {place}"

    def _end(self, reason: str, how: str, grace_s: float = _GRACE_S) -> None:
        self.fail(reason, how, grace_s)
        os._exit(1)

    def _report(self, reason: str) -> None:
        if not self._reported:
            self._reported = True
            text = (
                f"[STALL] rank={self.ledger.rank} {reason}\n{self.ledger.tail(_SHOWN)}[STALL] stacks of all threads:\n"
            )
            os.write(2, text.encode())
            faulthandler.dump_traceback(2, all_threads=True)


def identify() -> tuple[str, int, str]:
    """This process: what other processes must share to see it (empty: none can), its id, and when it started."""
    try:
        seen_from = f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        seen_from = ""
    return seen_from, os.getpid(), _start_of(os.getpid())


def _start_of(pid: int) -> str:
    """When the process started, in the kernel's ticks; empty where it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]


class _Running:
    """A step while it is entered."""

    def __init__(self, diagnosis: Diagnosis, dp_rank: int, step: int) -> None:
        self._diagnosis, self._dp_rank, self._step = diagnosis, dp_rank, step

    def _print(self, what: str) -> None:
        if (ledger := self._diagnosis.ledger).prints:
            print(f"[TRACE] rank={ledger.rank} execute_model {what} dp={self._dp_rank} iter={self._step}", flush=True)

    def __enter__(self) -> None:
        self._print("ENTER")
        self._diagnosis.step_runs(True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            if error is not None:
                self._diagnosis.fail_in_step(error)
        finally:
            self._diagnosis.step_runs(False)
        if error is None:
            self._print("EXIT")


_installed: Diagnosis | None = None


def install(world: GroupCoordinator) -> None:
    """Watch this rank for as long as the groups exist; every rank calls it."""
    global _installed
    uninstall()
    trace, checks, stall = envs.VLLM_TRACE_COLLECTIVES, envs.VLLM_CHECK_COLLECTIVES, envs.VLLM_STALL_TIMEOUT_S
    everyones = world.all_gather_object((f"{time.time():.6f}", identify()))
    run = everyones[0][0]
    prints, folder = trace == "1", None if trace in ("", "0", "1") else trace
    if not (prints or folder or checks or stall > 0):
        return
    rank, several = world.rank, world.world_size > 1
    _installed = Diagnosis(
        Ledger(rank, get_launched_world_size(), run, folder, prints, world.ranks),
        ConsensusGuard(Board(run, rank)) if checks and several else None,
        Board(run, rank) if several else None,
        observer.get_collective_observer(),
        stall,
        {peer: identity for peer, (_, identity) in zip(world.ranks, everyones, strict=True) if peer != rank},
    )
    _installed.start()
    call_on_leaving(uninstall)


def uninstall() -> None:
    global _installed
    if _installed is not None:
        _installed.stop()
        _installed = None


def waits_for() -> list[int]:
    """The ranks that this one has waited for in a collective for half a second or more."""
    return [] if _installed is None else _installed.waits_for


def fail_in_step(error: BaseException) -> None:
    """What the calling thread does for a step fails: the other ranks hear of it before anybody here waits for that."""
    if _installed is not None:
        _installed.fail_in_step(error, grace_s=0)


@contextmanager
def telling(what: str) -> Iterator[None]:
    """Where ``what``, which all ranks do together, fails on this one, the others hear of it."""
    try:
        yield
    except BaseException as error:
        if _installed is not None:
            _installed.fail(f"{what} failed: {error!r}")
        raise


def running(dp_rank: int, step: int) -> AbstractContextManager[None]:
    """Around one step of this rank; names it for all diagnostics."""
    forward_context.set_current_step(step)
    return nullcontext() if _installed is None else _installed.running(dp_rank, step)
