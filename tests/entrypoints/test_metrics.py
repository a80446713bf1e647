# SPDX-License-Identifier: Apache-2.0
"""The engine's metrics: counted by hand over runs on a clock that only the steps move, read by Prometheus' parser."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import launcher
import pytest
import tiny_models as tiny
from engine_fakes import FakeWorker
from layout_checks import rank_llm
from prometheus_client.parser import text_string_to_metric_families

from vllm import LLM, SamplingParams
from vllm.v1.core.sched import scheduler
from vllm.v1.engine import llm_engine, output_processor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics import engine_metrics, stats
from vllm.v1.metrics.engine_metrics import EngineMetrics
from vllm.v1.metrics.prometheus import Exposition
from vllm.v1.outputs import EngineCoreOutput
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

# Upstream's bucket lists, as its dashboards expect them.
PER_TOKEN = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0"
FIRST_TOKEN = (
    "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 160.0 640.0 2560.0"
)
REQUEST = "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0 480.0 960.0 1920.0 7680.0"
UP_TO_512 = "1.0 2.0 5.0 10.0 20.0 50.0 100.0 200.0 500.0"
BUCKETS = {
    "time_to_first_token_seconds": FIRST_TOKEN,
    "inter_token_latency_seconds": PER_TOKEN,
    "time_per_output_token_seconds": PER_TOKEN,
    "request_time_per_output_token_seconds": PER_TOKEN,
    "e2e_request_latency_seconds": REQUEST,
    "request_queue_time_seconds": REQUEST,
    "request_inference_time_seconds": REQUEST,
    "request_prefill_time_seconds": REQUEST,
    "request_decode_time_seconds": REQUEST,
    "iteration_tokens_total": "1.0 8.0 16.0 32.0 64.0 128.0 256.0 512.0 1024.0 2048.0 4096.0 8192.0 16384.0",
    "request_prompt_tokens": UP_TO_512,
    "request_generation_tokens": UP_TO_512,
    "request_max_num_generation_tokens": UP_TO_512,
    "request_params_max_tokens": UP_TO_512,
    "request_params_n": "1.0 2.0 5.0 10.0 20.0",
}
COUNTERS = """prompt_tokens generation_tokens num_preemptions prefix_cache_queries prefix_cache_hits
    gpu_prefix_cache_queries gpu_prefix_cache_hits corrupted_requests engine_steps dummy_steps real_rows padded_rows
    peer_wait_seconds request_success"""
GAUGES = "num_requests_running num_requests_waiting kv_cache_usage_perc gpu_cache_usage_perc cache_config_info"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Seconds that pass only where a test says so; ``monotonic`` is 1000 behind ``time``."""
    clock = SimpleNamespace(now=5000.0)
    clock.time, clock.monotonic = lambda: clock.now, lambda: clock.now - 1000
    for module in (scheduler, llm_engine, output_processor, engine_metrics, stats):
        monkeypatch.setattr(module, "time", clock)
    return clock


def read(text: bytes) -> tuple[dict[str, str], Samples]:
    """Types by family and values by sample, as Prometheus' own parser reads them."""
    families = list(text_string_to_metric_families(text.decode()))
    samples = {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}
    assert len(samples) == sum(len(family.samples) for family in families), "a sample comes twice"
    return {family.name: family.type for family in families}, samples


def scrape(metrics: EngineMetrics, ranks: int = 1) -> tuple[dict[str, str], Samples]:
    return read(Exposition(lambda: metrics.snapshot("m", range(ranks), 512, 16)).text())


def value(samples: Samples, name: str, engine: int = 0, **labels: str) -> float:
    return samples[f"vllm:{name}", frozenset({"model_name": "m", "engine": str(engine), **labels}.items())]


def test_names_types_and_buckets_are_upstreams():
    types, samples = scrape(EngineMetrics(), ranks=2)
    expected = {f"vllm:{name}": "counter" for name in COUNTERS.split()}
    expected |= {f"vllm:{name}": "gauge" for name in GAUGES.split()} | {f"vllm:{name}": "histogram" for name in BUCKETS}
    assert {name: kind for name, kind in types.items() if name.startswith("vllm:")} == expected
    assert "process_resident_memory_bytes" in types
    for name, bounds in BUCKETS.items():
        for engine in (0, 1):
            labels = {"model_name": "m", "engine": str(engine)}
            found = [
                dict(key)["le"]
                for (sample, key) in samples
                if sample == f"vllm:{name}_bucket" and labels.items() <= dict(key).items()
            ]
            assert found == [*bounds.split(), "+Inf"]
    for reason in ("stop", "length", "abort", "error"):
        assert value(samples, "request_success_total", 1, finished_reason=reason) == 0
    assert value(samples, "cache_config_info", 1, block_size="16", num_gpu_blocks="0") == 1


