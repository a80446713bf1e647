# SPDX-License-Identifier: Apache-2.0
"""How much of the memory goes to the cache: what is free, less what a step takes, up to what can be used."""

from __future__ import annotations

import functools
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import launcher
import pytest
import rank_checks
import tiny_hybrids as hybrids
import tiny_models as tiny
import torch

from vllm import LLM, SamplingParams
from vllm.distributed import destroy_distributed_environment
from vllm.kernels import reference, table
from vllm.platforms import CpuPlatform, Platform, get_platform
from vllm.platforms.host_limits import Limit
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.paged import PagedAttentionImpl
from vllm.v1.worker import gpu_model_runner, step_memory

CPU = torch.device("cpu")
MIB = 1 << 20
STEP_BYTES = 100_000
BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4  # of the tiny llama: 2 layers, key and value, 2 heads of 16, fp32


def make_llm(name: str = "llama", **settings: Any) -> Any:
    return tiny.make_llm(name, **{"num_gpu_blocks_override": None, "max_num_seqs": 4, **settings})


def num_tokens(llm: Any) -> int:
    config = llm.llm_engine.worker.runner.kv_cache_config
    return (config.num_blocks - 1) * config.block_size


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.worker.runner


# --- the plan ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the limit of this process, and what a step takes, to known numbers."""

    def set_limit(free: int) -> None:
        monkeypatch.setattr(gpu_model_runner, "largest_step_bytes", lambda runner: STEP_BYTES)
        monkeypatch.setattr(CpuPlatform, "memory_limits", lambda self, device, share: [Limit("made up", free * share)])

    return set_limit


def test_the_cache_is_as_large_as_the_requests_and_as_much_again_for_prefixes() -> None:
    assert num_tokens(make_llm(max_model_len=100)) == 4 * 112
    assert num_tokens(make_llm(max_model_len=100, enable_prefix_caching=True)) == 2 * 4 * 112
    assert num_tokens(make_llm(max_model_len=100, kv_cache_memory_bytes=MIB)) == 4 * 112
    named = make_llm(max_model_len=100, enable_prefix_caching=True, kv_cache_memory_bytes=MIB)
    assert num_tokens(named) == MIB // BYTES_PER_TOKEN - 16


