# SPDX-License-Identifier: Apache-2.0
"""What a front end counts of requests and of the ranks that run them, under the names that upstream's users scrape."""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Metric
from vllm.v1.metrics.stats import RequestStateStats

FINISH_REASONS = ("stop", "length", "abort", "error")

# What a rank reports (``rank_stats``) → kind, names (old ones after the first) and meaning.
RANK_METRICS: dict[str, tuple[type[Counter] | type[Gauge], tuple[str, ...], str]] = {
    "running": (Gauge, ("num_requests_running",), "Requests that run."),
    "waiting": (Gauge, ("num_requests_waiting",), "Requests that wait for a place in a step."),
    "kv_usage": (Gauge, ("kv_cache_usage_perc", "gpu_cache_usage_perc"), "KV cache blocks in use; 1 means all."),
    "prefix_queries": (
        Counter,
        ("prefix_cache_queries", "gpu_prefix_cache_queries"),
        "Tokens looked up in the prefix cache.",
    ),
    "prefix_hits": (Counter, ("prefix_cache_hits", "gpu_prefix_cache_hits"), "Tokens found in the prefix cache."),
    "preemptions": (Counter, ("num_preemptions",), "Times that a request gave up its cache blocks to others."),
    "prompt_tokens": (Counter, ("prompt_tokens",), "Prompt tokens of requests that gave their first token."),
    "generation_tokens": (Counter, ("generation_tokens",), "Tokens generated."),
    "corrupted": (Counter, ("corrupted_requests",), "Requests that NaN logits ended."),
    "steps": (Counter, ("engine_steps",), "Steps in which the rank ran the model."),
    "dummy_steps": (Counter, ("dummy_steps",), "Of these, steps on padding alone, beside ranks with work."),
    "real_rows": (Counter, ("real_rows",), "Rows of the model's input that were tokens of requests."),
    "padded_rows": (Counter, ("padded_rows",), "Rows of the model's input that were padding."),
    "wait_seconds": (Counter, ("peer_wait_seconds",), "Seconds in the agreement before steps, waiting for peers."),
}

_PER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
# Shown up to the model's longest request.
_LENGTH = tuple(float(m * 10**e) for e in range(9) for m in (1, 2, 5))

# Name → upper bounds and meaning. Seconds but for the lengths and counts.
HISTOGRAMS: dict[str, tuple[Sequence[float], str]] = {
    "time_to_first_token_seconds": (_FIRST_TOKEN, "From a request's arrival to its first token."),
    "inter_token_latency_seconds": (_PER_TOKEN, "Between two outputs of a request."),
    "time_per_output_token_seconds": (_PER_TOKEN, "The old name of inter_token_latency_seconds."),
    "request_time_per_output_token_seconds": (_PER_TOKEN, "A request's mean time between tokens, of two or more."),
    "e2e_request_latency_seconds": (_REQUEST, "From a request's arrival to its end."),
    "request_queue_time_seconds": (_REQUEST, "From a rank's taking a request to its first step."),
    "request_inference_time_seconds": (_REQUEST, "From a request's first step to its last token."),
    "request_prefill_time_seconds": (_REQUEST, "From a request's first step to its first token."),
    "request_decode_time_seconds": (_REQUEST, "From a request's first token to its last."),
    "iteration_tokens_total": (tuple(float(n) for n in (1, *(2**e for e in range(3, 15)))), "Tokens of a step."),
    "request_prompt_tokens": (_LENGTH, "Prompt tokens of a request."),
    "request_generation_tokens": (_LENGTH, "Tokens that a request got."),
    "request_max_num_generation_tokens": (_LENGTH, "Tokens of a prompt's longest completion."),
    "request_params_max_tokens": (_LENGTH, "max_tokens of a request."),
    "request_params_n": ((1.0, 2.0, 5.0, 10.0, 20.0), "n of a request."),
}
MEANINGS = {name: text for _, names, text in RANK_METRICS.values() for name in names} | {
    **{name: text for name, (_, text) in HISTOGRAMS.items()},
    "request_success": "Requests that ended, by how.",
    "cache_config_info": "Always 1; the cache is in the labels.",
}


