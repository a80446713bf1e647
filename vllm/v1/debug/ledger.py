# SPDX-License-Identifier: Apache-2.0
"""Every collective of this rank, in a ring: in memory, and as JSON lines where a folder is given.

Each line has its own fixed place in the file and is written when the collective begins, its end when it ends. So the
file is complete at every moment, whatever ends the process, SIGKILL included, and no handler has to run. Line 0 tells
of the rank itself; a line that the ring overwrites is gone.

A device's collective is *queued* when its call returns, and has *ended* when the device says so, which is asked for
before each collective and by the watchdog: ``end`` is then the time of the answer.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm import forward_context
from vllm.distributed.observer import VARIABLE, CollectiveRecord

CAPACITY = 4096
_END_WIDTH = 18  # of seconds since the epoch with six decimals, and one more digit
# The collectives by which the expert layers send and fetch tokens, as their traces are known.
_PHASES = {"all_gatherv": "dispatch", "reduce_scatterv": "combine"}


@functools.lru_cache(CAPACITY)
def _repeated_text(values: tuple[Any, ...]) -> bytes:
    """JSON of the fields that are the same in every step of decode; making it anew costs more than all the rest."""
    return json.dumps(dict(zip(CollectiveRecord._fields[2:], values, strict=True)))[1:].encode()


def describe(record: CollectiveRecord | Mapping[str, Any]) -> str:
    fields = record if isinstance(record, Mapping) else record._asdict()
    where = f"step {fields['step']}, layer {fields['layer'] or 'none'}"
    return f"{fields['op']} #{fields['seq']} of {fields['group']} ({where})"


def name_ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def clock(seconds: float) -> str:
    """Seconds since the epoch → local ``HH:MM:SS.mmm``."""
    return time.strftime("%H:%M:%S", time.localtime(seconds)) + f".{int(seconds * 1000) % 1000:03d}"


def agreed_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal on all ranks of a group at one sequence number.

    In a ragged gather each rank's rows are its own: there the remaining extents must agree, in any order, since the
    record does not say which dimension is gathered.
    """
    shapes, sizes = [list(shape) for shape in fields["shapes"]], fields["sizes"]
    if fields["path"] == VARIABLE and fields["op"] == "all_gatherv":
        own = sizes[list(fields["ranks"]).index(fields["rank"])]
        for shape in shapes:
            shape.remove(own)
            shape.sort()
    agreed = {name: fields[name] for name in ("op", "path", "dtypes", "step", "layer")}
    return {**agreed, "sizes": sizes, "shapes": shapes}


def disagreements(fields_of: Mapping[int, Mapping[str, Any]]) -> str:
    """Who differs and how, over the agreed fields by rank; empty where all agree."""
    parts: list[str] = []
    odd: set[int] = set()
    for name in next(iter(fields_of.values())):
        ranks_of: dict[str, list[int]] = {}
        for rank, fields in fields_of.items():
            ranks_of.setdefault(json.dumps(fields[name]), []).append(rank)
        if len(ranks_of) > 1:
            *few, many = sorted(ranks_of.values(), key=len)
            odd.update(rank for ranks in few for rank in ranks if len(many) > len(few[-1]))
            parts.append(f"{name}: " + ", ".join(f"{value} on {name_ranks(r)}" for value, r in ranks_of.items()))
    return "; ".join(parts) + (f" ({name_ranks(sorted(odd))} against the majority)" if odd else "")


@dataclass(slots=True)
class Entry:
    """One collective; times in seconds since the epoch. ``end`` is None while it runs, ``queued`` where the host waits
    for its end; where not, ``event`` tells of it."""

    number: int
    record: CollectiveRecord
    start: float
    end: float | None = None
    queued: float | None = None
    event: Any = None
    error: str = ""
    end_at: int = 0
    thread: int = field(default_factory=threading.get_ident)


