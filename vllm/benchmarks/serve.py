# SPDX-License-Identifier: Apache-2.0
"""``vllm bench serve``: what clients of a running OpenAI-compatible server wait for, and how much it does.

Times of a request, in milliseconds in the result: ``ttft`` from its sending to the first text, ``itl`` between two
pieces of text, ``e2el`` from its sending to the last text, ``tpot`` = (e2el - ttft) / (tokens - 1). Tokens are what the
server says it made, else what the tokenizer makes of the text.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vllm.benchmarks.datasets import Sample, samples
from vllm.utils.argparse_utils import Parser
from vllm.utils.http_client import HTTPError, request

_METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token, without the first",
    "itl": "time between tokens",
    "e2el": "time of a whole request",
}


@dataclass
class Answer:
    """What became of one request; times in seconds."""

    prompt_len: int
    started: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    itl: list[float] = field(default_factory=list)
    text: str = ""
    output_len: int = 0
    error: str = ""

    @property
    def tpot(self) -> float | None:
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else None


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--backend", "--endpoint-type", choices=("vllm", "openai", "openai-chat"), default="openai")
    add("--base-url", help="address of the server, instead of --host and --port")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--endpoint", help="default: /v1/completions, of openai-chat /v1/chat/completions")
    add("--header", action="append", metavar="NAME=VALUE", help="sent with each request; may come again")
    add("--model", help="default: the first that the server names")
    add("--served-model-name", help="the model's name at the server, where --model is a folder")
    add("--tokenizer", help="folder, hub id or GGUF file; default: the model")
    add("--tokenizer-mode", default="auto")
    add("--trust-remote-code", action="store_true")
    add("--dataset-name", choices=("random", "sharegpt", "custom"), default="random")
    add("--dataset-path", help="file of the data set")
    add("--num-prompts", type=int, default=1000, help="requests in all")
    add("--seed", type=int, default=0)
    add("--disable-shuffle", action="store_true", help="take the data set in its order")
    add("--no-oversample", action="store_true", help="send no prompt of a small data set twice")
    add("--random-input-len", "--input-len", type=int, default=1024, help="prompt tokens")
    add("--random-output-len", "--output-len", type=int, default=128, help="tokens to ask for")
    add("--random-range-ratio", type=float, default=0.0, help="lengths vary by this share, up and down")
    add("--random-prefix-len", type=int, default=0, help="tokens before these that all prompts share")
    add("--sharegpt-output-len", type=int, help="instead of the length of the data's answers")
    add("--custom-output-len", type=int, default=256, help="tokens to ask for")
    add("--request-rate", type=float, default=math.inf, help="requests a second on average; inf sends all at once")
    add("--burstiness", type=float, default=1.0, help="1: a Poisson process; less: in bursts; more: evenly")
    add("--max-concurrency", type=int, help="requests that are under way at a time")
    add("--num-warmups", type=int, default=0, help="requests sent before the measurement")
    add("--ready-check-timeout-sec", type=float, default=600, help="how long to wait for the server; 0: do not look")
    add("--ignore-eos", action="store_true", help="let the server go on past end tokens")
    add("--temperature", type=float, default=0.0)
    add("--top-p", type=float)
    add("--top-k", type=int)
    add("--extra-body", type=json.loads, default={}, metavar="JSON", help="more fields of each request")
    add("--percentile-metrics", default="ttft,tpot,itl", help="of " + ", ".join(_METRICS))
    add("--metric-percentiles", default="99", help="as 50,90,99.9")
    add("--goodput", nargs="+", metavar="METRIC:MS", help="a request is good that stays below, as ttft:200 tpot:50")
    add("--label", help="in the name of the result's file")
    add("--metadata", nargs="*", metavar="NAME=VALUE", help="written into the result")
    add("--save-result", action="store_true", help="write the result as JSON")
    add("--save-detailed", action="store_true", help="with each request's times and text")
    add("--result-dir", default=".")
    add("--result-filename")
    add("--disable-tqdm", action="store_true", help="no progress bar")


class _Load:
    """Requests as ``args`` shape them, to one server."""

    def __init__(self, args: argparse.Namespace, model: str) -> None:
        self.args, self.is_chat = args, args.backend == "openai-chat"
        self.url = base_url(args) + (args.endpoint or ("/v1/chat/completions" if self.is_chat else "/v1/completions"))
        self.headers = headers(args)
        self.fields: dict[str, Any] = {
            "model": args.served_model_name or model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": args.temperature,
            **{name: value for name in ("top_p", "top_k") if (value := getattr(args, name)) is not None},
            **({"ignore_eos": True} if args.ignore_eos else {}),
            **args.extra_body,
        }

    async def send(self, sample: Sample) -> Answer:
        body: dict[str, Any] = {"prompt": sample.prompt, "max_tokens": sample.output_len}
        if self.is_chat:
            messages = [{"role": "user", "content": sample.prompt}]
            body = {"messages": messages, "max_completion_tokens": sample.output_len}
        answer = Answer(sample.prompt_len, time.perf_counter())
        last, told = 0.0, None
        try:
            async with request(self.url, {**self.fields, **body}, self.headers) as response:
                async for event in response.events():
                    now = time.perf_counter()
                    told = (event.get("usage") or {}).get("completion_tokens", told)
                    text = "".join(map(self._text_of, event.get("choices", ())))
                    if not text:
                        continue
                    if last:
                        answer.itl.append(now - last)
                    else:
                        answer.ttft = now - answer.started
                    last = now
                    answer.text += text
            answer.latency, answer.output_len = last - answer.started, -1 if told is None else int(told)
            if not last:
                answer.error = "the answer has no text"
        except (OSError, HTTPError, ValueError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        return answer

    def _text_of(self, choice: dict[str, Any]) -> str:
        if not self.is_chat:
            return choice.get("text") or ""
        delta = choice.get("delta") or {}
        return (delta.get("reasoning_content") or delta.get("reasoning") or "") + (delta.get("content") or "")


def base_url(args: argparse.Namespace) -> str:
    return args.base_url.rstrip("/") if args.base_url else f"http://{args.host}:{args.port}"


def headers(args: argparse.Namespace) -> dict[str, str]:
    key = os.environ.get("OPENAI_API_KEY")
    found = {"Authorization": f"Bearer {key}"} if key else {}
    return found | _pairs(args.header, "--header")


def _pairs(words: Sequence[str] | None, option: str) -> dict[str, str]:
    if wrong := [word for word in words or () if "=" not in word]:
        raise ValueError(f"{option} {wrong[0]}: give NAME=VALUE")
    return dict(word.split("=", 1) for word in words or ())


def _goodput(words: Sequence[str] | None) -> dict[str, float]:
    """Metric → most milliseconds."""
    limits = {}
    for word in words or ():
        name, _, most = word.partition(":")
        if name not in ("ttft", "tpot", "e2el"):
            raise ValueError(f"--goodput {word}: give ttft:MS, tpot:MS or e2el:MS")
        limits[name] = float(most)
    return limits


def delays(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start at which each request is sent: a gamma process, of Poisson's kind for 1."""
    if rate <= 0 or burstiness <= 0:
        raise ValueError(f"--request-rate {rate}, --burstiness {burstiness}: give more than 0")
    rng, at, times = random.Random(seed), 0.0, []
    for _ in range(count):
        times.append(at)
        at += 0.0 if math.isinf(rate) else rng.gammavariate(burstiness, 1 / (rate * burstiness))
    return times


