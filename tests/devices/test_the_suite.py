# SPDX-License-Identifier: Apache-2.0
"""The device suite itself, where there is no device: it runs from its first line to its report on the CPU, with no more
packages than a runner of cards has, and touches no device before ranks are forked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import device_report
import device_suite as suite
import pytest

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
# Whatever the project, its tests or its clients use beside torch, triton, transformers, safetensors, pytest and numpy,
# what comes along with those left alone. Jinja comes with torch but is not needed.
ABSENT = (
    "gguf jinja2 hypothesis _hypothesis_pytestplugin scipy pytest_timeout lm_eval more_itertools accelerate tomli mypy "
    "ruff trl outlines sentencepiece pandas sklearn datasets pydantic fla vllm_xpu_kernels"
)
SITE = f"""
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    names = set({ABSENT!r}.split())

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in cls.names else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
"""
# One of each kind; the rest differ from these in their numbers.
QUICK = (
    "test_device_operators or (test_device_speed) or (test_transformers_tokens and (qwen3-moe-wide or next)) or "
    "(test_collectives and 2-own) or test_groups or (test_exchanged and padded) or (test_layout and qwen3-moe) or "
    "(test_an_idle and mixtral) or (test_device_waits and not qwen3.5 and not llama) or "
    "(test_a_full_capture and lengths0)"
)


def environment(tmp_path: Path, **variables: str) -> dict[str, str]:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    kept = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "VLLM_KERNELS")}
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    return {
        **kept,
        "PYTHONPATH": path,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "VLLM_TEST_REPORT": str(tmp_path / "report"),
        **variables,
    }


def run_suite(tmp_path: Path, *args: str, **variables: str) -> tuple[str, dict[str, Any]]:
    command = [sys.executable, "-m", "pytest", "-m", "device", "tests/devices", "-p", "no:cacheprovider", *args]
    done = subprocess.run(
        command,
        check=False,
        cwd=ROOT,
        env=environment(tmp_path, **variables),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return (tmp_path / "report.txt").read_text(), json.loads((tmp_path / "report.json").read_text())


def test_the_suite_runs_on_the_cpu_with_few_packages(tmp_path: Path) -> None:
    text, report = run_suite(tmp_path, "-k", QUICK, VLLM_TEST_DEVICE="cpu")
    assert not report["tests"]["failed"]
    files = {test.partition("::")[0].rpartition("/")[2] for test in report["tests"]["passed"]}
    written = {path.name for path in HERE.glob("test_device_*.py")} - {"test_device_kernels.py"}
    assert files == written, "a file of the suite has no test that ran"
    kernels = [row for row in report["measured"] if row["what"] == "kernel"]
    assert {row["by"] for row in kernels} == {"cpu", "reference"}
    assert all(row["ms"] > 0 and row["GB/s"] > 0 for row in kernels)
    assert all(value > 0 for value in report["card"].values())
    assert len([row for row in report["measured"] if "Qwen3-30B-A3B" in row["what"]]) == 3
    for part in ("The card at its best", "attention, decode", "prefill, 4 prompts", "no figure below says anything"):
        assert part in text
    assert str(ROOT) not in json.dumps(report), "a report that is sent names no folder of the runner's"


def test_the_kernels_comparisons_run_in_the_interpreter_with_few_packages(tmp_path: Path) -> None:
    kinds = "norms-1-bf16 or g-1-fp32 or 64-bf16 or mixed-bf16 or (answers and (cap or fp8))"
    only = {"VLLM_TEST_DEVICE": "cpu", "TRITON_INTERPRET": "1"}
    operators = "test_operator and triton-bf16 and ((linear and q4_k) or (fp8 and cache))"
    _, report = run_suite(tmp_path, "-k", f"(test_device_kernels and ({kinds})) or ({operators})", **only)
    assert not report["tests"]["failed"]
    assert not report["tests"]["skipped"]
    ran = {test.partition("::")[2].partition("[")[0] for test in report["tests"]["passed"]}
    assert ran == {"test_row_wise", "test_experts", "test_gated_delta_net", "test_attention", "test_operator"}


def test_what_is_for_devices_is_in_the_suite() -> None:
    """One command runs all that has the mark, and its report tells of it."""
    marked = [path for path in (ROOT / "tests").rglob("*.py") if "mark.device" in path.read_text()]
    assert {path.parent for path in marked} == {HERE}


def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    """Whatever this machine has, none is visible."""
    nothing = {"CUDA_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": "none", "VLLM_TEST_DEVICE": ""}
    text, report = run_suite(tmp_path, **nothing)
    assert not report["tests"]["passed"]
    assert not report["tests"]["failed"]
    (reason,) = set(report["tests"]["skipped"].values())
    assert "no XPU and no CUDA device" in reason
    assert "0 passed, 0 failed" in text


def test_ranks_are_forked_before_a_device_is_asked_for(tmp_path: Path) -> None:
    """A process that has asked how many devices there are cannot fork ranks that use them."""
    script = """
import sys, torch
def asked(*args, **kwargs):
    raise SystemExit("a device was asked for")
for module in (torch.cuda, torch.xpu):
    for name in ("is_available", "device_count", "current_device", "init", "_lazy_init"):
        setattr(module, name, asked)
import device_ranks
"""
    path = os.pathsep.join(str(ROOT / folder) for folder in ("", "tests", "tests/distributed", "tests/devices"))
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        env={**environment(tmp_path), "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(("name", "expected"), [("", "none"), ("cpu", "cpu")])
def test_failures_are_told(name: str, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(suite, "device_type", lambda: name)
    monkeypatch.setattr(suite, "MEASURED", [])
    monkeypatch.setattr(device_report, "machine", device_report.machine.__wrapped__)
    tests = {
        "tests/devices/a.py::one": ("failed", "E  AssertionError: 3 elements are wrong"),
        "tests/devices/a.py::two": ("skipped", "triton is not installed"),
    }
    monkeypatch.setattr(device_report, "OUTCOMES", tests)
    monkeypatch.setenv("VLLM_TEST_REPORT", str(tmp_path / "told"))
    text, files = device_report.write(3.0)
    assert [Path(path).is_file() for path in files] == [True, True]
    assert f"Device suite on {expected}" in text
    assert "0 passed, 1 failed, 1 skipped" in text
    for line in ("    E  AssertionError: 3 elements are wrong", "  triton is not installed", "send device-report.json"):
        assert line in text


def test_a_test_that_hangs_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_TEST_REPORT", str(tmp_path / "hung"))
    monkeypatch.setattr(suite, "MEASURED", [])
    monkeypatch.setattr(device_report, "OUTCOMES", {})
    monkeypatch.setattr(device_report, "machine", lambda: {"device": "xpu", "device name": "a card"})
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    device_report.hung("tests/devices/a.py::one", 300, 20)
    assert ended == [3]
    told = json.loads((tmp_path / "hung.json").read_text())
    assert told["seconds"] == 320
    why = told["tests"]["failed"]["tests/devices/a.py::one"]
    assert "still running after 300 s" in why
    assert "test_a_test_that_hangs_is_told" in why, "the stacks say where"
