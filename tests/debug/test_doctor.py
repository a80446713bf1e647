# SPDX-License-Identifier: Apache-2.0
"""``vllm doctor``: each injected fault is named from the ledgers alone, and the drawing shows it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import faulty_runs
import pytest

from vllm.v1.debug.doctor import RankLedger, diagnose

pytestmark = pytest.mark.multiprocess

LEFT = (
    r"Rank 1 \(pid \d+ on \S+\) left reduce_scatterv #\d+ of ep:0 \(step 3, layer layers\.0\.mlp\) at [\d:.]+ and has "
)
WAIT = (
    r"waits? for rank 1 in all_reduce #\d+ of [et]p:0 \(step 3, layer layers\.1\.mlp\) since [\d:.]+, for [\d.]+ s\. "
)
NAMED = {
    "skips a step": r"disagree on coordinate_batch_across_dp #3 of dp:\d .* since [\d:.]+: step: .*4 on rank 1\b",
    "swaps two collectives": r'disagree on all_reduce #\d+ of [et]p:0 .*: layer: "layers.0.mlp" on ranks? .*'
    r'"layers.1.mlp" on rank 1\b',
    "gathers another size": r"disagree on all_gatherv #\d+ of ep:0 .*: sizes: .*\[3, 5.* on rank 1\b",
    "sleeps for ever": rf"{WAIT}{LEFT}entered none since; it stalled: no progress for VLLM_STALL_TIMEOUT_S=2 s",
    "dies": rf"{WAIT}{LEFT}entered none since; it fell silent [\d.]+ s before the others: dead or stopped",
}


@pytest.mark.parametrize(
    ("fault", "world_size"), [(fault, 2 + 2 * (at % 2)) for at, fault in enumerate(faulty_runs.FAULTS)]
)
def test_fault_is_named(fault: str, world_size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faulty_runs.outcomes_of(fault, world_size, VLLM_TRACE_COLLECTIVES=str(tmp_path))
    code, text = faulty_runs.doctor(tmp_path, capsys)
    assert code == 1
    assert re.search(NAMED[fault], text), text
    assert text.count("\n") == 1, "more than one paragraph"


def test_healthy_run_and_unreadable_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = faulty_runs.outcomes_of("", 2, VLLM_TRACE_COLLECTIVES=str(tmp_path / "run"))
    assert [o.status for o in outcomes] == ["ok", "ok"], outcomes
    trace = tmp_path / "trace.json"
    code, text = faulty_runs.doctor(tmp_path / "run", capsys, "--perfetto", str(trace))
    assert code == 0
    assert text.startswith("Nothing is wrong: 84 collectives of 2 ranks agree, and each has ended. The widest skew is ")
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"rank 0", "rank 1"}
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == 84
    assert all(e["dur"] >= 0 and e["pid"] in (0, 1) for e in spans)
    # One rank's file lost, an empty folder, and files that are no ledgers.
    (tmp_path / "run" / "rank-1.jsonl").unlink()
    code, text = faulty_runs.doctor(tmp_path / "run", capsys)
    assert (code, "rank 1 left no ledger" in text) == (1, True), text
    (tmp_path / "empty").mkdir()
    code, text = faulty_runs.doctor(tmp_path / "empty", capsys)
    assert (code, "no rank-N.jsonl" in text) == (2, True), text
    (tmp_path / "empty" / "rank-0.jsonl").write_text("not json\n")
    code, text = faulty_runs.doctor(tmp_path / "empty", capsys)
    assert (code, "is no ledger" in text) == (2, True), text


def hand_made(rank: int, *entries: dict[str, Any]) -> RankLedger:
    about = {
        "rank": rank,
        "world_size": 2,
        "replica": [0, 1],
        "run": "1",
        "pid": 1,
        "host": "h",
        "state": "running",
        "alive": 110.0,
    }
    base = {"rank": rank, "ranks": [0, 1], "path": "uniform", "sizes": None, "shapes": [], "dtypes": [], "step": 4}
    return RankLedger(about, [{"n": n, "layer": "", "error": "", **base, **e} for n, e in enumerate(entries)])


def test_circle_of_waiting_and_a_collective_that_nobody_leaves() -> None:
    tp = {"op": "all_reduce", "group": "tp:0", "seq": 0, "start": 100.0, "end": None}
    ep = {"op": "all_gatherv", "group": "ep:0", "seq": 0, "start": 100.5, "end": None}
    finding = diagnose({0: hand_made(0, tp), 1: hand_made(1, ep)})
    circle = "They wait in a circle: rank 0 for rank 1 in all_reduce #0 of tp:0 (step 4, layer none); rank 1 for rank 0"
    assert finding.is_fault
    assert circle in finding.text
    together = diagnose({0: hand_made(0, tp), 1: hand_made(1, {**tp, "start": 103.0})})
    assert together.is_fault
    assert together.text.startswith("All ranks of tp:0 are in all_reduce #0 of tp:0 (step 4, layer none) since ")
    assert "for 10.0 s; it has not succeeded" in together.text
    failed = hand_made(0)
    failed.about["state"] = "failed: ValueError"
    assert "rank 0 failed: ValueError" in diagnose({0: failed, 1: hand_made(1)}).text


def in_browser(page: Path, *options: str) -> str:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
    quiet += ["--disable-default-apps", "--disable-extensions", "--disable-domain-reliability"]
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        *quiet,
        f"--user-data-dir={page.parent / 'user'}",
    ]
    command += ["--virtual-time-budget=3000", *options, page.as_uri()]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.parametrize("fault", ["gathers another size", "sleeps for ever"])
def test_browser_shows_the_marked_fault(fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faulty_runs.outcomes_of(fault, 2, timeout_s=1, VLLM_TRACE_COLLECTIVES=str(tmp_path))
    page = tmp_path / "report.html"
    _, text = faulty_runs.doctor(tmp_path, capsys, "--html", str(page))
    source = page.read_text()
    assert not re.search(r"""(src|href)=|@import|url\((?!#)|fetch\(""", source), "the page loads something"
    dom = in_browser(page, "--dump-dom")
    assert len(re.findall(r'class="lane"', dom)) == 2
    mark = re.search(r'<g id="mismatch">.*?</g>', dom, re.DOTALL)
    assert mark, dom[-3000:]
    assert len(re.findall(r'class="mismatch[ "]', mark[0])) == 2
    if fault == "sleeps for ever":
        assert re.search(r'class="mismatch absent"[^>]*data-rank="1"', mark[0])
        assert "rank 1 does not come to #" in mark[0]
    else:
        assert mark[0].count("all_gatherv #") == 2
    assert 'class="skew"' in dom
    assert text.strip().split(".")[0] in dom.replace("&gt;", ">")
