# SPDX-License-Identifier: Apache-2.0
"""``vllm bench throughput`` and ``vllm bench latency``: tokens per second, and the hardware's work for them.

Work is counted, not measured: each step reads every weight once (of a layer's experts, the share that random routing
of the step's tokens touches) and the keys and values of its requests' contexts; each token costs 2 FLOP for every
weight that it uses, the output head only where a token is sampled. Attention's own FLOP are left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import re
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.llm import LLM
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import Parser
from vllm.v1.engine.llm_engine import EngineStats
from vllm.v1.kv_cache_interface import AttentionSpec

_PERCENTILES = (10, 50, 90, 99)


@dataclass(frozen=True)
class ModelCost:
    """Weights in numbers: ``body`` for every token, ``head`` for every sampled token, ``experts`` in all layers."""

    body: int
    head: int
    experts: int
    num_experts: int
    top_k: int
    itemsize: int
    kv_bytes_per_token: int

    @classmethod
    def of(cls, llm: LLM) -> ModelCost:
        engine, model_config = llm.llm_engine, llm.model_config
        model: Any = engine.worker.runner.model
        sizes = {spec.name: math.prod(spec.shape) for spec in model.weight_specs() if not spec.optional}
        experts = sum(size for name, size in sizes.items() if re.search(r"\.experts\.\d+\.", name))
        embedding = sum(size for name, size in sizes.items() if name.endswith("embed_tokens.weight"))
        head = sum(size for name, size in sizes.items() if name.endswith("lm_head.weight"))
        specs = engine.worker.get_kv_cache_specs().values()
        return cls(
            body=sum(sizes.values()) - experts - embedding - head,
            head=head or embedding,
            experts=experts,
            num_experts=model_config.num_experts,
            top_k=getattr(model_config.hf_config, "num_experts_per_tok", 0),
            itemsize=model_config.dtype.itemsize,
            kv_bytes_per_token=sum(spec.bytes_per_token for spec in specs if isinstance(spec, AttentionSpec)),
        )

    def flop(self, stats: EngineStats) -> float:
        per_token = self.body + (self.experts * self.top_k / self.num_experts if self.experts else 0)
        return 2 * (per_token * stats.tokens + self.head * stats.output_tokens)

    def bytes_read(self, stats: EngineStats) -> float:
        if not stats.steps:
            return 0.0
        touched = 0.0
        if self.experts:
            touched = 1 - (1 - self.top_k / self.num_experts) ** (stats.tokens / stats.steps)
        weights = (self.body + self.head + self.experts * touched) * self.itemsize * stats.steps
        return weights + self.kv_bytes_per_token * stats.context_tokens

    def rates(self, stats: EngineStats, seconds: float) -> dict[str, float]:
        return {
            "gigabytes_per_s": self.bytes_read(stats) / seconds / 1e9,
            "teraflop_per_s": self.flop(stats) / seconds / 1e12,
        }


def _parser(name: str, description: str) -> Parser:
    parser = Parser(f"vllm bench {name}", description)
    parser.add_argument("--input-len", type=_positive, help="prompt tokens of each request")
    parser.add_argument("--output-len", type=_positive, help="tokens to generate for each request")
    parser.add_argument("--n", type=_positive, default=1, help="completions of each prompt")
    parser.add_argument("--disable-detokenize", action="store_true", help="leave the text of the output out")
    parser.add_argument(
        "--json", "--output-json", metavar="FILE", help="write the result as JSON; - prints it instead of the table"
    )
    EngineArgs.add_cli_args(parser)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def _make_llm(parser: Parser, args: argparse.Namespace) -> LLM:
    try:
        engine_args = EngineArgs.from_cli_args(args)
        engine_args.disable_log_stats = False
        return LLM.from_engine_args(engine_args)
    except (ValueError, NotImplementedError, FileNotFoundError) as error:
        parser.error(str(error))


def _prompts(llm: LLM, number: int, length: int, seed: int) -> list[dict[str, list[int]]]:
    rng = random.Random(seed)
    vocab_size = llm.model_config.vocab_size
    return [{"prompt_token_ids": [rng.randrange(vocab_size) for _ in range(length)]} for _ in range(number)]


def _params(llm: LLM, args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        n=args.n,
        temperature=1.0 if args.n > 1 else 0.0,
        max_tokens=args.output_len,
        ignore_eos=True,
        detokenize=not (args.disable_detokenize or llm.model_config.skip_tokenizer_init),
    )


def _run(llm: LLM, prompts: Sequence[Any], params: SamplingParams) -> tuple[float, EngineStats]:
    """Seconds and work of one call."""
    before = dataclasses.replace(llm.llm_engine.stats)
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - started, llm.llm_engine.stats.since(before)


def _describe(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": llm.model_config.served_model_name,
        "dtype": str(llm.model_config.dtype).removeprefix("torch."),
        "input_len": args.input_len,
        "output_len": args.output_len,
    }


def _report(result: dict[str, Any], destination: str | None) -> None:
    result["peak_memory_mib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
    text = json.dumps(result, indent=2)
    if destination == "-":
        print(text)
        return
    width = max(map(len, result))
    for name, value in result.items():
        print(f"{name:{width}}  {f'{value:.3f}' if isinstance(value, float) else value}")
    if destination:
        Path(destination).write_text(text + "\n")


def throughput(argv: Sequence[str] | None = None) -> int:
    """Many requests at once, as fast as the engine takes them."""
    parser = _parser("throughput", "Tokens per second of many requests at once.")
    parser.set_defaults(input_len=64, output_len=64)
    parser.add_argument("--num-prompts", type=_positive, default=32, help="requests in all")
    parser.add_argument("--num-warmups", type=int, default=1, help="requests run before the measurement")
    args = parser.parse_args(argv)
    llm = _make_llm(parser, args)
    params = _params(llm, args)
    if args.num_warmups > 0:
        _run(llm, _prompts(llm, args.num_warmups, args.input_len, seed=1), params)
    seconds, stats = _run(llm, _prompts(llm, args.num_prompts, args.input_len, seed=0), params)
    prompt_tokens = args.num_prompts * args.input_len
    result = {
        **_describe(llm, args),
        "num_prompts": args.num_prompts,
        "elapsed_s": seconds,
        "requests_per_s": args.num_prompts / seconds,
        "total_tokens_per_s": (prompt_tokens + stats.output_tokens) / seconds,
        "output_tokens_per_s": stats.output_tokens / seconds,
        "steps": stats.steps,
        "tokens_per_step": stats.tokens / max(stats.steps, 1),
        **ModelCost.of(llm).rates(stats, seconds),
    }
    llm.shutdown()
    _report(result, args.json)
    return 0


def latency(argv: Sequence[str] | None = None) -> int:
    """One batch from prompt to last token, again and again."""
    parser = _parser("latency", "Time of one batch from prompt to last token.")
    parser.set_defaults(input_len=32, output_len=128)
    parser.add_argument("--batch-size", type=_positive, default=8, help="requests of the batch")
    parser.add_argument("--num-iters", type=_positive, default=10, help="measured runs")
    parser.add_argument("--num-iters-warmup", type=int, default=2, help="runs before them")
    args = parser.parse_args(argv)
    llm = _make_llm(parser, args)
    prompts, params = _prompts(llm, args.batch_size, args.input_len, seed=0), _params(llm, args)
    times: list[float] = []
    for iteration in range(args.num_iters_warmup + args.num_iters):
        if iteration == args.num_iters_warmup:
            before = dataclasses.replace(llm.llm_engine.stats)
        # A prefix cached by the run before would spare this one the prefill that is being measured.
        llm.reset_prefix_cache()
        times.append(_run(llm, prompts, params)[0])
    total = llm.llm_engine.stats.since(before)
    del times[: args.num_iters_warmup]
    times.sort()
    result = {
        **_describe(llm, args),
        "batch_size": args.batch_size,
        "num_iters": args.num_iters,
        "latency_mean_s": statistics.fmean(times),
        **{f"latency_p{p}_s": times[min(len(times) - 1, round(p / 100 * (len(times) - 1)))] for p in _PERCENTILES},
        "output_tokens_per_s": total.output_tokens / sum(times),
        **ModelCost.of(llm).rates(total, sum(times)),
    }
    llm.shutdown()
    _report(result, args.json)
    return 0


if __name__ == "__main__":
    sys.exit("run it as: vllm bench throughput | latency")
