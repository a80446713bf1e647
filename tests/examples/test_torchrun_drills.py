# SPDX-License-Identifier: Apache-2.0
"""The B60 example under torchrun with a rank that dies, is ended by SIGTERM, raises or stalls: the run ends within 30 s
of the fault, non-zero, with rank, step and collective named, and leaves neither a process nor shared memory behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from demo_run import torchrun
from faulty_example import FAULTY_RANK, FAULTY_STEP

pytestmark = [pytest.mark.multiprocess, pytest.mark.alone]

SCRIPT = Path(__file__).with_name("faulty_example.py")
STALL_S = 6
MARK = "VLLM_TEST_DRILL"


def processes_of(drill: str) -> list[int]:
    """Whatever the drill started and is still there, by a variable that it handed down."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                environment = (folder / "environ").read_bytes()
            except OSError:
                continue
            if f"{MARK}={drill}".encode() in environment.split(b"\0"):
                found.append(int(folder.name))
    return found


@pytest.fixture
def drill() -> Iterator[str]:
    name = uuid.uuid4().hex
    yield name
    for pid in processes_of(name):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("fault", ["dies", "is ended", pytest.param("raises", marks=pytest.mark.slow), "stalls"])
def test_a_failing_rank_ends_the_run(fault: str, drill: str, dense_folder: str) -> None:
    in_shared_memory = set(os.listdir("/dev/shm"))
    options = ["--max-model-len", "64", "--kv-cache-memory-bytes", str(1 << 24)]
    done = subprocess.run(
        [*torchrun(4), str(SCRIPT), fault, *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "VLLM_STALL_TIMEOUT_S": str(STALL_S), MARK: drill},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    ended = time.time()
    happened = re.search(r"FAULT at ([\d.]+)", done.stdout)
    assert happened, done.stderr[-4000:]
    assert ended - float(happened[1]) < 30
    assert done.returncode != 0
    # torchrun tells which rank went first, the engine what the others waited for
    if fault != "stalls":
        assert re.search(rf"rank\s*: {FAULTY_RANK} ", done.stderr), done.stderr[-4000:]
    else:
        assert f"rank {FAULTY_RANK} reports: no progress for VLLM_STALL_TIMEOUT_S={STALL_S} s" in done.stderr
    # mostly the collective that it waits in; torchrun may end a rank that is on its way there
    place = r"(?:\w+ #\d+ of \w+:\d+ \(|computes in )step (\d+), layer \S+"
    named = re.findall(
        rf"\[FAIL\] rank=(\d) (?:failed: |ended: SIGTERM came while it (?:waits in )?){place}", done.stderr
    )
    assert any(int(rank) != FAULTY_RANK and int(step) >= FAULTY_STEP for rank, step in named), done.stderr[-4000:]
    if fault == "is ended":
        place = rf"computes in step {FAULTY_STEP}, layer \S+"
        assert re.search(rf"\[FAIL\] rank={FAULTY_RANK} ended: SIGTERM came while it {place}", done.stderr), (
            done.stderr[-4000:]
        )
    assert processes_of(drill) == []
    assert set(os.listdir("/dev/shm")) <= in_shared_memory
