# SPDX-License-Identifier: Apache-2.0
"""Triton's compiler takes what its interpreter took, and no operator asks the device for a value."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_compiles_for_a_card_without_one(tmp_path: Path) -> None:
    pytest.importorskip("triton.backends.nvidia.compiler")
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, str(Path(__file__).with_name("compile_rows.py"))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    built = [line.split() for line in done.stdout.splitlines()]
    assert len(built) == 17, done.stdout
    assert all(int(code) > 0 and spills == "0" for _, _, code, spills in built), done.stdout