def test_a_run_counted_by_hand(tiny_llama: Path, fake_worker: type[FakeWorker], clock: SimpleNamespace, monkeypatch):
    """Two places, three sequences. Steps of 0.25 s: the first two run; the third waits for the first to end.

    step  1: a (3 tokens) and b0 (2 tokens) run     5 tokens
    steps 2, 3: a ends with its third token         2, 2
    step  4: b1 (2 tokens) starts beside b0         3
    steps 5-7: b0 has its 5 in step 5               2, 1, 1
    step  8: b1 has its 5                           1
    """

    def before_step(worker: FakeWorker, output: object) -> None:
        clock.now += 0.25

    monkeypatch.setattr(FakeWorker, "before_step", staticmethod(before_step))
    llm = LLM(str(tiny_llama), max_num_seqs=2, max_model_len=512, disable_log_stats=False, block_size=16)
    params = [
        SamplingParams(max_tokens=3, ignore_eos=True),
        SamplingParams(n=2, max_tokens=5, ignore_eos=True, stop_token_ids=[99]),
    ]
    llm.generate([[1, 2, 3], [4, 5]], params, use_tqdm=False)
    metrics = llm.llm_engine.output_processor.metrics
    assert metrics is not None
    _, samples = scrape(metrics)
    assert value(samples, "prompt_tokens_total") == 3 + 2 + 2
    assert value(samples, "generation_tokens_total") == 3 + 5 + 5
    assert value(samples, "request_success_total", finished_reason="length") == 3
    assert value(samples, "num_requests_running") == value(samples, "num_requests_waiting") == 0
    sums = {
        "time_to_first_token_seconds": (3, 0.25 + 0.25 + 1.0),
        "inter_token_latency_seconds": (10, 10 * 0.25),
        "time_per_output_token_seconds": (10, 10 * 0.25),
        "request_time_per_output_token_seconds": (3, 3 * 0.25),
        "e2e_request_latency_seconds": (3, 0.75 + 1.25 + 2.0),
        "request_queue_time_seconds": (3, 0.75),
        "request_prefill_time_seconds": (3, 3 * 0.25),
        "request_decode_time_seconds": (3, 0.5 + 1.0 + 1.0),
        "request_inference_time_seconds": (3, 0.75 + 1.25 + 1.25),
        "request_prompt_tokens": (3, 7),
        "request_generation_tokens": (3, 13),
        "request_params_max_tokens": (3, 13),
        "request_params_n": (2, 3),
        "request_max_num_generation_tokens": (2, 8),
    }
    for name, (count, total) in sums.items():
        assert (value(samples, f"{name}_count"), value(samples, f"{name}_sum")) == (count, pytest.approx(total)), name
    # 0.25 belongs to the bucket that ends with it, 1.0 too.
    edges = {"0.1": 0, "0.25": 2, "0.75": 2, "1.0": 3, "+Inf": 3}
    assert {le: value(samples, "time_to_first_token_seconds_bucket", le=le) for le in edges} == edges
    # The same numbers from the engine itself, by the names that upstream's get_metrics gives.
    own = {(m.name, m.labels.get("finished_reason")): m for m in llm.get_metrics()}
    assert own["vllm:generation_tokens", None].value == 13
    assert own["vllm:request_success", "length"].value == 3
    first = own["vllm:time_to_first_token_seconds", None]
    assert (first.count, first.sum, first.buckets["1.0"]) == (3, pytest.approx(1.5), 3)
    llm.shutdown()


def test_ends_of_every_kind_and_ranks_apart(clock: SimpleNamespace):
    processor = OutputProcessor(None, log_stats=True)
    params = SamplingParams(max_tokens=9, detokenize=False)
    for name in ("stop", "error", "late", "never"):
        processor.add_request(name, None, [1], params)
        processor.accepted(name)
    processor.add_request("refused", None, [1], params)
    clock.now += 2
    processor.process_outputs([EngineCoreOutput("stop", [5], finish_reason="stop", queued_seconds=0.5)], dp_rank=1)
    processor.process_outputs([EngineCoreOutput("error", [], finish_reason="error", stop_reason="NaN")], dp_rank=1)
    processor.process_outputs([EngineCoreOutput("late", [5])])
    processor.abort_requests(["late", "never", "unknown", "refused"])
    assert processor.metrics is not None
    _, samples = scrape(processor.metrics, ranks=2)
    ends = {
        (engine, reason): value(samples, "request_success_total", engine, finished_reason=reason)
        for engine, reason in itertools.product((0, 1), ("stop", "length", "abort", "error"))
    }
    assert {end: count for end, count in ends.items() if count} == {(1, "stop"): 1, (1, "error"): 1, (0, "abort"): 2}
    # What gave no token has no time to a first one, and no mean between tokens.
    assert [value(samples, "time_to_first_token_seconds_count", engine) for engine in (0, 1)] == [1, 1]
    assert [value(samples, "request_generation_tokens_count", engine) for engine in (0, 1)] == [2, 2]
    assert value(samples, "request_time_per_output_token_seconds_count", 1) == 0
    assert value(samples, "request_queue_time_seconds_sum", 1) == 0.5
    assert value(samples, "request_prefill_time_seconds_sum", 1) == 1.5