class Ledger:
    """The ring of one rank. ``events`` grows whenever a collective begins or ends; ``state`` tells how the rank is.

    Args:
        world_size: of all ranks that were launched.
        run: names the run, the same on all ranks of a replica; of several runs in a folder the newest counts.
        folder: where ``rank-N.jsonl`` is written; None keeps the ring in memory.
        prints: whether each collective prints ``[TRACE]`` and ``[COUNTER]`` lines.
        replica: the ranks that keep step with this one; None means all.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        run: str,
        folder: str | None = None,
        prints: bool = False,
        replica: Sequence[int] | None = None,
    ) -> None:
        self.rank, self.prints, self.events, self.state = rank, prints, 0, "running"
        self.entries: deque[Entry] = deque(maxlen=CAPACITY)
        self._queued: deque[Entry] = deque()
        self._open: dict[int, Entry] = {}
        self._lock = threading.RLock()
        self._begun, self._line, self._widest = 0, 2048 + 16 * world_size, 0
        self._file = None if folder is None else self._make_file(Path(folder))
        ranks = list(range(world_size) if replica is None else replica)
        self._about = {"rank": rank, "world_size": world_size, "replica": ranks, "run": run, "pid": os.getpid()}
        self.show_life()

    def _make_file(self, folder: Path) -> mmap.mmap:
        """The whole ring as blank lines. Mapped, since a write call for each collective costs several times a store; a
        full disk is an error here and not a signal later, and another run's file of this name keeps its memory."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank-{self.rank}.jsonl"
        path.unlink(missing_ok=True)
        with path.open("x+b") as file:
            file.write(f"{'':{self._line - 1}}\n".encode() * (1 + CAPACITY))
            file.flush()
            return mmap.mmap(file.fileno(), 0)

    def show_life(self) -> None:
        """Write the rank's own line: its state, and that it is alive now."""
        about = {**self._about, "host": socket.gethostname(), "state": self.state[:300], "alive": time.time()}
        self._write(0, json.dumps(about).encode().ljust(self._line - 1))

    @property
    def oldest(self) -> Entry | None:
        """The first collective that has not ended: the others of this rank wait for it. Where a thread stands for the
        device it waits in one or computes, whatever the host does meanwhile."""
        with self._lock:
            waiting = [*self._queued, *self._open.values()]
        device = forward_context.device_place
        return next((entry for entry in waiting if device is None or device.thread == entry.thread), None)

    @property
    def current(self) -> CollectiveRecord | None:
        """The collective that this rank is in."""
        oldest = self.oldest
        return None if oldest is None else oldest.record

    def close(self) -> None:
        self.show_life()
        if self._file is not None:
            self._file.close()
            self._file = None

    def begin(self, record: CollectiveRecord) -> Entry:
        if self._queued:
            self.poll()
        with self._lock:
            entry = Entry(self._begun, record, time.time())
            self._begun += 1
            self.events += 1
            self.entries.append(entry)
            self._open[entry.number] = entry
            self._write_entry(entry)
        if self.prints:
            print(f"{self._trace(record, 'ENTER')}\n{self._counter(record)}=1", flush=True)
        return entry

    def queue(self, entry: Entry, event: Any) -> None:
        """The call has returned, and ``event`` will come when the device has done the collective."""
        entry.queued, entry.event = time.time(), event
        with self._lock:
            self.events += 1
            self._write_entry(entry)
            self._open.pop(entry.number, None)
            self._queued.append(entry)
        if self.prints:
            print(self._trace(entry.record, "QUEUED"), flush=True)

    def poll(self) -> bool:
        """End what the device has done by now, and say whether that is all; from any thread."""
        with self._lock:
            while self._queued:
                entry, error = self._queued[0], None
                try:
                    if not entry.event.query():
                        return False
                except RuntimeError as failed:  # of the device, which the host learns when it next waits
                    error = failed
                self.end(entry, error)
                self._queued.popleft()
            return True

    def end(self, entry: Entry, error: BaseException | None = None) -> None:
        with self._lock:
            entry.end = time.time()
            self.events += 1
            self._open.pop(entry.number, None)
            if error is not None:
                entry.error = f"{type(error).__name__}: {error}"
                self._write_entry(entry)
            elif self._file is not None and self._begun - entry.number <= CAPACITY:
                self._file[entry.end_at : entry.end_at + _END_WIDTH] = b"%-*.6f" % (_END_WIDTH, entry.end)
        if self.prints and error is None:
            print(f"{self._counter(entry.record)}=0\n{self._trace(entry.record, 'EXIT')}", flush=True)

    def tail(self, count: int) -> str:
        """The last ``count`` collectives as lines of text."""
        lines = []
        for e in list(self.entries)[-count:]:
            took = "NOT FINISHED" if e.end is None else f"{1000 * (e.end - e.start):.3f} ms"
            took = took if e.queued is None else f"queued after {1000 * (e.queued - e.start):.3f} ms, {took}"
            r = e.record
            lines.append(
                f"[LEDGER] rank={self.rank} n={e.number} {clock(e.start)} {describe(r)} {r.path} "
                f"sizes={r.sizes} shapes={r.shapes} dtypes={r.dtypes}: {took} {e.error}\n"
            )
        return "".join(lines) or f"[LEDGER] rank={self.rank} no collective yet\n"

    def _write_entry(self, entry: Entry) -> None:
        if self._file is not None:
            r, error = entry.record, json.dumps(entry.error[:200]).encode() if entry.error else b'""'
            queued = b"" if entry.queued is None else b'"queued": %.6f, ' % entry.queued
            begin = b'{"n": %d, "step": %d, "seq": %d, "start": %.6f, %b"error": %b, "end": ' % (
                entry.number, r.step, r.seq, entry.start, queued, error
            )  # fmt: skip
            end = b"null" if entry.end is None else b"%.6f" % entry.end
            slot = 1 + entry.number % CAPACITY
            entry.end_at = slot * self._line + len(begin)
            line = b"%b%b, %b" % (begin, end.ljust(_END_WIDTH), _repeated_text(r.repeated))
            line = line.ljust(self._widest)  # covers whatever the slot held
            self._widest = len(line)
            self._write(slot, line)

    def _write(self, slot: int, text: bytes) -> None:
        if self._file is not None:
            assert len(text) < self._line, f"a ledger line of {len(text)} bytes, {self._line} are kept: {text.decode()}"
            at = slot * self._line
            self._file[at : at + len(text)] = text

    def _trace(self, r: CollectiveRecord, what: str) -> str:
        phase = _PHASES.get(r.op, r.group.partition(":")[0])
        sizes = "" if r.sizes is None else f"sizes={list(r.sizes)}, "
        shapes = str([list(shape) for shape in r.shapes])
        shown = f"hidden_states_shape={shapes[1:-1]}" if phase == "combine" else f"tensor_shapes={shapes}"
        where = f"group={r.group}, step={r.step}, layer={r.layer or 'none'}"
        return f"[TRACE] rank={self.rank} {phase} {what} {r.op}: {sizes}{shown}, {where}"

    def _counter(self, r: CollectiveRecord) -> str:
        return f"[COUNTER] rank={self.rank} seq={r.seq} {r.op}/{r.path} counter"
