# SPDX-License-Identifier: Apache-2.0
"""What diagnosis costs: step times of two ranks with it on against off.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=2 benchmarks/bench_diagnosis.py [--model FOLDER]

On and off take turns step by step in one run, so that a busy machine and growing contexts are alike for both. Out come
the medians of the ratios of neighbouring steps, of wall clock and, for machines that others use as well, of CPU time;
``off`` against ``off`` shows the noise. The watchdog's thread lives through both, so its own CPU time is printed as a
share of the wall clock. Without a folder a random 8-layer MoE is made.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist

MODES: dict[str, dict[str, str]] = {
    "off": {},
    "watchdog": {"VLLM_STALL_TIMEOUT_S": "120"},
    "watchdog + ledger": {"VLLM_STALL_TIMEOUT_S": "120", "VLLM_TRACE_COLLECTIVES": "FOLDER"},
    "consensus check": {"VLLM_STALL_TIMEOUT_S": "120", "VLLM_CHECK_COLLECTIVES": "1"},
}


def make_model(folder: str) -> str:
    """A random Qwen3-MoE of 8 layers, hidden 256."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, head_dim=32, num_experts=16, num_experts_per_tok=4,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def paired(by_mode: dict[bool, list[float]]) -> tuple[float, float]:
    """(median off, median over neighbouring steps of on / off): neighbours see the same machine and contexts."""
    ratios = [on / off for off, on in zip(by_mode[False], by_mode[True], strict=False)]
    return statistics.median(by_mode[False]), statistics.median(ratios)


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.distributed import get_world_group, observer
    from vllm.v1.debug import watchdog

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--steps", type=int, default=400, help="of each mode, half of them with it on")
    args = parser.parse_args()
    os.environ["VLLM_STALL_TIMEOUT_S"] = "0"
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with tempfile.TemporaryDirectory(prefix="vllm-bench-") as own_folder:
        box = [own_folder if rank else make_model(own_folder)]
        dist.broadcast_object_list(box)
        llm = LLM(
            args.model or box[0], data_parallel_size=2, enable_expert_parallel=True,
            dtype=args.dtype, skip_tokenizer_init=True, max_model_len=args.steps + 32, max_num_seqs=4,
            max_num_batched_tokens=256, enable_prefix_caching=False,
        )  # fmt: skip
        engine = llm.llm_engine
        params = SamplingParams(temperature=0, max_tokens=args.steps, ignore_eos=True, detokenize=False)
        for mode, settings in MODES.items():
            os.environ.update(settings)
            if "VLLM_TRACE_COLLECTIVES" in settings:
                os.environ["VLLM_TRACE_COLLECTIVES"] = f"{box[0]}/ledger"
            watchdog.install(get_world_group())
            on = observer.get_collective_observer()
            for i in range(4):
                engine.add_request(f"{mode} {i}", {"prompt_token_ids": [5 + i, 6, 7, 8]}, params)
            times: dict[bool, list[float]] = {False: [], True: []}
            cpu: dict[bool, list[float]] = {False: [], True: []}
            step, begin = 0, time.perf_counter()
            while engine.has_unfinished_requests():
                observer.set_collective_observer(on if step % 2 else None)
                start, start_cpu = time.perf_counter(), time.process_time()
                engine.step()
                times[bool(step % 2)].append(1000 * (time.perf_counter() - start))
                cpu[bool(step % 2)].append(1000 * (time.process_time() - start_cpu))
                step += 1
            wall, share = time.perf_counter() - begin, 0.0
            if watchdog._installed is not None:
                thread = watchdog._installed._thread.ident
                assert thread is not None
                share = time.clock_gettime(time.pthread_getcpuclockid(thread)) / wall
            observer.set_collective_observer(on)
            watchdog.uninstall()
            for name in settings:
                os.environ.pop(name)
            os.environ["VLLM_STALL_TIMEOUT_S"] = "0"
            (off, wall_ratio), (off_cpu, cpu_ratio) = paired(times), paired(cpu)
            if rank == 0:
                print(
                    f"{mode:18} {off:7.3f} ms a step off, on {wall_ratio:.4f}x; CPU time {off_cpu:.3f} ms off, on "
                    f"{cpu_ratio:.4f}x; thread {share:.3%}",
                    flush=True,
                )
        llm.shutdown()
        dist.barrier()


if __name__ == "__main__":
    main()
