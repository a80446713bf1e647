# SPDX-License-Identifier: Apache-2.0
"""``vllm doctor``: from the ranks' ledgers to one paragraph: who waits for whom, where and since when."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.utils.argparse_utils import Parser
from vllm.v1.debug.html import draw
from vllm.v1.debug.ledger import agreed_fields, clock, describe, disagreements, name_ranks

# A rank renews its line four times a second, and survivors of a failure stay for a while.
_SILENT_S = 1.0


@dataclass(frozen=True)
class RankLedger:
    """``about``: the rank's own line; ``entries``: its collectives in order, as ``CollectiveRecord`` names them."""

    about: dict[str, Any]
    entries: list[dict[str, Any]]

    @property
    def stuck_in(self) -> dict[str, Any] | None:
        """The first collective that has not ended or has failed; of a device, others may be queued behind it."""
        return next((entry for entry in self.entries if entry["end"] is None or entry["error"]), None)


@dataclass(frozen=True)
class Finding:
    """``group``, ``seq``: the collective that ``text`` is about; ``blamed``: who differs or is waited for."""

    is_fault: bool
    text: str
    group: str = ""
    seq: int = -1
    blamed: tuple[int, ...] = ()


def load_ledgers(folder: str | Path) -> dict[int, RankLedger]:
    """The newest run's ledgers by rank, of every replica; ``ValueError`` where there are none or a line is no JSON."""
    ledgers = []
    for path in sorted(Path(folder).glob("rank-*.jsonl")):
        try:
            about, *entries = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        except ValueError as error:
            raise ValueError(f"{path} is no ledger: {error}; give the folder of VLLM_TRACE_COLLECTIVES") from None
        ledgers.append(RankLedger(about, sorted(entries, key=lambda entry: entry["n"])))
    if not ledgers:
        raise ValueError(f"no rank-N.jsonl in {folder}; run with VLLM_TRACE_COLLECTIVES={folder} on every rank")
    ledgers.sort(key=lambda ledger: ledger.about["run"])
    run_of, newest = {rank: of.about["run"] for of in ledgers for rank in of.about["replica"]}, ledgers[-1].about
    return {
        of.about["rank"]: of
        for of in ledgers
        if of.about["world_size"] == newest["world_size"]
        and {run_of[other] for other in of.about["replica"]} == {of.about["run"]}
    }


def diagnose(ledgers: dict[int, RankLedger]) -> Finding:
    """The first fault that explains the others: a disagreement, else whoever is waited for and waits for nobody."""
    by_call: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
    for rank, ledger in sorted(ledgers.items()):
        for entry in ledger.entries:
            by_call.setdefault((entry["group"], entry["seq"]), {})[rank] = entry
    for (group, seq), call in sorted(by_call.items(), key=lambda item: max(e["start"] for e in item[1].values())):
        if how := disagreements({rank: agreed_fields(entry) for rank, entry in call.items()}):
            first = min(call.values(), key=lambda entry: entry["start"])
            text = f"The ranks disagree on {describe(first)} since {clock(first['start'])}: {how}."
            return Finding(True, text, group, seq, tuple(call))
    stuck = {rank: last for rank, ledger in sorted(ledgers.items()) if (last := ledger.stuck_in)}
    if stuck:
        return _explain_wait(ledgers, stuck, by_call)
    absent = [r for r in range(next(iter(ledgers.values())).about["world_size"]) if r not in ledgers]
    failed = [r for r, ledger in sorted(ledgers.items()) if ledger.about["state"] not in ("running", "ended")]
    if absent or failed:
        parts = [f"rank {r} {ledgers[r].about['state']}" for r in failed] + [f"rank {r} left no ledger" for r in absent]
        return Finding(True, f"No rank waits for another, but {'; '.join(parts)}.", blamed=(*failed, *absent))
    text = f"Nothing is wrong: {sum(len(ledger.entries) for ledger in ledgers.values())} collectives of {len(ledgers)} "
    text += "ranks agree, and each has ended."
    if shared := [call for call in by_call.values() if len(call) > 1]:
        starts = [sorted((entry["start"], rank) for rank, entry in call.items()) for call in shared]
        skew, late, at = max((s[-1][0] - s[0][0], s[-1][1], i) for i, s in enumerate(starts))
        text += f" The widest skew is {1000 * skew:.1f} ms: rank {late} at {describe(shared[at][late])}."
    return Finding(False, text)


