# SPDX-License-Identifier: Apache-2.0
"""Faults of one line, each put into a copy of the tree and run against the tests that should see it.

    python tests/mutants.py                # all of tests/mutants.toml, two hours on two cores; `make mutants`
    python tests/mutants.py --only pad     # those whose law, file or change contains "pad"

A fault that its tests do not see is a survivor: the tests are too weak, or the line does nothing. Survivors that are
known to change nothing carry the reason (``equivalent``). Exit code 1 when any other survives.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("vllm", "tests", "examples", "patches", "pyproject.toml")
TIMEOUT_S = 900


@dataclasses.dataclass(frozen=True)
class Mutant:
    """``old``, which stands in ``file`` exactly once, becomes ``new``; ``tests`` are pytest's arguments."""

    law: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.old.strip()!r} -> {self.new.strip()!r} ({self.law})"

    def apply(self, root: Path) -> None:
        path = root / self.file
        text = path.read_text()
        assert text.count(self.old) == 1, f"{self}: stands there {text.count(self.old)} times"
        path.write_text(text.replace(self.old, self.new))


def load() -> Iterator[Mutant]:
    for entry in tomllib.loads((ROOT / "tests/mutants.toml").read_text())["mutant"]:
        yield Mutant(**{**entry, "tests": tuple(entry["tests"])})


def run(mutant: Mutant) -> tuple[str, float, str]:
    """``seen``, ``survived`` or ``broken`` (the tests could not be run), seconds, and pytest's last lines."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vllm-mutant-") as name:
        copy = Path(name)
        for part in COPIED:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, copy / part)
        mutant.apply(copy)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests]
        env = {**os.environ, "PYTHONPATH": name, "PYTHONDONTWRITEBYTECODE": "1"}
        if mutant.file.startswith("vllm/kernels/cpu/csrc"):
            env["VLLM_CACHE_ROOT"] = f"{name}/cache"  # a wrong kernel is not kept
        try:
            done = subprocess.run(
                command, cwd=copy, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
            code, text = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            code, text = 1, "timed out"
    outcome = {0: "survived", 1: "seen"}.get(code, "broken")
    return outcome, time.monotonic() - started, "\n".join(text.strip().splitlines()[-15:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="text in the law, file or change")
    parser.add_argument("--jobs", type=int, default=1, help="faults tried at once")
    args = parser.parse_args()
    mutants = [mutant for mutant in load() if args.only in str(mutant)]
    bad = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for mutant, (outcome, seconds, text) in zip(mutants, pool.map(run, mutants), strict=True):
            known = outcome == "survived" and mutant.equivalent
            print(f"{outcome:8} {seconds:5.0f} s  {mutant}", flush=True)
            if known:
                print(f"         known: {mutant.equivalent}")
            elif outcome != "seen":
                bad += 1
                print(text)
    print(f"{len(mutants)} faults, {bad} unexpected")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
