# SPDX-License-Identifier: Apache-2.0
"""A tiny model over a layout of processes, under several loads, beside transformers' tokens."""

from __future__ import annotations

import itertools
from typing import Any

import launcher
import rank_checks
import tiny_models as tiny

# Prompt lengths and tokens to generate, by DP rank; ranks beyond the second repeat the pattern. The B60 run is first.
LOADS: dict[str, tuple[tuple[list[int], int], ...]] = {
    "b60": (([5, 5, 8, 8], 8), ([7, 5, 11, 7], 8)),
    "one-long": (([1], 8), ([200], 8)),
    "idle-rank": (([], 8), ([9], 8)),
    "far-apart": (([6, 4, 9], 3), ([3], 24)),
}


def load_of(load: str, dp_rank: int, dp_size: int) -> tuple[list[tuple[int, ...]], int]:
    """The prompts of a DP rank, and how many tokens it generates."""
    lengths, num_tokens = LOADS[load][dp_rank % len(LOADS[load])]
    if dp_size == 1:
        lengths = list(itertools.chain.from_iterable(part[0] for part in LOADS[load]))
    return [tiny.prompt(length, seed=10 + dp_rank % 2) for length in lengths], num_tokens


def rank_llm(folder: str, tp: int, dp: int, ep: bool = True, **kwargs: Any) -> Any:
    from vllm import LLM

    return LLM(
        folder,
        tensor_parallel_size=tp,
        data_parallel_size=dp,
        enable_expert_parallel=ep,
        distributed_executor_backend="external_launcher",
        dtype=kwargs.pop("dtype", "float32"),
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=100,
        **kwargs,
    )


def run_loads(
    folder: str,
    tp: int,
    dp: int,
    ep: bool,
    loads: list[str],
    max_delay_s: float,
    options: dict[str, Any] | None = None,
) -> dict[str, list[tuple[int, ...]]]:
    """On a rank: the loads one after the other on one engine; token ids by load."""
    llm = rank_llm(folder, tp, dp, ep, **(options or {}))
    result = {}
    with rank_checks.observed(max_delay_s):
        for load in loads:
            prompts, num_tokens = load_of(load, rank_checks.own_rank() // tp, dp)
            result[load] = tiny.tokens(tiny.generate(llm, prompts, num_tokens))
            llm.llm_engine.scheduler.check_integrity()
    llm.shutdown()
    return result


def check(
    models: Any,
    name: str,
    tp: int,
    dp: int,
    ep: bool,
    policies: str,
    loads: list[str],
    max_delay_s: float,
    env: dict[str, str] | None = None,
    options: dict[str, Any] | None = None,
) -> None:
    """``models``: the module that has the checkpoint and its greedy tokens, ``tiny_models`` or ``tiny_hybrids``;
    ``options``: of ``LLM``."""
    by_rank = launcher.run_ranks(
        run_loads,
        tp * dp,
        models.checkpoint(name),
        tp,
        dp,
        ep,
        loads,
        max_delay_s,
        options,
        env={"VLLM_POLICIES": policies, **(env or {})},
        poison=True,
        deadline_s=180,
    )
    for rank, got in enumerate(by_rank):
        for load in loads:
            prompts, num_tokens = load_of(load, rank // tp, dp)
            expected = [models.greedy(name, prompt, num_tokens) for prompt in prompts]
            assert got[load] == expected, f"{name} TP{tp} DP{dp} EP {ep}, rank {rank}, load {load}"