def test_what_a_step_takes_is_not_free_for_the_cache(limited: Any, caplog: pytest.LogCaptureFixture) -> None:
    limited(400_000)
    with caplog.at_level(logging.INFO, "vllm"):
        llm = make_llm(max_model_len=100, gpu_memory_utilization=0.5)
    blocks = (400_000 // 2 - STEP_BYTES) // (16 * BYTES_PER_TOKEN)
    assert num_tokens(llm) == (blocks - 1) * 16
    assert "under made up by 1 rank(s), a step takes 0.000 GiB" in caplog.text
    limited(50_000)
    with pytest.raises(ValueError, match=r"\(0 bytes available.* lower max_model_len to 0 .*limit that the log names"):
        make_llm()


def test_a_named_size_is_taken_with_a_warning_where_it_may_not_fit(
    limited: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(400_000)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", str(MIB / 2**30))
    with caplog.at_level(logging.WARNING, "vllm"):
        assert num_tokens(make_llm(enable_prefix_caching=True)) == MIB // BYTES_PER_TOKEN - 16
    assert "0.001 GiB is asked for, which may fail in service: 0.000 GiB may be taken under made up" in caplog.text


def plan_of_rank(folder: str, free: list[int], pool: str | None, **settings: Any) -> tuple[int, int]:
    from vllm import LLM

    mine = free[rank_checks.own_rank()]
    gpu_model_runner.largest_step_bytes = lambda runner: STEP_BYTES  # type: ignore[assignment]
    CpuPlatform.memory_limits = lambda self, device, share: [Limit("made up", mine, pool)]  # type: ignore[method-assign]
    llm = LLM(folder, tensor_parallel_size=2, dtype="float32", skip_tokenizer_init=True, max_model_len=320, **settings)
    planned = num_tokens(llm)
    llm.shutdown()
    return planned, llm.llm_engine.vllm_config.cache_config.block_size


@pytest.mark.multiprocess
def test_all_ranks_get_the_smallest_rank_s_share() -> None:
    folder, per_block = tiny.checkpoint("llama"), 16 * BYTES_PER_TOKEN // 2
    blocks = 50
    least = STEP_BYTES + blocks * per_block
    for free, pool in (([least, 3 * least], None), ([3 * least, least], None), ([2 * least, 9 * least], "shared")):
        planned = launcher.run_ranks(plan_of_rank, 2, folder, free, pool, deadline_s=180)
        assert planned == [((blocks - 1) * 16, 16)] * 2


def test_engines_of_one_host_that_never_meet_divide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As mpirun starts them, each a world of its own."""
    destroy_distributed_environment()
    for name, number in {"PMI_RANK": 1, "PMI_SIZE": 2, "MPI_LOCALRANKID": 1, "MPI_LOCALNRANKS": 2}.items():
        monkeypatch.setenv(name, str(number))
    free = 2 * (STEP_BYTES + 50 * 16 * BYTES_PER_TOKEN)
    monkeypatch.setattr(gpu_model_runner, "largest_step_bytes", lambda runner: STEP_BYTES)
    monkeypatch.setattr(CpuPlatform, "memory_limits", lambda self, device, share: [Limit("made up", free, "host")])
    llm = make_llm()
    planned = num_tokens(llm)
    llm.shutdown()
    destroy_distributed_environment()
    assert planned == 49 * 16


# --- what a step takes ------------------------------------------------------------------------------------------------


def test_peak_of_what_lives_at_one_time() -> None:
    weight = torch.ones(1000)
    with torch.inference_mode(), get_platform("cpu").measure_peak(CPU) as measured:
        a = torch.empty(256)
        b = a.view(2, 128) + 1
        del a
        weight.add_(1)[3:].neg_()
        c = torch.cat([b, b])
        del b
        d = torch.zeros(100, 100)
    assert measured.bytes == c.nbytes + d.nbytes == 2048 + 40000


def test_a_device_is_asked_for_its_own_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        reserved, peak, calls = 500, 500, ""

        def memory_reserved(self, device: torch.device) -> int:
            return self.reserved

        def max_memory_reserved(self, device: torch.device) -> int:
            return self.peak

        def reset_peak_memory_stats(self, device: torch.device) -> None:
            self.peak = self.reserved

    class Device(Platform):
        device_type = "made_up"

        def empty_cache(self) -> None:
            memory.reserved = 300

    memory = Memory()
    monkeypatch.setattr(torch, "made_up", memory, raising=False)
    with Device().measure_peak(CPU) as measured:
        assert memory.peak == 300
        memory.peak = 1000
    assert measured.bytes == 700


@functools.cache
def make(name: str) -> Any:
    settings = {"num_gpu_blocks_override": None, "max_num_seqs": 64, "max_num_batched_tokens": 256}
    if name in hybrids.CHECKPOINTS:
        return hybrids.make_llm(name, **settings)
    return make_llm(name, **settings)


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3-next", "qwen3.5-moe"])
def test_a_small_step_scaled_up_holds_the_largest(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of it by itself, so that none is left out because another is planned too large."""
    runner = runner_of(make(name))
    with torch.inference_mode():
        full = step_memory._peaks(runner, 256, 64, 64, 64)
        planned = step_memory.largest_step_bytes(runner)
        small = step_memory._peaks(runner, step_memory._SMALL_TOKENS, *[step_memory._SMALL_ROWS] * 3)
    beside = runner.step_buffers.nbytes + runner.input_batch.nbytes + step_memory._KERNEL_SCRATCH
    assert sum(full) <= planned - beside <= 6 * sum(full) + MIB, (full, planned)
    monkeypatch.setattr(step_memory, "_peaks", lambda *_: [0, 0, 0, 0])
    beside = step_memory.largest_step_bytes(runner)
    for part, bytes_ in enumerate(full):
        only = [measured * (at == part) for at, measured in enumerate(small)]
        monkeypatch.setattr(step_memory, "_peaks", lambda *_, only=only: only)
        assert bytes_ <= step_memory.largest_step_bytes(runner) - beside, (part, bytes_, only)


@pytest.mark.parametrize("name", ["llama", "qwen3-next"])
def test_no_buffer_is_made_or_grows_in_service_where_the_size_was_given(name: str) -> None:
    settings = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 8 * MIB, "max_num_batched_tokens": 256}
    llm = hybrids.make_llm(name, **settings) if name in hybrids.CHECKPOINTS else make_llm(name, **settings)
    buffers = runner_of(llm).step_buffers
    before = {key: (buffer.data_ptr(), len(buffer)) for key, buffer in buffers._buffers.items()}
    assert before
    tiny.generate(llm, [tiny.prompt(300)], 3)
    after = {key: (buffer.data_ptr(), len(buffer)) for key, buffer in buffers._buffers.items()}
    assert after == before
    assert {rows for _, rows in before.values()} == {256}


def test_what_a_real_step_takes_was_planned(tmp_path: Path) -> None:
    """Random sampling, penalties and prompt log-probabilities of a vocabulary beside which the model is small: what
    the sampler takes is more than the plan has to spare elsewhere."""
    config = json.loads((Path(tiny.checkpoint("llama")) / "config.json").read_text()) | {"vocab_size": 8192}
    (tmp_path / "config.json").write_text(json.dumps(config))
    llm = LLM(
        str(tmp_path), load_format="dummy", skip_tokenizer_init=True, dtype="float32", max_model_len=100,
        max_num_batched_tokens=128, max_num_seqs=64, max_logprobs=20,
    )  # fmt: skip
    runner = runner_of(llm)
    with torch.inference_mode():
        planned = step_memory.largest_step_bytes(runner)
    planned -= runner.step_buffers.nbytes + runner.input_batch.nbytes + step_memory._KERNEL_SCRATCH
    peaks = []
    execute = runner.execute_model

    def measured(*args: Any) -> Any:
        with runner.platform.measure_peak(CPU) as peak:
            out = execute(*args)
        peaks.append(peak.bytes)
        return out

    runner.execute_model = measured
    params = SamplingParams(
        temperature=1.0, top_k=100, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.5, logprobs=20,
        prompt_logprobs=20, max_tokens=3, ignore_eos=True, detokenize=False, seed=1,
    )  # fmt: skip
    llm.generate([{"prompt_token_ids": list(tiny.prompt(2, seed))} for seed in range(64)], params, use_tqdm=False)
    assert 6 * MIB < max(peaks) <= planned, (max(peaks), planned)


def test_attention_in_plain_torch_stays_within_its_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    heads, kv_heads, size, length, queries = 8, 2, 16, 512, 128
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "TORCH_PAGED")
    table.choose.cache_clear()
    impl = PagedAttentionImpl(heads, size, 0.25, kv_heads, 0)
    caches = (torch.randn(33, kv_heads, 16, size), torch.randn(33, kv_heads, 16, size))
    starts, lengths = torch.tensor([0, queries], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    slots = torch.arange(16 + length - queries, 16 + length)
    blocks = torch.arange(1, 33, dtype=torch.int32)[None]
    metadata = CommonAttentionMetadata(
        starts, starts, lengths, lengths, blocks, slots, torch.zeros(1), 1, queries, queries, queries, length
    )
    q, k, v = (torch.randn(queries, n, size) for n in (heads, kv_heads, kv_heads))
    results, bounds = [], []
    for scores in (1 << 24, heads * length * 10):
        monkeypatch.setattr(reference, "_MOST_SCORES", scores)
        out = torch.full_like(q, torch.nan)
        with get_platform("cpu").measure_peak(CPU) as peak, torch.inference_mode():
            impl.forward(q, k, v, caches, metadata, out)
        bounds.append(impl.workspace_bytes(queries, length, torch.float32))
        assert 0 < peak.bytes <= bounds[-1]
        results.append(out)
    assert bounds[1] < bounds[0]
    torch.testing.assert_close(results[0], results[1])


# --- a process under a limit ------------------------------------------------------------------------------------------

LIMITED = """
import resource, sys
sys.path[:0] = sys.argv[2:]
import torch, vllm.v1.engine.llm_engine, vllm.entrypoints.llm
from vllm import LLM, SamplingParams
page = resource.getpagesize()
used = int(open("/proc/self/statm").read().split()[0]) * page
resource.setrlimit(resource.RLIMIT_AS, (used + (500 << 20),) * 2)
llm = LLM(sys.argv[1], load_format="dummy", skip_tokenizer_init=True, max_num_seqs=128, max_model_len=2048)
prompts = [{"prompt_token_ids": [3 + i] * 1500} for i in range(40)]
params = SamplingParams(max_tokens=2, detokenize=False, ignore_eos=True)
outputs = llm.generate(prompts, params, use_tqdm=False)
config = llm.llm_engine.worker.runner.kv_cache_config
print("served", sum(len(output.outputs[0].token_ids) for output in outputs), config.total_bytes >> 20)
print("compiler imported", "torch._dynamo" in sys.modules)
"""


def test_an_engine_under_an_address_space_limit_plans_a_cache_that_fits_and_serves(tmp_path: Path) -> None:
    config = json.loads((Path(tiny.checkpoint("llama")) / "config.json").read_text())
    # 4096 bytes a token and layer: 128 requests of 2048 tokens would fill 2 GiB.
    config |= {"num_key_value_heads": 8, "num_attention_heads": 8, "head_dim": 64, "max_position_embeddings": 2048}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path), *sys.path],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    served, mib = done.stdout.split("served ")[1].split()[:2]
    assert served == "80"
    assert 100 < int(mib) < 450
    # Which would be a second or two of every rank's start.
    assert "compiler imported False" in done.stdout