async def _run(load: _Load, asked: Sequence[Sample], warmups: int) -> tuple[list[Answer], float]:
    """The answers in the order of ``asked``, and the seconds that all took."""
    args = load.args
    places = asyncio.Semaphore(args.max_concurrency or len(asked))
    if args.ready_check_timeout_sec > 0:
        await _wait_until_ready(load, asked[0])

    async def send(sample: Sample, delay: float = 0.0) -> Answer:
        await asyncio.sleep(delay)
        async with places:
            return await load.send(sample)

    await asyncio.gather(*(send(asked[i % len(asked)]) for i in range(warmups)))
    begun = time.perf_counter()
    times = delays(len(asked), args.request_rate, args.burstiness, args.seed)
    tasks = [asyncio.ensure_future(send(sample, delay)) for sample, delay in zip(asked, times, strict=True)]
    with tqdm(total=len(asked), disable=args.disable_tqdm or not sys.stderr.isatty()) as bar:
        for done in asyncio.as_completed(tasks):
            await done
            bar.update(1)
    return [task.result() for task in tasks], time.perf_counter() - begun


async def _wait_until_ready(load: _Load, sample: Sample) -> None:
    """Send ``sample`` until an answer comes. Raises :class:`HTTPError` where none does."""
    until = time.monotonic() + load.args.ready_check_timeout_sec
    while (error := (await load.send(sample)).error) and "Error: HTTP" not in error and time.monotonic() < until:
        await asyncio.sleep(1)
    if error:
        raise HTTPError(f"{load.url} does not answer as it should: {error}")


