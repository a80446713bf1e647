# SPDX-License-Identifier: Apache-2.0
"""For tests that put this folder on PYTHONPATH: in a rank's process uninitialised memory is NaN, and no more steps are
made than the file says whose name is in ``SERVED_STEPS``, while there is one (``served.stopping_after``)."""

import os
import sys
import time
from pathlib import Path

if "vllm.v1.engine.rank_process" in sys.orig_argv:
    sys.path.append(str(Path(__file__).parents[2]))
    import poison

    poison.start(poison.PATTERNS[int(os.environ["RANK"]) % len(poison.PATTERNS)])

    from vllm.v1.engine.core import EngineCore

    run_step, made = EngineCore.run_step, {}

    def gated(core: EngineCore) -> object:
        while True:
            try:
                text = Path(os.environ["SERVED_STEPS"]).read_text()
            except OSError:
                break
            if text and made.get(text, 0) < int(text.split()[0]):
                made[text] = made.get(text, 0) + 1
                break
            time.sleep(0.002)
        return run_step(core)

    if "SERVED_STEPS" in os.environ:
        EngineCore.run_step = gated
