# SPDX-License-Identifier: Apache-2.0
"""A GGUF file against llama.cpp, in turn: tokens a second while decoding.

    python benchmarks/bench_gguf.py FILE.gguf [--kinds Q4_0 Q8_0] --llama PYTHON

PYTHON: an interpreter with xllamacpp (``pip install xllamacpp``). Both read the same file with the same number of
threads (``OMP_NUM_THREADS``, else all cores) and compute one at a time. ``--kinds`` quantises the file's matrices anew,
to each of these types, in a temporary folder. llama.cpp's seconds are its own count (``predicted_ms``, the longest of
the requests'); this engine's are those of the steps after the first. Ratios are medians over rounds of three runs each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROMPT = "The capital of France is"

PEER = """
import concurrent.futures, json, sys, xllamacpp
path, (threads, tokens, requests), prompt = sys.argv[1], map(int, sys.argv[2:5]), sys.argv[5]
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel = path, 1024 * requests, requests
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
server, pool = xllamacpp.Server(params), concurrent.futures.ThreadPoolExecutor(requests)
def run(number):
    body = dict(prompt=f"{number} {prompt}", n_predict=tokens, temperature=0, ignore_eos=True, cache_prompt=False)
    answer = server.handle_completions(body)
    return (answer if isinstance(answer, dict) else json.loads(answer))["timings"]
print("ready", flush=True)
for line in sys.stdin:
    timings = list(pool.map(run, range(requests)))
    assert all(each["predicted_n"] == tokens for each in timings), timings
    print(requests * tokens / max(each["predicted_ms"] for each in timings) * 1e3, flush=True)
"""


def quantised(source: Path, kind: str, folder: Path) -> Path:
    """``source`` with its matrices of two axes as ``kind``, written to ``folder``."""
    import gguf

    reader = gguf.GGUFReader(source)
    path = folder / f"{source.stem}-{kind}.gguf"
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            value_type = field.types[0]
            writer.add_key_value(name, field.contents(), value_type, field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        data, stored = tensor.data, tensor.tensor_type
        if len(tensor.shape) == 2 and stored != gguf.GGMLQuantizationType.F32:
            target = gguf.GGMLQuantizationType[kind]
            data = gguf.quants.quantize(gguf.quants.dequantize(data, stored), target)
            stored = target
        writer.add_tensor(tensor.name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--llama", required=True, metavar="PYTHON")
    parser.add_argument("--kinds", nargs="+", default=[], help="types of the gguf package: Q4_0, Q8_0")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
    with tempfile.TemporaryDirectory(prefix="bench-gguf-") as folder:
        for file in [quantised(args.file, kind, Path(folder)) for kind in args.kinds] or [args.file]:
            compare(file, args, threads)


def compare(file: Path, args: argparse.Namespace, threads: int) -> None:
    from vllm import LLM, SamplingParams

    argv = [args.llama, "-c", PEER, str(file), str(threads), str(args.tokens), str(args.requests), PROMPT]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(argv, text=True, **pipes) as peer:
        assert peer.stdin is not None
        assert peer.stdout is not None
        while (line := peer.stdout.readline()) and line != "ready\n":
            pass
        if not line:
            sys.exit(f"llama.cpp has not loaded {file}")
        params = SamplingParams(max_tokens=args.tokens, temperature=0, ignore_eos=True)
        llm = LLM(
            str(file),
            dtype="bfloat16",
            max_model_len=1024,
            max_num_seqs=args.requests,
            kv_cache_memory_bytes=400 << 20,
            enable_prefix_caching=False,
        )

        def ours() -> float:
            for number in range(args.requests):
                llm.llm_engine.add_request(str(number), f"{number} {PROMPT}", params)
            llm.llm_engine.step()
            began = time.perf_counter()
            while llm.llm_engine.has_unfinished_requests():
                llm.llm_engine.step()
            return args.requests * (args.tokens - 1) / (time.perf_counter() - began)

        def theirs() -> float:
            peer.stdin.write("go\n")
            peer.stdin.flush()
            return float(peer.stdout.readline())

        rates: list[list[float]] = [[], []]
        for turn in range(args.rounds + 1):
            pair = []
            for run in (theirs, ours):
                time.sleep(0.5)  # until the other's threads have stopped to spin
                pair.append(statistics.median(run() for _ in range(3)))
            if turn:  # the first round warms up
                for column, rate in zip(rates, pair, strict=True):
                    column.append(rate)
        peer.stdin.close()
        llm.shutdown()
    ratio = statistics.median(b / a for a, b in zip(*rates, strict=True))
    size = file.stat().st_size >> 20
    print(
        json.dumps(
            {
                "file": file.name,
                "MiB": size,
                "requests": args.requests,
                "threads": threads,
                "llama.cpp": round(statistics.median(rates[0]), 1),
                "this engine": round(statistics.median(rates[1]), 1),
                "ratio": round(ratio, 2),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