def _explain_wait(
    ledgers: dict[int, RankLedger],
    stuck: dict[int, dict[str, Any]],
    by_call: dict[tuple[str, int], dict[int, dict[str, Any]]],
) -> Finding:
    """Follow the waiting from the first that got stuck until a rank that is in no collective, or round a circle."""
    missing_for = {r: [m for m in e["ranks"] if m not in by_call[e["group"], e["seq"]]] for r, e in stuck.items()}
    path = [min(stuck, key=lambda rank: (not missing_for[rank], stuck[rank]["start"]))]
    while len(set(path)) == len(path) and missing_for.get(path[-1]):
        path.append(min(missing_for[path[-1]], key=lambda rank: (rank in path, rank not in stuck)))
    entry = stuck[path[-2] if len(path) > 1 else path[0]]
    group, seq = entry["group"], entry["seq"]
    newest = max(ledger.about["alive"] for ledger in ledgers.values())
    where = f"{describe(entry)} since {clock(entry['start'])}, for {(entry['end'] or newest) - entry['start']:.1f} s"
    if queued := entry.get("queued"):
        where += f", queued on the device at {clock(queued)}"
    missing = missing_for[path[-2] if len(path) > 1 else path[0]]
    if not missing:
        text = f"All ranks of {group} are in {where}; it has not succeeded: {entry['error'] or 'no error either'}."
        return Finding(True, text, group, seq)
    waiting = list(by_call[group, seq])
    parts = [f"{name_ranks(waiting).capitalize()} wait{'s' * (len(waiting) == 1)} for {name_ranks(missing)} in {where}"]
    if path[-1] in path[:-1]:
        ring = path[path.index(path[-1]) :]
        steps = [f"rank {a} for rank {b} in {describe(stuck[a])}" for a, b in itertools.pairwise(ring)]
        parts.append(f"They wait in a circle: {'; '.join(steps)}")
    parts += [_whereabouts(rank, ledgers.get(rank), newest) for rank in missing]
    if others := sorted(set(stuck) - set(waiting) - set(missing)):
        parts.append(f"{name_ranks(others).capitalize()} got stuck elsewhere in consequence")
    return Finding(True, ". ".join(parts) + ".", group, seq, tuple(missing))


def _whereabouts(rank: int, ledger: RankLedger | None, newest: float) -> str:
    if ledger is None:
        return f"Rank {rank} left no ledger"
    about, place = ledger.about, "has entered no collective at all"
    if stuck := ledger.stuck_in:
        place = f"is in {describe(stuck)} since {clock(stuck['start'])}"
    elif ledger.entries:
        last = ledger.entries[-1]
        place = f"left {describe(last)} at {clock(last['end'])} and has entered none since"
    life, silent = about["state"], newest - about["alive"]
    if life == "running":
        life = f"fell silent {silent:.1f} s before the others: dead or stopped" if silent > _SILENT_S else "is alive"
    return f"Rank {rank} (pid {about['pid']} on {about['host']}) {place}; it {life}"


def perfetto(ledgers: dict[int, RankLedger]) -> dict[str, Any]:
    """The trace in Chrome's JSON format, which Perfetto opens: one process a rank, times in microseconds."""
    newest = max(ledger.about["alive"] for ledger in ledgers.values())
    events: list[dict[str, Any]] = []
    for rank, ledger in sorted(ledgers.items()):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for entry in ledger.entries:
            duration = (entry["end"] or newest) - entry["start"]
            name = entry["op"] if entry["end"] else f"{entry['op']} (not finished)"
            place = {"ph": "X", "pid": rank, "tid": 0, "ts": 1e6 * entry["start"], "dur": 1e6 * max(duration, 0)}
            events.append({"name": name, "cat": entry["group"], **place, "args": entry})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def main(argv: Sequence[str]) -> int:
    """Exit code 0: nothing is wrong; 1: a fault was found; 2: there is nothing to read."""
    parser = Parser("vllm doctor", "Say from the ranks' collective ledgers who waits for whom.")
    parser.add_argument("folder", help="the folder that VLLM_TRACE_COLLECTIVES named")
    parser.add_argument("--html", type=Path, metavar="FILE", help="draw the ranks' timelines")
    parser.add_argument("--perfetto", type=Path, metavar="FILE", help="write a trace for ui.perfetto.dev")
    arguments = parser.parse_args(list(argv))
    try:
        ledgers = load_ledgers(arguments.folder)
    except ValueError as error:
        print(f"vllm doctor: {error}", file=sys.stderr)
        return 2
    finding = diagnose(ledgers)
    print(finding.text)
    if arguments.html:
        arguments.html.write_text(draw(ledgers, finding))
    if arguments.perfetto:
        arguments.perfetto.write_text(json.dumps(perfetto(ledgers)))
    return int(finding.is_fault)
