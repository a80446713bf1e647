# SPDX-License-Identifier: Apache-2.0
"""In a rank's process uninitialised memory is NaN: for tests that put this folder on PYTHONPATH."""

import os
import sys
from pathlib import Path

if "vllm.v1.engine.rank" in sys.orig_argv:
    sys.path.append(str(Path(__file__).parents[2]))
    import poison

    poison.start(poison.PATTERNS[int(os.environ["RANK"]) % len(poison.PATTERNS)])