def percentile(values: Sequence[float], percent: float) -> float:
    """Between the two nearest in order, as numpy's default is."""
    ordered = sorted(values)
    at = percent / 100 * (len(ordered) - 1)
    low = math.floor(at)
    return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (at - low)


def summarise(
    answers: Sequence[Answer],
    seconds: float,
    metrics: Sequence[str] = ("ttft", "tpot", "itl"),
    percentiles: Sequence[float] = (99.0,),
    goodput: dict[str, float] | None = None,
) -> dict[str, Any]:
    """The figures of a run that took ``seconds``, under the names that upstream writes."""
    good = [answer for answer in answers if not answer.error]
    values = {
        "ttft": [answer.ttft for answer in good],
        "tpot": [answer.tpot for answer in good if answer.tpot is not None],
        "itl": [gap for answer in good for gap in answer.itl],
        "e2el": [answer.latency for answer in good],
    }
    total_in, total_out = sum(a.prompt_len for a in good), sum(a.output_len for a in good)
    result: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": total_in,
        "total_output_tokens": total_out,
        "request_throughput": len(good) / seconds,
        "request_goodput": None,
        "output_throughput": total_out / seconds,
        "total_token_throughput": (total_in + total_out) / seconds,
        "max_output_tokens_per_s": _most_tokens_a_second(good),
        "max_concurrent_requests": _most_at_a_time(good),
    }
    if goodput:
        found = [{"ttft": answer.ttft, "tpot": answer.tpot or 0.0, "e2el": answer.latency} for answer in good]
        kept = sum(all(1000 * times[name] <= most for name, most in goodput.items()) for times in found)
        result["request_goodput"] = kept / seconds
    for name in metrics:
        ms = [1000 * value for value in values[name]]
        result[f"mean_{name}_ms"] = statistics.fmean(ms) if ms else 0.0
        result[f"median_{name}_ms"] = statistics.median(ms) if ms else 0.0
        result[f"std_{name}_ms"] = statistics.pstdev(ms) if ms else 0.0
        for percent in percentiles:
            result[f"p{percent:g}_{name}_ms"] = percentile(ms, percent) if ms else 0.0
    return result


def _most_tokens_a_second(answers: Sequence[Answer]) -> float:
    """Pieces of text in the busiest second of the run."""
    first, counts = min((answer.started for answer in answers), default=0.0), dict[int, int]()
    for answer in answers:
        at = answer.started + answer.ttft - first
        for gap in (0.0, *answer.itl):
            at += gap
            counts[int(at)] = counts.get(int(at), 0) + 1
    return float(max(counts.values(), default=0))


def _most_at_a_time(answers: Sequence[Answer]) -> int:
    changes = [(a.started, 1) for a in answers] + [(a.started + a.latency, -1) for a in answers]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if wrong := [name for name in names if name not in _METRICS]:
        raise ValueError(f"--percentile-metrics {wrong[0]}: give some of {', '.join(_METRICS)}")
    return names


async def _first_model(args: argparse.Namespace) -> dict[str, Any]:
    async with request(base_url(args) + "/v1/models", headers=headers(args)) as response:
        return (await response.json())["data"][0]


