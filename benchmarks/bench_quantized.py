# SPDX-License-Identifier: Apache-2.0
"""Decode tokens/s of one model, its weights in bfloat16 and quantised: one request, and 32.

    python benchmarks/bench_quantized.py MODEL_DIR [--rounds 5] [--tokens 16] [--requests 1,32] [--cpu-time]

One engine, whose packed weights are exchanged between the runs; the forms follow one another in each round, and what
counts is the median of a round's ratios. Weights are rounded to nearest, so the text is not what is measured.
``--cpu-time`` counts the process's time on a core, for machines that others use: with OMP_NUM_THREADS=1 only.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from vllm import LLM, SamplingParams
from vllm.kernels import ops
from vllm.kernels.quantized import FORMATS, QuantizedWeight
from vllm.kernels.weights import PackedWeight

FORMS = {"int4 by 32": ("int4", 32), "int4 by 64": ("int4", 64), "int8": ("int8", 0), "fp8": ("fp8", 0)}
FORMS |= {"mxfp4": ("mxfp4", 32), "int4 by 64, head bf16": ("int4", 64)}


def quantize(w: torch.Tensor, form: str) -> QuantizedWeight:
    format, group = FORMS[form]
    N, K = w.shape
    grouped = w.float().view(N, -1, group or K)
    most = {"int4": 7, "int8": 127, "fp8": 448, "mxfp4": 6}[format]
    scales = (grouped.abs().amax(-1, keepdim=True) / most).clamp(min=1e-8)
    codes = (grouped / scales).view(N, K)
    if format == "fp8":
        codes = codes.to(torch.float8_e4m3fn).view(torch.uint8)
    elif format == "int8":
        codes = codes.round().to(torch.int8).view(torch.uint8)
    else:
        codes = (codes.round() + 8 if format == "int4" else codes.abs().round()).to(torch.uint8)
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    assert codes.shape[1] == K // FORMATS[format].columns
    scales = scales.squeeze(-1).bfloat16()
    return ops.pack_quantized_weight(QuantizedWeight(format, N, K, group or K, torch.bfloat16, codes, scales))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--requests", default="1,32")
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    sizes = [int(n) for n in args.requests.split(",")]
    limits = {"max_model_len": 256, "max_num_seqs": 32, "cudagraph_capture_sizes": sizes}
    llm = LLM(args.model, dtype="bfloat16", enable_prefix_caching=False, **limits)

    def modules_of(model: torch.nn.Module) -> list[torch.nn.Module]:
        return [m for m in model.modules() if isinstance(getattr(m, "packed", None), PackedWeight)]

    modules = llm.apply_model(modules_of)[0]
    weights: dict[str, list[PackedWeight | QuantizedWeight]] = {"bf16": [m.packed for m in modules]}
    for form in FORMS:
        made = {id(p): quantize(ops.unpack_linear_weight(p), form) for p in dict.fromkeys(weights["bf16"])}
        weights[form] = [
            p if "head" in form and p.N > 20000 else made[id(p)] for p in weights["bf16"]
        ]  # a vocabulary's rows
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    one = SamplingParams(temperature=0, max_tokens=1)
    rates: dict[tuple[str, int], list[float]] = {}
    for _ in range(args.rounds):
        for requests in sizes:
            for form, packed in weights.items():
                for module, p in zip(modules, packed, strict=True):
                    module.packed = p
                prompts = [{"prompt_token_ids": [100 + i, 7]} for i in range(requests)]
                llm.generate(prompts[:1], one, use_tqdm=False)  # steps are captured anew
                started = clock()
                llm.generate(prompts, params, use_tqdm=False)
                rates.setdefault((form, requests), []).append(requests * args.tokens / (clock() - started))
    for (form, requests), values in rates.items():
        ratio = statistics.median(a / b for a, b in zip(values, rates["bf16", requests], strict=True))
        print(f"{form:24s} {requests:3d} requests {statistics.median(values):8.1f} tok/s {ratio:5.2f}x", flush=True)


if __name__ == "__main__":
    main()
