# SPDX-License-Identifier: Apache-2.0
"""Law 7 over processes: every TP x DP x EP layout gives transformers' greedy tokens, whatever the ranks' loads.

The kind of fault: what one rank runs, pads, or is late with reaches another rank's tokens or leaves it waiting. All
of it runs with uninitialised memory NaN, under random delays before collectives, with the CPU and the XPU policies.
"""

from __future__ import annotations

import itertools

import launcher
import pytest
import rank_checks
import tiny_models as tiny

pytestmark = pytest.mark.multiprocess

# Prompt lengths and tokens to generate, by DP rank; the two cases of the B60 run come first.
LOADS: dict[str, tuple[tuple[list[int], int], ...]] = {
    "b60": (([5, 5, 8, 8], 8), ([7, 5, 11, 7], 8)),
    "one-long": (([1], 8), ([200], 8)),
    "idle-rank": (([], 8), ([9], 8)),
    "far-apart": (([6, 4, 9], 3), ([3], 24)),
}

LAYOUTS = [
    # name, TP, DP, EP
    ("mixtral", 2, 1, False),
    ("mixtral", 2, 1, True),
    ("mixtral", 1, 2, False),
    ("mixtral", 1, 2, True),
    ("qwen3-moe", 1, 2, True),
    ("qwen3-moe-mixed", 2, 1, True),
    ("llama", 2, 1, False),
    ("mixtral", 2, 2, True),
    ("mixtral", 2, 2, False),
    ("mixtral", 4, 1, True),
    ("mixtral", 1, 4, True),
    ("qwen3-moe", 2, 2, True),
    ("qwen3-moe", 1, 4, True),
    ("llama", 4, 1, False),
]


def load_of(load: str, dp_rank: int, dp_size: int) -> tuple[list[tuple[int, ...]], int]:
    """The prompts of a DP rank, and how many tokens it generates. Ranks beyond the second repeat the pattern."""
    lengths, num_tokens = LOADS[load][dp_rank % len(LOADS[load])]
    if dp_size == 1:
        lengths = list(itertools.chain.from_iterable(part[0] for part in LOADS[load]))
    return [tiny.prompt(length, seed=10 + dp_rank) for length in lengths], num_tokens


def run_loads(
    folder: str, tp: int, dp: int, ep: bool, loads: list[str], max_delay_s: float
) -> dict[str, list[tuple[int, ...]]]:
    """On a rank: the loads one after the other on one engine; token ids by load."""
    from vllm import LLM
    from vllm.distributed import get_dp_group

    llm = LLM(
        folder,
        tensor_parallel_size=tp,
        data_parallel_size=dp,
        enable_expert_parallel=ep,
        distributed_executor_backend="external_launcher",
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=100,
    )
    result = {}
    with rank_checks.observed(max_delay_s):
        for load in loads:
            prompts, num_tokens = load_of(load, get_dp_group().rank_in_group, dp)
            result[load] = tiny.tokens(tiny.generate(llm, prompts, num_tokens))
            llm.llm_engine.scheduler.check_integrity()
    llm.shutdown()
    return result


def check(name: str, tp: int, dp: int, ep: bool, policies: str, loads: list[str], max_delay_s: float) -> None:
    by_rank = launcher.run_ranks(
        run_loads,
        tp * dp,
        tiny.checkpoint(name),
        tp,
        dp,
        ep,
        loads,
        max_delay_s,
        env={"VLLM_POLICIES": policies},
        poison=True,
        deadline_s=120,
    )
    for rank, got in enumerate(by_rank):
        for load in loads:
            prompts, num_tokens = load_of(load, rank // tp, dp)
            expected = [tiny.greedy(name, prompt, num_tokens) for prompt in prompts]
            assert got[load] == expected, f"{name} TP{tp} DP{dp} EP {ep}, rank {rank}, load {load}"


@pytest.mark.parametrize(("name", "tp", "dp", "ep"), LAYOUTS)
def test_layout(name: str, tp: int, dp: int, ep: bool) -> None:
    check(name, tp, dp, ep, "cpu", list(LOADS), 0.001)


@pytest.mark.parametrize(("name", "tp", "dp", "ep"), [case for case in LAYOUTS if case[2] > 1 and case[3]])
def test_layout_with_xpu_policies(name: str, tp: int, dp: int, ep: bool) -> None:
    check(name, tp, dp, ep, "xpu", list(LOADS), 0.001)


@pytest.mark.parametrize("policies", ["cpu", "xpu"])
def test_long_delays(policies: str) -> None:
    """The B60 layout and load, each rank late by up to 50 ms before each collective."""
    check("mixtral", 2, 2, True, policies, ["b60"], 0.05)
