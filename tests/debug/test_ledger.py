# SPDX-License-Identifier: Apache-2.0
"""The ledger: its lines, and that they are there whatever ended the process."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import faulty_runs
import launcher
import pytest

from vllm.distributed.observer import CollectiveRecord
from vllm.v1.debug.ledger import CAPACITY, Ledger

RECORD: dict[str, Any] = {
    "op": "all_gatherv",
    "group": "ep:0",
    "seq": 7,
    "rank": 2,
    "ranks": (0, 1, 2, 3),
    "path": "uniform",
    "sizes": (5, 5, 5, 5),
    "shapes": ((5, 64), (5, 2)),
    "dtypes": ("float32", "int64"),
    "num_bytes": 1360,
    "step": 3,
    "layer": "model.layers.1.mlp",
}


def record(**changes: Any) -> CollectiveRecord:
    return CollectiveRecord(**{**RECORD, **changes})


def read(folder: Path, rank: int = 2) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"rank-{rank}.jsonl").read_text().splitlines() if line.strip()]


def end_by(way: str, folder: str) -> None:
    ledger = Ledger(2, 4, "run", folder)
    ledger.end(ledger.begin(record()))
    ledger.begin(record(seq=8))
    if way == "exit":
        sys.exit(0)
    elif way == "error":
        raise RuntimeError("injected")
    os.kill(os.getpid(), getattr(signal, way))


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", ["exit", "error", "SIGTERM", "SIGINT", "SIGKILL"])
def test_file_is_complete_whatever_ends_the_process(way: str, tmp_path: Path) -> None:
    launcher.rank_outcomes(end_by, 1, way, str(tmp_path))
    about, done, open_ = read(tmp_path)
    assert (about["rank"], about["world_size"], about["state"]) == (2, 4, "running")
    assert done["end"] >= done["start"]
    assert (open_["seq"], open_["end"]) == (8, None)


@pytest.mark.multiprocess
def test_file_is_complete_after_a_stall(tmp_path: Path) -> None:
    env = {"VLLM_TRACE_COLLECTIVES": str(tmp_path), "DRILL_GRACE_S": "6"}
    faulty_runs.outcomes_of("sleeps for ever", 2, timeout_s=1, **env)
    waiting, sleeping = read(tmp_path, 0), read(tmp_path, 1)
    assert "rank 1 reports: no progress for VLLM_STALL_TIMEOUT_S=1 s" in waiting[-1]["error"], waiting[-1]
    assert waiting[0]["state"].startswith("failed: ")
    assert all(entry["end"] for entry in sleeping[1:])
    assert len(sleeping) == len(waiting) - 1


def test_line_holds_the_whole_record(tmp_path: Path) -> None:
    ledger = Ledger(2, 4, "run", str(tmp_path))
    ledger.end(ledger.begin(record()), RuntimeError("closed by peer"))
    ledger.state = "ended"
    ledger.close()
    about, line = read(tmp_path)
    assert about["state"] == "ended"
    expected = json.loads(json.dumps(RECORD))
    assert {name: line[name] for name in RECORD} == expected
    assert line["error"] == "RuntimeError: closed by peer"


def test_ring_keeps_the_newest(tmp_path: Path) -> None:
    ledger = Ledger(2, 4, "run", str(tmp_path))
    for seq in range(CAPACITY + 10):
        ledger.end(ledger.begin(record(seq=seq)))
    ledger.close()
    seqs = sorted(line["seq"] for line in read(tmp_path)[1:])
    assert seqs == list(range(10, CAPACITY + 10))
    assert [entry.record.seq for entry in ledger.entries] == seqs


def test_printed_lines_keep_their_known_formats(capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger(2, 4, "run", prints=True)
    ledger.end(ledger.begin(record()))
    scatter = record(op="reduce_scatterv", path="variable-size", sizes=(5, 5, 5, 6), shapes=((21, 64),), seq=8)
    ledger.end(ledger.begin(scatter), RuntimeError("timed out"))
    where = "group=ep:0, step=3, layer=model.layers.1.mlp"
    gather = f"all_gatherv: sizes=[5, 5, 5, 5], tensor_shapes=[[5, 64], [5, 2]], {where}"
    assert capsys.readouterr().out.splitlines() == [
        f"[TRACE] rank=2 dispatch ENTER {gather}",
        "[COUNTER] rank=2 seq=7 all_gatherv/uniform counter=1",
        "[COUNTER] rank=2 seq=7 all_gatherv/uniform counter=0",
        f"[TRACE] rank=2 dispatch EXIT {gather}",
        f"[TRACE] rank=2 combine ENTER reduce_scatterv: sizes=[5, 5, 5, 6], hidden_states_shape=[21, 64], {where}",
        "[COUNTER] rank=2 seq=8 reduce_scatterv/variable-size counter=1",
    ]


def test_largest_line_fits(tmp_path: Path) -> None:
    ranks, sizes = tuple(range(512)), (131072,) * 512
    ledger = Ledger(2, 512, "run", str(tmp_path))
    ledger.end(ledger.begin(record(ranks=ranks, sizes=sizes)), RuntimeError("ü" * 1000))
    assert read(tmp_path)[1]["sizes"] == list(sizes)


class Event:
    """Of a device: it comes, or its query fails, when the test says so."""

    has_come: bool | RuntimeError = False

    def query(self) -> bool:
        if isinstance(self.has_come, RuntimeError):
            raise self.has_come
        return self.has_come


def test_a_queued_collective_ends_with_its_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger, first, second = Ledger(2, 4, "run", str(tmp_path), prints=True), Event(), Event()
    ledger.queue(ledger.begin(record()), first)
    ledger.queue(ledger.begin(record(seq=8)), second)
    ledger.end(ledger.begin(record(seq=9, op="coordinate_batch_across_dp", group="dp:0")))
    lines = read(tmp_path)[1:]
    assert [line["end"] is None for line in lines] == [True, True, False]
    assert lines[0]["queued"] >= lines[0]["start"]
    assert "queued" not in lines[2]
    assert ledger.current == record()
    assert ledger.tail(3).count("NOT FINISHED") == 2
    assert ledger.tail(3).count(": queued after ") == 2
    assert "counter=0" not in capsys.readouterr().out.replace("seq=9 coordinate_batch_across_dp/uniform counter=0", "")
    second.has_come = True
    assert not ledger.poll(), "the device works in order"
    first.has_come = True
    ledger.begin(record(seq=10))  # asks, too
    assert [line["end"] is None for line in read(tmp_path)[1:]] == [False, False, False, True]
    assert ledger.current == record(seq=10)
    out = capsys.readouterr().out
    assert out.index("seq=7 all_gatherv/uniform counter=0") < out.index("seq=8 all_gatherv/uniform counter=0")
    assert out.index("seq=8 all_gatherv/uniform counter=0") < out.index("seq=10 all_gatherv/uniform counter=1")


def test_a_device_that_fails_ends_nothing_quietly(tmp_path: Path) -> None:
    ledger, event = Ledger(2, 4, "run", str(tmp_path)), Event()
    ledger.queue(ledger.begin(record()), event)
    event.has_come = RuntimeError("device-side assert")
    assert ledger.poll()
    assert read(tmp_path)[1]["error"] == "RuntimeError: device-side assert"


def test_a_late_end_leaves_the_line_of_another_alone(tmp_path: Path) -> None:
    """The ring came round while the device was at work."""
    ledger, event = Ledger(2, 4, "run", str(tmp_path)), Event()
    ledger.queue(ledger.begin(record(seq=0)), event)
    for seq in range(1, CAPACITY + 1):
        ledger.end(ledger.begin(record(seq=seq)))
    before = (tmp_path / "rank-2.jsonl").read_bytes()
    event.has_come = True
    assert ledger.poll()
    assert (tmp_path / "rank-2.jsonl").read_bytes() == before
