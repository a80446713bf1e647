# SPDX-License-Identifier: Apache-2.0
"""Upstream's engine on a tiny MoE model: greedy tokens of every prompt, as one line of JSON.

``engine.py MODEL DP``: DP engine processes with expert parallelism (none for DP 1) share the prompts. They differ in
length, and in the number of tokens asked for, so that ranks bring uneven batches and one idles at the end.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import socket
import sys
from typing import Any

# (prompt tokens, tokens to generate). With DP 2 the first two go to rank 0: 9 tokens against 10.
REQUESTS = [
    ([5, 6, 7, 8], 4),
    ([9, 10, 11, 12, 13], 6),
    ([21, 22, 23], 12),
    ([31, 32, 33, 34, 35, 36, 37], 3),
]


def engine(rank: int, dp: int, port: int, model: str, results: Any) -> None:
    if dp > 1:
        os.environ.update(
            VLLM_DP_RANK=str(rank),
            VLLM_DP_RANK_LOCAL=str(rank),
            VLLM_DP_SIZE=str(dp),
            VLLM_DP_MASTER_IP="127.0.0.1",
            VLLM_DP_MASTER_PORT=str(port),
        )
    from vllm import LLM, SamplingParams

    share = len(REQUESTS) // dp
    requests = REQUESTS[rank * share : (rank + 1) * share]
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        distributed_executor_backend="uni",
        enforce_eager=True,
        enable_expert_parallel=dp > 1,
        max_model_len=64,
        block_size=32,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
    )
    parameters = [
        SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False) for _, count in requests
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in requests], parameters)
    results.put((rank, [list(output.outputs[0].token_ids) for output in outputs]))


def main() -> None:
    model, dp = sys.argv[1], int(sys.argv[2])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    import vllm  # noqa: F401  Imported once, before the engine processes fork.

    context = mp.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=engine, args=(rank, dp, port, model, results)) for rank in range(dp)]
    for process in processes:
        process.start()
    found: dict[int, list[list[int]]] = {}
    while len(found) < dp:
        try:
            rank, tokens = results.get(timeout=5)
            found[rank] = tokens
        except Exception:
            if any(process.exitcode not in (None, 0) for process in processes):
                sys.exit("an engine process ended without a result")
    print("TOKENS " + json.dumps([tokens for rank in sorted(found) for tokens in found[rank]]), flush=True)
    for process in processes:
        process.join(60)


if __name__ == "__main__":
    main()