def test_prefix_hits_preemptions_and_cache_use(tiny_llama: Path, fake_worker: type[FakeWorker]):
    """Blocks of 16: of a prompt of 40 that comes again 32 tokens are found. Seven blocks do not hold two growing
    requests of 40 tokens, so the second gives way."""
    llm = LLM(str(tiny_llama), max_num_seqs=4, max_model_len=128, disable_log_stats=False, block_size=16)
    prompt = list(range(1, 41))
    one = SamplingParams(max_tokens=2, ignore_eos=True)
    for _ in range(2):
        llm.generate([prompt], one, use_tqdm=False)
    found = {m.name: m for m in llm.get_metrics()}
    assert (found["vllm:prefix_cache_queries"].value, found["vllm:prefix_cache_hits"].value) == (80, 32)
    assert found["vllm:gpu_prefix_cache_hits"].value == 32
    assert found["vllm:num_preemptions"].value == found["vllm:kv_cache_usage_perc"].value == 0
    pool = llm.llm_engine.scheduler.kv_cache_manager.pool
    held = pool.allocate(pool.num_free - 7)
    assert {m.name: m for m in llm.get_metrics()}["vllm:kv_cache_usage_perc"].value == len(held) / (len(held) + 7)
    other = [token + 100 for token in prompt]
    llm.generate([prompt, other], SamplingParams(max_tokens=30, ignore_eos=True), use_tqdm=False)
    found = {m.name: m for m in llm.get_metrics()}
    assert found["vllm:num_preemptions"].value >= 1
    assert found["vllm:prefix_cache_queries"].value == 160, "a request looks its prompt up once"
    llm.shutdown()


def uneven(folder: str, begun: Path) -> tuple[dict[str, float], list[tuple[str, str, float]], float, float]:
    """With the seconds in the calls that agree on a step, and those in the steps' part around them."""
    import rank_checks

    llm = rank_llm(folder, 1, 2, True, disable_log_stats=False)
    rank, inside, around = rank_checks.own_rank(), list[float](), list[float]()

    def timed(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            if rank == 0 and seconds is inside:
                begun.touch()
            result = call(*args, **kwargs)
            seconds.append(time.perf_counter() - began)
            return result

        return wrapper

    agree = gpu_model_runner.coordinate_batch_across_dp
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GPUModelRunner, "_agree", timed(GPUModelRunner._agree, around))
        patch.setattr(gpu_model_runner, "coordinate_batch_across_dp", timed(agree, inside))
        if rank == 1:
            while not begun.exists():
                time.sleep(0.005)
            time.sleep(0.5)
        tiny.generate(llm, [tiny.prompt(4 if rank else 9)], 3 if rank else 6)
    found = stats.rank_stats(llm.llm_engine)
    shown = [(m.name, m.labels["engine"], m.value) for m in llm.get_metrics() if hasattr(m, "value")]
    llm.shutdown()
    return found, shown, sum(inside), sum(around)


@pytest.mark.multiprocess
def test_rows_dummies_and_waits_of_uneven_ranks(tmp_path: Path):
    """Rank 0: 9 rows, then 5 of one token. Rank 1: 4 rows and 5 of padding, two tokens, three dummies of one row."""
    env = {"VLLM_DP_PAD_TO_MAX": "1"}
    found = launcher.run_ranks(uneven, 2, tiny.checkpoint("mixtral"), tmp_path / "begun", env=env, deadline_s=180)
    (first, shown, *_), (second, shown_there, *_) = found
    counts = ("steps", "dummy_steps", "real_rows", "padded_rows", "prompt_tokens", "generation_tokens")
    assert [first[name] for name in counts] == [6, 0, 14, 0, 9, 6]
    assert [second[name] for name in counts] == [6, 3, 6, 8, 4, 3]
    assert first["step"] == second["step"] == 7, "the last agreement finds that nobody has work"
    assert first["wait_seconds"] > 0.5, "the other rank began half a second after this one"
    for counted, _, inside, around in found:
        assert 0 < inside - 1e-6 <= counted["wait_seconds"] <= around + 1e-6
    assert ("vllm:padded_rows", "0", 0) in shown
    assert ("vllm:padded_rows", "1", 8) in shown_there
    assert ("vllm:dummy_steps", "1", 3) in shown_there


def test_a_rank_started_again_counts_from_zero():
    metrics = EngineMetrics()
    report = {"steps": 4, "dummy_steps": 1, "real_rows": 30}
    metrics.record_rank(0, report)
    metrics.record_rank(0, {"steps": 1, "dummy_steps": 0, "real_rows": 7})
    _, samples = scrape(metrics)
    assert value(samples, "iteration_tokens_total_count") == 3 + 1
    assert value(samples, "iteration_tokens_total_sum") == 37
    assert value(samples, "engine_steps_total") == 1
