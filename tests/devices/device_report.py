# SPDX-License-Identifier: Apache-2.0
"""The report of a run of the device suite: what an owner of a card sends back."""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import device_suite as suite
import pytest
import torch

# Test → (outcome, why it was skipped or failed)
OUTCOMES: dict[str, tuple[str, str]] = {}
_TOLD = ("software", "processor", "devices", "communication", "kernels", "variables")
_LINES = 12  # of a failure, in the text


def note(report: pytest.TestReport | pytest.CollectReport) -> None:
    before = OUTCOMES.get(report.nodeid, ("", ""))[0]
    if before == "failed" or (report.passed and getattr(report, "when", "") != "call"):
        return
    why = ""
    if report.skipped:
        why = report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""
    elif report.failed:
        why = _plain(report.longreprtext)
    OUTCOMES[report.nodeid] = (report.outcome, why)


def _plain(text: str) -> str:
    """Without the runner's folders."""
    for folder, name in ((str(Path(__file__).parents[2]), "."), (str(Path.home()), "~")):
        text = text.replace(folder, name)
    return text


def _by(outcome: str) -> dict[str, str]:
    return {test: why for test, (found, why) in OUTCOMES.items() if found == outcome}


@functools.cache
def machine() -> dict[str, Any]:
    """Software and device, asked for before a test can leave the device in a state that answers nothing."""
    from vllm.entrypoints.cli import collect_env

    name = suite.device_type()
    if not name:
        return {"device": "none", "device name": "none", "software": {"torch": torch.__version__}}
    what = "cpu" if name == "cpu" else getattr(torch, name).get_device_name()
    return {"device": name, "device name": what, **{k: v for k, v in collect_env.collect().items() if k in _TOLD}}


def collect(seconds: float) -> dict[str, Any]:
    """The whole report; JSON."""
    card: dict[str, Any] = {}
    if suite.card.cache_info().currsize:
        best = suite.card()
        card = {"copy GB/s": best.bytes_per_s / 1e9, "matrix TFLOP/s (bfloat16)": best.flops_per_s / 1e12}
    return {
        "report": "the device suite of this vllm; please send the file back as it is",
        "real sizes": suite.sizes() is suite.REAL,
        "seconds": round(seconds, 1),
        **machine(),
        "tests": {"passed": sorted(_by("passed")), "failed": _by("failed"), "skipped": _by("skipped")},
        "card": card,
        "measured": suite.MEASURED,
    }


def hung(test: str, limit_s: float, began_s: float) -> None:
    """Write the report with this test as the last, its stacks with it, and end the process."""
    with tempfile.TemporaryFile("w+") as stacks:
        faulthandler.dump_traceback(stacks, all_threads=True)
        stacks.seek(0)
        OUTCOMES[test] = ("failed", _plain(f"{stacks.read()}still running after {limit_s:.0f} s: the run ends here"))
    text, files = write(began_s + limit_s)
    print(f"{text}written: {', '.join(files)}", file=sys.__stderr__, flush=True)
    os._exit(3)


def write(seconds: float) -> tuple[str, list[str]]:
    """Write the report as JSON and text; (the text, the files). ``VLLM_TEST_REPORT`` says where, without a suffix."""
    report = json.loads(_plain(json.dumps(collect(seconds))))
    stem = Path(os.environ.get("VLLM_TEST_REPORT") or "device-report")
    text = as_text(report)
    files = [Path(f"{stem}.json"), Path(f"{stem}.txt")]
    files[0].write_text(json.dumps(report, indent=1) + "\n")
    files[1].write_text(text)
    return text, [str(path) for path in files]


def as_text(report: dict[str, Any]) -> str:
    tests = report["tests"]
    counts = ", ".join(f"{len(tests[outcome])} {outcome}" for outcome in ("passed", "failed", "skipped"))
    lines = [
        f"Device suite on {report['device']}: {report['device name']}; {counts}; {report['seconds']:.0f} s",
        *_section("Software", report.get("software", {})),
        *_section("Devices", report.get("devices", {})),
        *_section("Communication", report.get("communication", {})),
        *_section("Kernels that the table chose", report.get("kernels", {})),
    ]
    if not report["real sizes"]:
        lines += ["", "Run at small sizes: no figure below says anything of a card."]
    if report["card"]:
        lines += _section("The card at its best", {k: f"{v:.1f}" for k, v in report["card"].items()})
    kernels = [row for row in report["measured"] if row["what"] == "kernel"]
    if kernels:
        lines += ["", "Kernels (share: of the card's copy rate, of its matrix rate; * the table's choice)"]
        lines.append(f"  {'case':34} {'by':10} {'ms':>9} {'GB/s':>8} {'share':>6} {'TFLOP/s':>8} {'share':>6}")
        lines += [
            f"  {row['case']:34} {row['by'] + ('*' if row['chosen'] else ''):10} {row['ms']:9.3f} {row['GB/s']:8.1f} "
            f"{row['share of copy']:6.1%} {row['TFLOP/s']:8.2f} {row['share of matrix']:6.1%}"
            for row in kernels
        ]
    for row in report["measured"]:
        if row["what"] != "kernel":
            values = {name: f"{v:.4g}" if isinstance(v, float) else v for name, v in row.items() if name != "what"}
            lines += _section(row["what"], values)
    if tests["failed"]:
        lines += ["", "Failed"]
        for test, why in tests["failed"].items():
            lines += [f"  {test}", *(f"    {line}" for line in why.splitlines()[-_LINES:])]
    if tests["skipped"]:
        reasons: dict[str, list[str]] = {}
        for test, why in tests["skipped"].items():
            reasons.setdefault(why, []).append(re.sub(r"^tests/devices/", "", test))
        lines += ["", "Skipped"]
        for why, names in reasons.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines += [f"  {why}", f"    {', '.join(names[:3])}{more}"]
    lines += ["", "Please send device-report.json back, whatever it says: failures and skips tell as much as figures."]
    return "\n".join(lines) + "\n"


def _section(title: str, values: dict[str, Any]) -> list[str]:
    told = {name: value for name, value in values.items() if value is not None}
    return ["", title, *(f"  {name:30} {value}" for name, value in told.items())] if told else []
