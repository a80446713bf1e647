# SPDX-License-Identifier: Apache-2.0
"""Replayed steps against eager ones, on the same weights in one process, taking turns.

    python benchmarks/bench_replay.py MODEL
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=4 benchmarks/bench_replay.py MODEL --tp 2 --dp 2

MODEL: a folder as ``examples/offline_inference/smollm2.py`` writes (``dense``, ``moe`` for ranks). Ratios are medians
over rounds; ``outside`` is the part of a replayed step that is neither in the replay nor in the output head and the
sampler: Python, for all that matters.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

from vllm import LLM, SamplingParams


def timed(owner: Any, name: str, spent: list[float]) -> None:
    """Add to ``spent[0]`` the seconds that ``owner.name`` takes."""
    function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent[0] += time.perf_counter() - began

    setattr(owner, name, call)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32], help="at a time, on each DP rank")
    args = parser.parse_args()
    engines = [
        LLM(
            args.model,
            dtype="bfloat16",
            max_model_len=1024,
            max_num_seqs=32,
            kv_cache_memory_bytes=400 << 20,
            tensor_parallel_size=args.tp,
            data_parallel_size=args.dp,
            enable_expert_parallel=args.dp > 1,
            enable_prefix_caching=False,
            enforce_eager=eager,
        )
        for eager in (True, False)
    ]
    params = SamplingParams(max_tokens=args.tokens, temperature=0, ignore_eos=True)
    runner = engines[1].llm_engine.engine_core.worker.runner
    inside = [0.0]
    timed(runner.graphs, "replay", inside)
    timed(runner.model, "compute_logits", inside)
    timed(runner, "sampler", inside)

    def run(llm: LLM, requests: int) -> tuple[float, tuple[int, ...]]:
        """Seconds of the steps after the first, and the tokens."""
        for number in range(requests):
            llm.llm_engine.add_request(str(number), f"{number} times the capital of France is", params)
        llm.llm_engine.step()
        inside[0] = 0.0
        began, tokens = time.perf_counter(), ()
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                tokens = tuple(output.outputs[0].token_ids)
        return time.perf_counter() - began, tokens

    for requests in args.requests:
        times: list[list[float]] = [[], []]
        outside = []
        for turn in range(args.rounds + 1):
            (eager, expected), (replayed, found) = (run(llm, requests) for llm in engines)
            assert found == expected, "a replayed step gave other tokens"
            if turn:  # the first round warms up
                times[0].append(eager)
                times[1].append(replayed)
                outside.append(1 - inside[0] / replayed)
        ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
        step = statistics.median(times[1]) / (args.tokens - 1)
        slow, fast = (requests * (args.tokens - 1) / statistics.median(column) for column in times)
        if os.environ.get("RANK", "0") == "0":
            print(
                f"{requests:2} requests: eager {slow:.1f} tok/s, replayed {fast:.1f} tok/s, ratio {ratio:.2f}; outside "
                f"{statistics.median(outside):.1%} of a step of {1000 * step:.2f} ms"
            )
    for llm in engines:
        llm.shutdown()


if __name__ == "__main__":
    main()
