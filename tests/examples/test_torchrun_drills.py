# SPDX-License-Identifier: Apache-2.0
"""The B60 example under torchrun with a rank that dies, is ended by SIGTERM, raises or stalls: the run ends within 30 s
of the fault, non-zero, with rank, step and collective named, and leaves neither a process nor shared memory behind."""

from __future__ import annotations

import json
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


@pytest.fixture(scope="module")
def shallow(dense_folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo's mixture with its first layers alone."""
    from smollm2 import ensure_checkpoint

    whole, folder = ensure_checkpoint("moe"), tmp_path_factory.mktemp("shallow")
    for file in whole.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((whole / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 6}))
    return str(folder)


@pytest.mark.parametrize("fault", ["dies", "is ended", pytest.param("raises", marks=pytest.mark.slow), "stalls"])
def test_a_failing_rank_ends_the_run(fault: str, drill: str, shallow: str) -> None:
    in_shared_memory = set(os.listdir("/dev/shm"))
    options = ["--model", shallow, "--max-model-len", "64", "--kv-cache-memory-bytes", str(1 << 24)]
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
