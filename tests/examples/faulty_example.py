# SPDX-License-Identifier: Apache-2.0
"""The B60 example with a fault in rank 1, step 5; torchrun starts this file: ``faulty_example.py FAULT [OPTION…]``."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from typing import Any

from demo_run import EXAMPLES, SCRIPT

from vllm.v1.worker.gpu_worker import Worker

FAULTY_RANK, FAULTY_STEP = 1, 5


def fail(fault: str) -> None:
    print(f"FAULT at {time.time():.3f}", flush=True)
    if fault == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "is ended":
        os.kill(os.getpid(), signal.SIGTERM)
    if fault == "raises":
        raise ValueError("injected fault")
    time.sleep(3600)


def main() -> None:
    fault = sys.argv.pop(1)
    load_model = Worker.load_model

    def load_and_prepare(worker: Worker) -> None:
        load_model(worker)
        model: Any = worker.runner.model

        def in_second_layer(*_: Any) -> None:
            if os.environ["RANK"] == str(FAULTY_RANK) and worker.runner.step > FAULTY_STEP:
                fail(fault)

        model.model.layers[1].mlp.register_forward_pre_hook(in_second_layer)

    Worker.load_model = load_and_prepare  # type: ignore[method-assign]
    sys.path.insert(0, str(EXAMPLES))
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
