# SPDX-License-Identifier: Apache-2.0
"""Runs the B60 example as its users do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples" / "offline_inference"
MAX_TOKENS = 24
SCRIPT = EXAMPLES / "xpu_arc_b60_dp_ep.py"


def torchrun(ranks: int) -> list[str]:
    return [str(Path(sys.executable).with_name("torchrun")), "--standalone", f"--nproc-per-node={ranks}"]


def run_example(*options: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*(torchrun(ranks) if ranks > 1 else [sys.executable]), str(SCRIPT), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1" if ranks > 1 else "2"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
