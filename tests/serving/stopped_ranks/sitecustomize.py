# SPDX-License-Identifier: Apache-2.0
"""A rank's process stands still once it begins to load torch: for tests that put this folder on PYTHONPATH."""

import os
import signal
import sys


class _StopsAtTorch:
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torch":
            os.kill(os.getpid(), signal.SIGSTOP)


if "vllm.v1.engine.rank_process" in sys.orig_argv:
    sys.meta_path.insert(0, _StopsAtTorch())