class _Values:
    """How many values fell up to each of ``bounds``, or past the last."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class EngineMetrics:
    """Written by the one thread that takes in the ranks' outputs, read by any.

    ``rank_stats``: DP rank → what it reported last; see ``stats.rank_stats``.
    """

    def __init__(self) -> None:
        self.rank_stats: dict[int, Mapping[str, float]] = {}
        self._values: dict[int, dict[str, _Values]] = {}
        self._ends: dict[int, dict[str, int]] = {}

    def _of(self, dp_rank: int) -> dict[str, _Values]:
        if dp_rank not in self._values:
            self._values[dp_rank] = {name: _Values(bounds) for name, (bounds, _) in HISTOGRAMS.items()}
            self._ends[dp_rank] = dict.fromkeys(FINISH_REASONS, 0)
        return self._values[dp_rank]

    def record_rank(self, dp_rank: int, stats: Mapping[str, float]) -> None:
        """A rank's report after a step; where several steps passed since the last, they count as alike."""
        before = self.rank_stats.get(dp_rank, {})
        if stats["steps"] < before.get("steps", 0):
            before = {}  # the rank was started again
        self.rank_stats[dp_rank] = stats
        rows, steps, dummies = (stats[name] - before.get(name, 0) for name in ("real_rows", "steps", "dummy_steps"))
        if steps > dummies:
            self._of(dp_rank)["iteration_tokens_total"].observe(rows / (steps - dummies), int(steps - dummies))

    def record_tokens(self, dp_rank: int, times: RequestStateStats, before: float) -> None:
        """Tokens of a sequence came; those before them at ``before``, 0 where they are the first."""
        values = self._of(dp_rank)
        if before:
            values["inter_token_latency_seconds"].observe(times.last_token_ts - before)
            values["time_per_output_token_seconds"].observe(times.last_token_ts - before)
        else:
            values["time_to_first_token_seconds"].observe(times.first_token_latency)

    def record_finished(
        self, dp_rank: int, times: RequestStateStats, reason: str, num_prompt: int, max_tokens: int | None
    ) -> None:
        """A sequence ended, after its last tokens were taken in."""
        values = self._of(dp_rank)
        self._ends[dp_rank][reason] = self._ends[dp_rank].get(reason, 0) + 1
        values["e2e_request_latency_seconds"].observe(time.time() - times.arrival_time)
        values["request_prompt_tokens"].observe(num_prompt)
        values["request_generation_tokens"].observe(times.num_generation_tokens)
        if max_tokens is not None:
            values["request_params_max_tokens"].observe(max_tokens)
        if times.first_token_ts:
            decode = times.last_token_ts - times.first_token_ts
            values["request_queue_time_seconds"].observe(times.scheduled_ts - times.queued_ts)
            values["request_inference_time_seconds"].observe(times.last_token_ts - times.scheduled_ts)
            values["request_prefill_time_seconds"].observe(times.first_token_ts - times.scheduled_ts)
            values["request_decode_time_seconds"].observe(decode)
            if times.num_generation_tokens > 1:
                mean = decode / (times.num_generation_tokens - 1)
                values["request_time_per_output_token_seconds"].observe(mean)

    def record_request(self, dp_rank: int, params: SamplingParams, longest: int) -> None:
        """A request, all its sequences, ended; the longest has ``longest`` tokens."""
        values = self._of(dp_rank)
        values["request_params_n"].observe(params.n)
        values["request_max_num_generation_tokens"].observe(longest)

    def snapshot(
        self, model_name: str, ranks: Sequence[int], max_model_len: int, block_size: int, labelled: int | None = None
    ) -> Iterator[Metric]:
        """Everything as it is now, metric by metric, of each DP rank in ``ranks``; the label ``engine`` says which
        (``labelled`` in its place, for an engine that holds one rank alone)."""
        by_label = {str(rank if labelled is None else labelled): rank for rank in ranks}
        labels = {engine: {"model_name": model_name, "engine": engine} for engine in by_label}
        for stat, (kind, names, _) in RANK_METRICS.items():
            for name, (engine, rank) in itertools.product(names, by_label.items()):
                value = self.rank_stats.get(rank, {}).get(stat, 0)
                yield kind(name=f"vllm:{name}", labels=labels[engine], value=value)
        for engine, rank in by_label.items():
            cache = {
                "block_size": str(block_size),
                "num_gpu_blocks": f"{self.rank_stats.get(rank, {}).get('kv_blocks', 0):.0f}",
            }
            yield Gauge(name="vllm:cache_config_info", labels={**labels[engine], **cache}, value=1)
        for engine, rank in by_label.items():
            self._of(rank)
            for reason, count in list(self._ends[rank].items()):
                yield Counter(
                    name="vllm:request_success", labels={**labels[engine], "finished_reason": reason}, value=count
                )
        for name, (bounds, _) in HISTOGRAMS.items():
            shown = len(bounds) if bounds is not _LENGTH else sum(bound <= max_model_len for bound in bounds)
            for engine, rank in by_label.items():
                values = self._of(rank)[name]
                up_to = list(itertools.accumulate(list(values.counts)))
                buckets: dict[str, Any] = {str(bound): up_to[i] for i, bound in enumerate(bounds[:shown])}
                buckets["+Inf"] = up_to[-1]
                yield Histogram(
                    name=f"vllm:{name}", labels=labels[engine], count=up_to[-1], sum=values.sum, buckets=buckets
                )
