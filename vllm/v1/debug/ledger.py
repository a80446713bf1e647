# SPDX-License-Identifier: Apache-2.0
"""Every collective of this rank, in a ring: in memory, and as JSON lines where a folder is given.

Each line has its own fixed place in the file and is written when the collective begins, its end when it ends. So the
file is complete at every moment, whatever ends the process, SIGKILL included, and no handler has to run. Line 0 tells
of the rank itself; a line that the ring overwrites is gone.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.distributed.observer import VARIABLE, CollectiveRecord

CAPACITY = 4096
_END_WIDTH = 18
# The collectives by which the expert layers send and fetch tokens, as their traces are known.
_PHASES = {"all_gatherv": "dispatch", "reduce_scatterv": "combine"}


def agreed_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal on all ranks of a group at one sequence number, from a record's fields.

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
    parts = []
    odd: set[int] = set()
    for name in next(iter(fields_of.values())):
        ranks_of: dict[str, list[int]] = {}
        for rank, fields in fields_of.items():
            ranks_of.setdefault(json.dumps(fields[name]), []).append(rank)
        if len(ranks_of) > 1:
            by_number = sorted(ranks_of.values(), key=len)
            if len(by_number[-1]) > len(by_number[-2]):
                odd.update(rank for ranks in by_number[:-1] for rank in ranks)
            parts.append(f"{name}: " + ", ".join(f"{value} on {name_ranks(r)}" for value, r in ranks_of.items()))
    return "; ".join(parts) + (f" ({name_ranks(sorted(odd))} against the majority)" if odd else "")


def name_ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def record_fields(r: CollectiveRecord) -> dict[str, Any]:
    """JSON's view of a record, for the ledger's lines."""
    return {
        "rank": r.rank,
        "step": r.step,
        "layer": r.layer,
        "op": r.op,
        "group": r.group,
        "seq": r.seq,
        "ranks": r.ranks,
        "path": r.path,
        "sizes": r.sizes,
        "shapes": r.shapes,
        "dtypes": r.dtypes,
        "bytes": r.num_bytes,
    }


def describe(fields: Mapping[str, Any]) -> str:
    where = f"step {fields['step']}, layer {fields['layer'] or 'none'}"
    return f"{fields['op']} #{fields['seq']} of {fields['group']} ({where})"


@dataclass(slots=True)
class Entry:
    """One collective. ``start``, ``end``: seconds since the epoch; ``end`` is None while it runs."""

    number: int
    record: CollectiveRecord
    start: float
    end: float | None = None
    error: str = ""
    end_at: int = 0


class Ledger:
    """The ring of one rank.

    Args:
        run: names the run, the same on all ranks; a folder may hold ledgers of several runs the newest of which counts.
        folder: where ``rank-N.jsonl`` is written; None keeps the ring in memory.
        prints: whether each collective prints ``[TRACE]`` and ``[COUNTER]`` lines.

    ``events`` grows whenever a collective begins or ends.
    """

    def __init__(self, rank: int, world_size: int, run: str, folder: str | None = None, prints: bool = False) -> None:
        self.rank, self.prints, self.events = rank, prints, 0
        self.entries: deque[Entry] = deque(maxlen=CAPACITY)
        self._begun = 0
        self._about = {"rank": rank, "world_size": world_size, "run": run, "pid": os.getpid()}
        self._line = 1536 + 16 * world_size
        self._file: int | None = None
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            path = Path(folder) / f"rank-{rank}.jsonl"
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self.state = "running"
        self.show_life()

    def show_life(self) -> None:
        """Write the rank's own line: its state, and that it is alive now."""
        if self._file is not None:
            about = {**self._about, "host": socket.gethostname(), "state": self.state[:500], "alive": time.time()}
            self._write(0, json.dumps(about))

    def close(self, state: str) -> None:
        self.state = state
        self.show_life()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def begin(self, record: CollectiveRecord) -> Entry:
        entry = Entry(self._begun, record, time.time())
        self._begun += 1
        self.events += 1
        self.entries.append(entry)
        if self._file is not None:
            self._write_entry(entry)
        if self.prints:
            self._print(record, "ENTER")
            print(f"{self._counter(record)}=1", flush=True)
        return entry

    def end(self, entry: Entry, error: BaseException | None = None) -> None:
        entry.end = time.time()
        self.events += 1
        if error is not None:
            entry.error = f"{type(error).__name__}: {error}"
        if self._file is not None:
            if entry.error:
                self._write_entry(entry)
            else:
                os.pwrite(self._file, f"{entry.end:<{_END_WIDTH}.6f}".encode(), entry.end_at)
        if self.prints and not entry.error:
            print(f"{self._counter(entry.record)}=0", flush=True)
            self._print(entry.record, "EXIT")

    def tail(self, count: int) -> str:
        """The last ``count`` collectives as lines of text."""
        lines = []
        for e in list(self.entries)[-count:]:
            took = "NOT FINISHED" if e.end is None else f"{1000 * (e.end - e.start):.3f} ms"
            r = e.record
            lines.append(
                f"[LEDGER] rank={self.rank} n={e.number} {clock(e.start)} {describe(record_fields(r))} {r.path} "
                f"sizes={r.sizes} shapes={r.shapes} dtypes={r.dtypes}: {took} {e.error}\n"
            )
        return "".join(lines) or f"[LEDGER] rank={self.rank} no collective yet\n"

    def _write_entry(self, entry: Entry) -> None:
        fields = {"n": entry.number, **record_fields(entry.record), "start": entry.start, "error": entry.error[:300]}
        text = json.dumps(fields)[:-1] + ', "end": '
        slot = 1 + entry.number % CAPACITY
        entry.end_at = slot * self._line + len(text)
        self._write(slot, f"{text}{'null' if entry.end is None else format(entry.end, '.6f'):<{_END_WIDTH}}}}")

    def _write(self, slot: int, text: str) -> None:
        assert self._file is not None
        assert len(text) < self._line, f"a ledger line of {len(text)} characters does not fit {self._line}: {text}"
        os.pwrite(self._file, f"{text:<{self._line - 1}}\n".encode(), slot * self._line)

    def _print(self, r: CollectiveRecord, what: str) -> None:
        phase = _PHASES.get(r.op, r.group.partition(":")[0])
        sizes = "" if r.sizes is None else f"sizes={list(r.sizes)}, "
        shapes = str([list(shape) for shape in r.shapes])
        shown = f"hidden_states_shape={shapes[1:-1]}" if phase == "combine" else f"tensor_shapes={shapes}"
        where = f"group={r.group}, step={r.step}, layer={r.layer or 'none'}"
        print(f"[TRACE] rank={self.rank} {phase} {what} {r.op}: {sizes}{shown}, {where}", flush=True)

    def _counter(self, r: CollectiveRecord) -> str:
        return f"[COUNTER] rank={self.rank} seq={r.seq} {r.op}/{r.path} counter"


def clock(seconds: float) -> str:
    """Seconds since the epoch → local ``HH:MM:SS.mmm``."""
    return time.strftime("%H:%M:%S", time.localtime(seconds)) + f".{int(seconds * 1000) % 1000:03d}"