def _show(result: dict[str, Any], metrics: Sequence[str]) -> None:
    def line(name: str, value: Any) -> None:
        print(f"{name:42}{value:>14,.2f}" if isinstance(value, float) else f"{name:42}{value:>14}")

    names = {
        "completed": "requests",
        "failed": "requests that failed",
        "duration": "seconds",
        "total_input_tokens": "tokens in",
        "total_output_tokens": "tokens out",
        "request_throughput": "requests/s",
        "request_goodput": "good requests/s",
        "output_throughput": "tokens out/s",
        "total_token_throughput": "tokens/s",
        "max_output_tokens_per_s": "most pieces of text in a second",
        "max_concurrent_requests": "most requests at a time",
    }
    for key, name in names.items():
        if result[key] is not None:
            line(name, result[key])
    for metric in metrics:
        print(f"{_METRICS[metric]}, ms")
        for key, value in result.items():
            if key.endswith(f"_{metric}_ms"):
                line("  " + key.split("_")[0], value)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the load and prints the figures; 1 where no request got an answer."""
    parser = Parser("vllm bench serve", "Latencies and tokens per second of a running server.")
    _add_options(parser)
    args = parser.parse_args(argv)
    if args.num_prompts < 1 or (args.max_concurrency is not None and args.max_concurrency < 1):
        parser.error("--num-prompts and --max-concurrency: give 1 or more")
    try:
        metrics, goodput = _names(args.percentile_metrics), _goodput(args.goodput)
        percentiles, metadata = (
            [float(p) for p in args.metric_percentiles.split(",")],
            _pairs(args.metadata, "--metadata"),
        )
        card = {"id": args.model} if args.model else asyncio.run(_first_model(args))
        model = card["id"]
        # Where the server lies on this machine, its folder is known by its card.
        known = [name for name in (card.get("root"), model) if name and Path(name).exists()]
        tokenizer_id = args.tokenizer or (known or [model])[0]
        load = _Load(args, model)
        delays(1, args.request_rate, args.burstiness, args.seed)
        from vllm.tokenizers import get_tokenizer

        tokenizer = get_tokenizer(
            tokenizer_id, tokenizer_mode=args.tokenizer_mode, trust_remote_code=args.trust_remote_code
        )
        asked = samples(args, tokenizer)
        answers, seconds = asyncio.run(_run(load, asked, args.num_warmups))
    except (OSError, ValueError, HTTPError, NotImplementedError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    for answer in answers:
        if answer.output_len < 0:
            answer.output_len = len(tokenizer.encode(answer.text, add_special_tokens=False))
    figures = summarise(answers, seconds, metrics, percentiles, goodput)
    _show(figures, metrics)
    if failed := [answer.error for answer in answers if answer.error]:
        print(f"{len(failed)} requests failed, the first: {failed[0]}", file=sys.stderr)
    if args.save_result or args.save_detailed:
        now = datetime.now()
        result = {
            "date": now.strftime("%Y%m%d-%H%M%S"),
            "endpoint_type": args.backend,
            "backend": args.backend,
            "label": args.label,
            "model_id": model,
            "tokenizer_id": tokenizer_id,
            "num_prompts": args.num_prompts,
            **metadata,
            "request_rate": "inf" if math.isinf(args.request_rate) else args.request_rate,
            "burstiness": args.burstiness,
            "max_concurrency": args.max_concurrency,
            **figures,
        }
        if args.save_detailed:
            result |= {
                "input_lens": [answer.prompt_len for answer in answers],
                "output_lens": [answer.output_len for answer in answers],
                "ttfts": [answer.ttft for answer in answers],
                "itls": [answer.itl for answer in answers],
                "generated_texts": [answer.text for answer in answers],
                "errors": [answer.error for answer in answers],
            }
        limit = f"-concurrency{args.max_concurrency}" if args.max_concurrency else ""
        base = Path(model).name
        name = args.result_filename or (
            f"{args.label or args.backend}-{args.request_rate:g}qps{limit}-{base}-{result['date']}.json"
        )
        path = Path(args.result_dir) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result) + "\n")
        print(f"written to {path}")
    return 0 if figures["completed"] else 1
