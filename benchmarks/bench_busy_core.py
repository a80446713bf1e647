# SPDX-License-Identifier: Apache-2.0
"""Decoded tokens/s while another program keeps a core busy, against the same on the idle machine.

    python benchmarks/bench_busy_core.py MODEL_DIR [--rounds 5] [--requests 1,32] [--tokens 16] [--pin CORE]
        [--torch-first] [--cgroup FOLDER]

Windows with and without the busy neighbour take turns in one process. Printed are medians over the rounds with the
smallest and largest, the ratio, and how often a second the engine's threads slept and were put off their cores.
``--cgroup`` names a folder of the cpu controller with a large share: engine and neighbour are in it during the windows,
so that a machine that others load as well looks nearly idle to them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def neighbour(pin: int | None, cgroup: str | None) -> Iterator[subprocess.Popen[bytes]]:
    """A stopped process that computes for ever once it is continued."""
    process = subprocess.Popen([sys.executable, "-c", "while 1: pass"])
    try:
        if pin is not None:
            os.sched_setaffinity(process.pid, {pin})
        if cgroup:
            Path(cgroup, "cgroup.procs").write_text(str(process.pid))
        process.send_signal(signal.SIGSTOP)
        yield process
    finally:
        process.kill()
        process.wait()


def window(llm: Any, prompts: list[Any], params: Any) -> dict[str, float]:
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    return {
        "rate": sum(len(o.outputs[0].token_ids) for o in outputs) / seconds,
        "slept": (after.ru_nvcsw - before.ru_nvcsw) / seconds,
        "put_off": (after.ru_nivcsw - before.ru_nivcsw) / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hugging Face folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", default="1,32")
    parser.add_argument("--prompt", type=int, default=16, help="prompt tokens of a request")
    parser.add_argument("--tokens", type=int, default=16, help="decoded tokens of a request")
    parser.add_argument("--pin", type=int, help="the neighbour's core; by default the system chooses")
    parser.add_argument("--torch-first", action="store_true", help="import torch before vllm, as many scripts do")
    parser.add_argument("--cgroup", help="folder of the cpu controller, version 1")
    args = parser.parse_args()
    if args.torch_first:
        import torch  # noqa: F401
    from vllm import LLM, SamplingParams

    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    llm = LLM(args.model, dtype="bfloat16", max_model_len=512, max_num_seqs=64, enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    root = str(Path(args.cgroup).parent) if args.cgroup else None

    def enter(folder: str | None) -> None:
        if folder:
            Path(folder, "cgroup.procs").write_text(str(os.getpid()))

    runs: dict[tuple[int, bool], list[dict[str, float]]] = {}
    with neighbour(args.pin, args.cgroup) as other:
        for number in range(args.rounds + 1):
            for requests in map(int, args.requests.split(",")):
                prompts = [
                    {"prompt_token_ids": [100 + (i * 37 + j) % 4000 for j in range(args.prompt)]}
                    for i in range(requests)
                ]
                for busy in (False, True):
                    other.send_signal(signal.SIGCONT if busy else signal.SIGSTOP)
                    enter(args.cgroup)
                    result = window(llm, prompts, params)
                    enter(root)
                    other.send_signal(signal.SIGSTOP)
                    if number:  # the first round warms up
                        runs.setdefault((requests, busy), []).append(result)
    table = {}
    for (requests, busy), results in runs.items():
        rates = sorted(r["rate"] for r in results)
        median = statistics.median(rates)
        table[f"{requests} {'busy' if busy else 'idle'}"] = median
        ratio = f", {median / table[f'{requests} idle']:.0%} of idle" if busy else ""
        slept, put_off = (statistics.median(r[key] for r in results) for key in ("slept", "put_off"))
        spread = f"{rates[0]:.1f} to {rates[-1]:.1f}"
        name = f"{requests:3} requests, {'busy' if busy else 'idle'}"
        print(f"{name}: {median:.1f} tok/s ({spread}){ratio}; slept {slept:.0f}, put off {put_off:.0f} times a second")
    print(json.dumps(table))


if __name__ == "__main__":
    main()
