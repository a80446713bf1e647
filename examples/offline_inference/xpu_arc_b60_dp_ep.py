# SPDX-License-Identifier: Apache-2.0
"""Data parallel + expert parallel inference, one process a rank: Intel Arc B60, CUDA GPUs, or CPUs anywhere.

    torchrun --nproc-per-node=4 examples/offline_inference/xpu_arc_b60_dp_ep.py
        TP 2 x DP 2 with expert parallelism over all 4 ranks, on a small real mixture of experts that it makes itself.

    torchrun --nproc-per-node=4 examples/offline_inference/xpu_arc_b60_dp_ep.py --model Qwen/Qwen3.5-35B-A3B
        The same on 4 Arc B60 with the model of your choice.

RANK -> dp_rank = RANK // tp, tp_rank = RANK % tp, ep_rank = RANK. The prompts are split over the DP ranks; rank 0
prints how its own answers begin as soon as they do, and in the end all results in prompt order. The exit code is 0
only if every rank finished and the TP ranks of each DP rank produced the same tokens.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from smollm2 import ensure_checkpoint

from vllm import LLM, RequestOutput, SamplingParams
from vllm.distributed import get_dp_group, get_tp_group, get_world_group

# 5, 5, 8 and 8 tokens for DP rank 0, and 7, 5, 11 and 7 for DP rank 1, by the demo model's tokenizer.
PROMPTS = [
    "Good morning, my dear",
    "The opposite of hot is",
    "In autumn the leaves of the maple turn",
    "When the rain had stopped, the children",
    "The best way to learn swimming is",
    "The three primary colours are",
    "Before you plant a tree in your garden, you should",
    "Photosynthesis is the process by which",
]


def parse_args() -> argparse.Namespace:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder, GGUF file or hub id; default: the demo mixture, made once")
    parser.add_argument("--prompts-file", type=Path, help="one prompt a line, instead of the eight built in")
    parser.add_argument("--tensor-parallel-size", type=int, default=2 if world_size % 2 == 0 else 1)
    parser.add_argument("--data-parallel-size", type=int, help="default: the ranks that tensor parallelism leaves")
    parser.add_argument("--enable-expert-parallel", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--max-tokens", type=int, default=24, help="tokens to generate for each prompt")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument("--kv-cache-memory-bytes", type=int, help="size of the KV cache of each rank")
    parser.add_argument("--enforce-eager", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.data_parallel_size is None:
        if args.tensor_parallel_size < 1 or world_size % args.tensor_parallel_size:
            parser.error(
                f"--tensor-parallel-size {args.tensor_parallel_size} does not divide the {world_size} ranks; start "
                "torchrun with another --nproc-per-node or choose a divisor"
            )
        args.data_parallel_size = world_size // args.tensor_parallel_size
    if args.max_tokens < 1:
        parser.error(f"--max-tokens {args.max_tokens}: give 1 or more")
    return args


def read_prompts(path: Path | None) -> list[str]:
    if path is None:
        return PROMPTS
    prompts = [line for line in path.read_text().splitlines() if line.strip()]
    if not prompts:
        raise ValueError(f"{path} holds no prompt: give one a line")
    return prompts


def generate(llm: LLM, prompts: list[str], sampling_params: SamplingParams) -> list[RequestOutput]:
    """As ``llm.generate``, step by step: rank 0 need not wait for the last word to show the first ones."""
    engine, silent = llm.llm_engine, get_world_group().rank_in_group != 0
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, sampling_params)
    outputs: dict[str, RequestOutput] = {}
    running = True  # a rank without prompts, too: each takes part in every step
    while running:
        outputs |= {output.request_id: output for output in engine.step()}
        if outputs and not silent:
            print(f"[ARC B60] DP rank 0 begins: {[output.outputs[0].text for output in outputs.values()]}", flush=True)
            silent = True
        running = engine.has_unfinished_requests()
    return [outputs[str(number)] for number in range(len(prompts))]


def main() -> int:
    args = parse_args()
    prompts = read_prompts(args.prompts_file)
    llm = LLM(
        model=args.model or str(ensure_checkpoint("moe")),
        tensor_parallel_size=args.tensor_parallel_size,
        data_parallel_size=args.data_parallel_size,
        enable_expert_parallel=args.enable_expert_parallel,
        distributed_executor_backend="external_launcher",
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        gpu_memory_utilization=args.gpu_memory_utilization,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        enforce_eager=args.enforce_eager,
        trust_remote_code=args.trust_remote_code,
        seed=args.seed,
    )
    dp_rank, dp_size = get_dp_group().rank_in_group, get_dp_group().world_size
    share = -(-len(prompts) // dp_size)
    mine = prompts[dp_rank * share : (dp_rank + 1) * share]
    sampling_params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, seed=args.seed)

    start = time.perf_counter()
    outputs = generate(llm, mine, sampling_params)
    seconds = time.perf_counter() - start

    result = [(output.prompt, output.outputs[0].text, list(output.outputs[0].token_ids)) for output in outputs]
    by_rank = get_world_group().all_gather_object((dp_rank, get_tp_group().rank_in_group, result, seconds))
    agreed = True
    for rank, (dp, tp, ranks_result, _) in enumerate(by_rank):
        if ranks_result != by_rank[dp * args.tensor_parallel_size][2]:
            agreed = False
            print(f"[ARC B60] rank {rank} (DP {dp}, TP {tp}) differs from TP rank 0 of its DP rank", file=sys.stderr)
    if get_world_group().rank_in_group == 0:
        for dp, tp, ranks_result, _ in by_rank:
            for prompt, text, _ in ranks_result if tp == 0 else ():
                print(f"[ARC B60] DP rank {dp}, Prompt: {prompt!r}\n          Generated: {text!r}", flush=True)
        tokens = sum(len(ids) for _, tp, ranks_result, _ in by_rank if tp == 0 for _, _, ids in ranks_result)
        slowest = max(taken for *_, taken in by_rank)
        print(
            f"[ARC B60] {len(prompts)} prompts, {tokens} tokens in {slowest:.2f} s on {len(by_rank)} ranks "
            f"(TP={args.tensor_parallel_size} DP={dp_size} EP={'on' if args.enable_expert_parallel else 'off'})",
            flush=True,
        )
    llm.shutdown()
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(main())
