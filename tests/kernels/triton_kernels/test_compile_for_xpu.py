# SPDX-License-Identifier: Apache-2.0
"""The compiler of Intel's cards takes every kernel of Triton's but those of quantised weights, and multiplies on their
matrix unit."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

WHEEL = "triton-xpu==3.3.0b1"


@pytest.mark.slow
def test_every_kernel_compiles_for_an_arc(tmp_path: Path) -> None:
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--pre", "--dest", str(tmp_path), WHEEL]
    if (done := subprocess.run(fetch, capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"{WHEEL} cannot be fetched for this Python: {done.stderr[-300:]}")
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    here = Path(__file__).parent
    path = f"{tmp_path / 'site'}:{here.parents[2]}:{here}"
    env = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-W", "ignore", str(here / "compile_for_xpu.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    built = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, _, _ in built} == {
        "_norm_kernel", "_gated_kernel", "_rotary_kernel", "_write_kernel", "_embedding_kernel", "_topk_kernel",
        "_conv_kernel", "_recurrent_kernel", "_attend", "_merge", "_order", "_cut", "_product", "_combine",
        "_row_max_kernel", "_sample_kernel", "_logprobs_kernel", "_penalties_kernel",
    }  # fmt: skip
    assert all(int(size) > 0 for _, size, _ in built)
    assert {name for name, _, matrix in built if matrix == "True"} == {"_attend", "_product"}
