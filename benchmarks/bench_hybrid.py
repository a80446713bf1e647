# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode speed of a small random Qwen3-Next: this package, transformers and upstream's CPU build.

    python benchmarks/bench_hybrid.py [--upstream PYTHON] [--rounds N] [--requests N] [--prompt N] [--decode N]

Every engine loads once in a process of its own; then they take turns, one round each, so that a machine that others
use as well is the same for all. Printed are medians over the rounds, their ratios, and the share of what the machine
can do: arithmetic over the rate of torch's fp32 matrix product, bytes over the rate of reading a large tensor.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

START_S = 480  # an engine that is not ready by then is given up
CONFIG: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 384,
    "shared_expert_intermediate_size": 384,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_model(folder: str) -> None:
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    Qwen3NextForCausalLM(Qwen3NextConfig(**CONFIG)).to(torch.bfloat16).save_pretrained(folder)


# --- in an engine's process ----------------------------------------------------------------------------------------


def transformers_generate(folder: str, prompts: list[list[int]], num_tokens: int) -> Callable[[int], None]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ids = torch.tensor(prompts)

    @torch.inference_mode()
    def generate(n: int) -> None:
        mask = torch.ones_like(ids)
        model.generate(ids, attention_mask=mask, max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=0)

    return generate


def vllm_generate(folder: str, prompts: list[list[int]], num_tokens: int) -> Callable[[int], None]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
        dtype="bfloat16",
        max_model_len=len(prompts[0]) + num_tokens + 16,
        max_num_seqs=len(prompts),
        max_num_batched_tokens=len(prompts) * len(prompts[0]),
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )

    def generate(n: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)

    return generate


def serve(engine: str, folder: str, requests: int, prompt: int, decode: int) -> None:
    """One round for each line on stdin; its result is the line ``RESULT {json}``."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 30000) for _ in range(prompt)] for _ in range(requests)]
    make = transformers_generate if engine == "transformers" else vllm_generate
    generate = make(folder, prompts, decode)
    generate(2)
    print("READY", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        generate(1)
        middle = time.perf_counter()
        generate(1 + decode)
        prefill, decoding = middle - start, time.perf_counter() - middle - (middle - start)
        result = {"prefill": requests * prompt / prefill, "decode": requests * decode / max(decoding, 1e-9)}
        print("RESULT", json.dumps(result), flush=True)


# --- the one that compares ------------------------------------------------------------------------------------------


def descendants(pid: int) -> list[int]:
    """``pid`` and the processes that it started, and they."""
    found = [pid]
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in file.read_text().split():
                found += descendants(int(child))
    return found


class Engine:
    def __init__(self, name: str, python: str, folder: str, args: argparse.Namespace) -> None:
        env = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", **os.environ}
        sizes = [str(args.requests), str(args.prompt), str(args.decode)]
        command = [python, os.path.abspath(__file__), "--serve", name, folder, *sizes]
        self.name = name
        self.results: list[dict[str, float]] = []
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=env,
        )
        deadline = threading.Timer(START_S, self.kill)
        deadline.start()
        try:
            self.read("READY")
        except BaseException:
            self.kill()
            raise
        finally:
            deadline.cancel()

    def read(self, word: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        raise RuntimeError(f"{self.name}: exit code {self.process.wait()} before it said {word}")

    def round(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.results.append(json.loads(self.read("RESULT")))

    def median(self, what: str) -> float:
        return statistics.median(result[what] for result in self.results)

    def kill(self) -> None:
        """With its own worker processes, which may have sessions of their own."""
        for pid in descendants(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.kill()
        self.process.wait()


def per_token() -> dict[str, float]:
    """Multiply-adds of a prompt token, bytes of the bf16 weights that a step reads (every expert, not the embedding
    table), and bytes of fp32 state that each request reads and writes a step."""
    c = CONFIG
    hidden, keys = c["hidden_size"], c["linear_num_key_heads"] * c["linear_key_head_dim"]
    v_heads, D, E = c["linear_num_value_heads"], c["linear_key_head_dim"], c["linear_value_head_dim"]
    values = v_heads * E
    full = c["num_hidden_layers"] // 4
    linear = c["num_hidden_layers"] - full
    queries, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    delta_net = hidden * (2 * keys + 2 * values + 2 * v_heads) + values * hidden
    attention = hidden * (2 * queries + 2 * kv) + queries * hidden
    expert, shared = 3 * hidden * c["moe_intermediate_size"], 3 * hidden * c["shared_expert_intermediate_size"]
    mixers = linear * delta_net + full * attention
    rule = linear * v_heads * D * E * 4
    macs = mixers + rule + c["num_hidden_layers"] * (c["num_experts_per_tok"] * expert + shared)
    weights = mixers + c["num_hidden_layers"] * (c["num_experts"] * expert + shared) + hidden * c["vocab_size"]
    return {"macs": macs, "weight_bytes": 2 * weights, "state_bytes": 2 * 4 * linear * v_heads * D * E}


def machine() -> tuple[float, float]:
    """(multiply-adds a second of torch's fp32 matrix product, bytes a second of reading 512 MB); the best of ten."""
    import torch

    def best(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(10):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return min(times)

    a = torch.randn(1536, 1536)
    big = torch.ones(128 << 20)
    return 1536**3 / best(lambda: a @ a), big.nbytes / best(big.sum)


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3], *(int(size) for size in sys.argv[4:7]))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream", help="python of an environment with upstream vLLM's CPU build")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--decode", type=int, default=32)
    args = parser.parse_args()
    pythons = {"this": sys.executable, "transformers": sys.executable}
    if args.upstream:
        pythons["upstream"] = args.upstream
    engines: list[Engine] = []
    with tempfile.TemporaryDirectory(prefix="bench-hybrid-") as scratch:
        folder = str(Path(scratch) / "model")
        make_model(folder)
        try:
            for name, python in pythons.items():
                try:
                    engines.append(Engine(name, python, folder, args))
                except RuntimeError as error:
                    if name == "this":
                        raise
                    print(f"{error}; left out", flush=True)
            for _ in range(args.rounds):
                for engine in engines:
                    engine.round()
        finally:
            for engine in engines:
                engine.stop()
    mac_rate, byte_rate = machine()
    counts = per_token()
    ours = engines[0]
    print(f"{args.requests} requests x {args.prompt} prompt tokens, {args.decode} decoded; medians of {args.rounds}")
    for engine in engines:
        values = {what: engine.median(what) for what in ("prefill", "decode")}
        ratios = {what: ours.median(what) / value for what, value in values.items()}
        print(
            f"{engine.name:>12}  prefill {values['prefill']:7.0f} tok/s  decode {values['decode']:6.0f} tok/s"
            + ("" if engine is ours else f"  this is {ratios['prefill']:.2f}x and {ratios['decode']:.2f}x")
        )
    step = counts["weight_bytes"] + args.requests * counts["state_bytes"]
    print(
        f"machine: {2e-9 * mac_rate:.0f} GFLOP/s, {1e-9 * byte_rate:.1f} GB/s; prefill has "
        f"{100 * ours.median('prefill') * counts['macs'] / mac_rate:.0f} % of its arithmetic, decode "
        f"{100 * ours.median('decode') / args.requests * step / byte_rate:.0f} % of its bandwidth"
    )


if __name__ == "__main__":
    main()
