# SPDX-License-Identifier: Apache-2.0
"""Where a DP+EP step goes, and what each fix costs: 4 processes, TP 2 x DP 2, experts over all, uneven ranks.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=4 benchmarks/bench_dp_ep.py [--policies xpu]

Rank 0 prints the split of a decode step of the demo model into agree / pad / gather / experts / combine / rest, then
the step time with one fix switched off or on against that as shipped: medians of interleaved rounds of one run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "offline_inference"))

spent: dict[str, float] = defaultdict(float)


def timed(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            spent[part] += time.perf_counter() - start

    return wrapper


@contextmanager
def changed(target: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", choices=("cpu", "xpu"), default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=12, help="decode steps of a round")
    args = parser.parse_args()
    os.environ["VLLM_POLICIES"] = args.policies

    from smollm2 import ensure_checkpoint

    from vllm import LLM, SamplingParams
    from vllm.distributed import get_dp_group, get_ep_group, get_world_group
    from vllm.model_executor.layers.attention import attention
    from vllm.model_executor.layers.fused_moe import FusedMoE

    llm = LLM(
        str(ensure_checkpoint("moe")),
        tensor_parallel_size=2,
        data_parallel_size=2,
        enable_expert_parallel=True,
        dtype="bfloat16",
        max_model_len=256,
        max_num_batched_tokens=256,
        max_num_seqs=8,
        kv_cache_memory_bytes=1 << 26,
    )
    runner, manager = llm.llm_engine.worker.runner, get_ep_group().all2all_manager
    assert manager is not None
    lengths = ((5, 5, 8, 8), (7, 5, 11))[get_dp_group().rank_in_group]
    prompts = [{"prompt_token_ids": list(range(100, 100 + length))} for length in lengths]
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True, detokenize=False)

    def seconds_of_a_step() -> float:
        get_world_group().barrier()
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return (time.perf_counter() - start) / args.tokens

    gather = manager._gather

    def one_gather_a_tensor(tensors: tuple[Any, ...], pad_values: tuple[Any, ...], counts: Any) -> Any:
        parts = [gather((tensor,), (value,), counts) for tensor, value in zip(tensors, pad_values, strict=True)]
        return [part[0][0] for part in parts], parts[0][1]

    variants: dict[str, tuple[Any, str, Any]] = {
        f"fix 1, padding to the largest rank: {'off' if runner.pad_to_max else 'on'}": (
            (runner, "pad_to_max", not runner.pad_to_max)
        ),
        "fix 5, one gather for a list: off": (manager, "_gather", one_gather_a_tensor),
        f"fix 6, barrier before MoE collectives: {'off' if manager.barrier else 'on'}": (
            (manager, "barrier", not manager.barrier)
        ),
        "fix 7, zeroing pad rows: off": (attention, "zero_padding_rows", lambda output, rows: None),
    }
    seconds_of_a_step()
    shipped: list[float] = []
    others: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(args.rounds):
        shipped.append(seconds_of_a_step())
        for name, (target, attribute, value) in variants.items():
            with changed(target, attribute, value):
                others[name].append(seconds_of_a_step())

    with (
        changed(runner, "_agree", timed("agree", runner._agree)),
        changed(runner, "_prepare_inputs", timed("pad", runner._prepare_inputs)),
        changed(attention, "zero_padding_rows", timed("pad", attention.zero_padding_rows)),
        changed(manager, "dispatch", timed("gather", manager.dispatch)),
        changed(FusedMoE, "experts", timed("experts", FusedMoE.experts)),
        changed(manager, "combine", timed("combine", manager.combine)),
    ):
        total = seconds_of_a_step() * args.tokens
    spent["rest"] = total - sum(spent.values())
    if get_world_group().rank_in_group == 0:
        print(f"policies {args.policies}: decode step {statistics.median(shipped) * 1e3:.1f} ms, rank 0's split:")
        for part in ("agree", "pad", "gather", "experts", "combine", "rest"):
            print(f"  {part:8} {spent[part] / args.tokens * 1e3:8.2f} ms {spent[part] / total:7.1%}")
        print("step time against that as shipped:")
        for name, times in others.items():
            ratio = statistics.median(a / b for a, b in zip(times, shipped, strict=True))
            print(f"  {name:48} {ratio:.3f}x", flush=True)
    llm.shutdown()


if __name__ == "__main__":
    main()
