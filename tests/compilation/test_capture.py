# SPDX-License-Identifier: Apache-2.0
"""Captured steps of an engine: what was baked in is found at capture, and a replayed step is the eager one, bit by bit.

The kind of fault: a value or an address of the batch that a step was captured with stays in it, and later batches are
computed with it. Each way in which that happened in the field is put back here.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gzip
import json
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_deepseeks
import tiny_dense
import tiny_experts
import tiny_hybrids as hybrids
import tiny_models as tiny
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm import SamplingParams
from vllm.compilation import cuda_graph, recording
from vllm.compilation.cuda_graph import StepGraphs, Trial
from vllm.compilation.recording import CaptureError, MemoryPool
from vllm.kernels import cpu
from vllm.kernels.cpu.ops import kernels_available
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backends.paged import PagedAttentionImpl
from vllm.v1.transfers import PersistentBuffer
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

pytestmark = pytest.mark.skipif(not kernels_available(), reason="the C++ kernels cannot be built here")

SIZES = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4]}, "max_num_seqs": 4}


def make_llm(name: str, **kwargs: Any) -> Any:
    where = hybrids if name in hybrids.NAMES else tiny
    return where.make_llm(name, **{**SIZES, **kwargs})


def runner_of(llm: Any) -> GPUModelRunner:
    return llm.llm_engine.engine_core.worker.runner


def captured(llm: Any) -> list[int]:
    return sorted(runner_of(llm).graphs.steps)


# --- faults put back --------------------------------------------------------------------------------------------------


def patch_attention(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """``change(metadata)``: what attention is given in the place of the step's metadata."""
    forward = PagedAttentionImpl.forward

    def patched(self: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any, *rest: Any) -> None:
        forward(self, query, key, value, kv_cache, change(metadata), *rest)

    monkeypatch.setattr(PagedAttentionImpl, "forward", patched)


def with_(metadata: Any, **changes: Any) -> Any:
    """As ``dataclasses.replace``, without its checks, which ask the host."""
    changed = copy.copy(metadata)
    vars(changed).update(changes)
    return changed


def longest_baked(metadata: Any) -> Any:
    """The case that named this: sizes for 8 times the blocks that the host knew of, where a replay knows none."""
    most = 8 * max(cdiv(metadata.max_seq_len, 8), 1) * 8
    return with_(metadata, seq_lens=metadata.seq_lens.clamp(max=most))


def scale_baked(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = PagedAttentionImpl.forward

    def patched(self: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any, *rest: Any) -> None:
        scale, self.scale = self.scale, self.scale * (1 + metadata.max_seq_len / 1000)
        forward(self, query, key, value, kv_cache, metadata, *rest)
        self.scale = scale

    monkeypatch.setattr(PagedAttentionImpl, "forward", patched)


def requests_baked(metadata: Any) -> Any:
    real = int((np.diff(metadata.query_start_loc_cpu.numpy()) > 0).sum())
    return with_(metadata, query_start_loc=metadata.query_start_loc[: real + 1])


def built_anew(metadata: Any) -> Any:
    return with_(metadata, seq_lens=torch.tensor(metadata.seq_lens_cpu.tolist(), dtype=torch.int32))


def built_anew_elsewhere(metadata: Any) -> Any:
    return with_(metadata, seq_lens=torch.from_numpy(metadata.seq_lens_cpu.numpy().copy()))


def test_longest_context_baked_in(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_attention(monkeypatch, longest_baked)
    with pytest.raises(CaptureError, match=r"capturing 4 rows, in model\.layers\.0.*: aten\.clamp.* \d+ and \d+"):
        make_llm("llama")


def test_scale_of_the_longest_context_baked_in(monkeypatch: pytest.MonkeyPatch) -> None:
    scale_baked(monkeypatch)
    with pytest.raises(CaptureError, match=r"layers\.0.*: vc_paged_attention was given scale=0\.\d+ and 0\.\d+"):
        make_llm("llama")


def test_number_of_requests_baked_in(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_attention(monkeypatch, requests_baked)
    with pytest.raises(CaptureError, match=r"vc_paged_attention was given requests=4 and 2"):
        make_llm("llama")


@pytest.mark.parametrize(
    ("build", "found"),
    [
        (built_anew, r"torch\.tensor was given argument 0: '\[.+\]' and '\[.+\]'"),
        (built_anew_elsewhere, r"vc_paged_attention was given lens=0x\w+ and 0x\w+"),
    ],
)
def test_metadata_built_anew_in_each_step(monkeypatch: pytest.MonkeyPatch, build: Any, found: str) -> None:
    patch_attention(monkeypatch, build)
    with pytest.raises(CaptureError, match=found):
        make_llm("llama")


def test_buffer_reallocated(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = GPUModelRunner.fill_metadata

    def elsewhere(self: Any, *args: Any) -> Any:
        common = fill(self, *args)
        return dataclasses.replace(common, slot_mapping=common.slot_mapping.clone())

    monkeypatch.setattr(GPUModelRunner, "fill_metadata", elsewhere)
    with pytest.raises(CaptureError, match=r"vc_reshape_and_cache was given slots=0x\w+ and 0x\w+"):
        make_llm("llama")


@pytest.mark.parametrize("name", ["slot_mapping", "seq_lens"])
def test_tail_not_rewritten(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fill = PersistentBuffer.fill

    def only_real(self: Any, values: np.ndarray, num_padded: int) -> torch.Tensor:
        if self.pad_value == -1 if name == "slot_mapping" else self is buffers[0].seq_lens:
            self.array[: len(values)] = values
            return self.upload(num_padded)
        return fill(self, values, num_padded)

    buffers: list[Any] = []
    make = GPUModelRunner.initialize_kv_cache
    monkeypatch.setattr(
        GPUModelRunner, "initialize_kv_cache", lambda self, config: (buffers.append(self.buffers), make(self, config))
    )
    monkeypatch.setattr(PersistentBuffer, "fill", only_real)
    with pytest.raises(CaptureError, match=rf"\['{name}'.*\] keep rows of an earlier batch"):
        make_llm("llama")


def test_branch_on_the_longest_context(monkeypatch: pytest.MonkeyPatch) -> None:
    def branch(metadata: Any) -> Any:
        if metadata.is_captured and metadata.max_seq_len > 30:
            metadata.seq_lens.add_(0)
        return metadata

    patch_attention(monkeypatch, branch)
    with pytest.raises(CaptureError, match=r"aten\.add_.*with another: the model asks the host|calls with one batch"):
        make_llm("llama", block_size=16)


def test_value_of_the_step_read_by_the_host(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """No fault, but nothing to capture: all steps run eagerly, and the log says why."""

    def asks(metadata: Any) -> Any:
        return with_(metadata, max_seq_len=int(metadata.seq_lens.max()))

    patch_attention(monkeypatch, asks)
    llm = make_llm("llama")
    assert not captured(llm)
    told = re.findall(
        r"steps of 1 2 4 rows are not captured: aten\.\S+ brings a value of the step to the host in (.*)", caplog.text
    )
    assert told == ["model.layers.0.self_attn.attn"]
    assert tiny.tokens(tiny.generate(llm, [tiny.prompt(5)], 4)) == [tiny.greedy("llama", tiny.prompt(5), 4)]
    llm.shutdown()


def test_a_wrong_replay_is_found_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no comparison of arguments can see: here the call that is lost in both recordings."""
    program = cuda_graph._program
    monkeypatch.setattr(cuda_graph, "_program", lambda calls: program([c for c in calls if "silu" not in c.operator]))
    with pytest.raises(CaptureError, match=r"the captured step of 4 rows differs from the eager one in rows \[0"):
        make_llm("llama")


def test_symptom_without_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right tokens for as long as the baked context lasts, then wrong ones for ever; eager steps are right."""
    patch_attention(monkeypatch, longest_baked)
    monkeypatch.setattr(cuda_graph, "compare", lambda one, two, size: None)
    monkeypatch.setattr(StepGraphs, "_check", lambda self, step, trial: None)
    monkeypatch.setattr(cuda_graph, "_TRIAL_BLOCKS", 1)
    found = {}
    for eager in (True, False):
        llm = make_llm("llama", enforce_eager=eager, block_size=8, max_model_len=160)
        found[eager] = tiny.tokens(tiny.generate(llm, [tiny.prompt(5)], 140))[0]
        llm.shutdown()
    right = tiny.greedy("llama", tiny.prompt(5), 140)
    assert found[True] == right
    captured_context = 8  # a block: the second batch has less, and counts as one
    assert found[False][: 8 * captured_context - 5] == right[: 8 * captured_context - 5]
    assert found[False] != right


def test_a_tensor_that_the_model_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []

    def keeps(metadata: Any) -> Any:
        kept.append(metadata.seq_lens * 2)
        return metadata

    patch_attention(monkeypatch, keeps)
    with pytest.raises(CaptureError, match="the model keeps a tensor that it made in a step of 4 rows"):
        make_llm("llama")


def test_inputs_that_move_in_service() -> None:
    llm = make_llm("llama")
    runner = runner_of(llm)
    graphs, replay = runner.graphs, runner.graphs.replay
    graphs.replay = lambda inputs: replay(dataclasses.replace(inputs, positions=inputs.positions.clone()))
    with pytest.raises(AssertionError, match=r"inputs moved since the step of 1 rows was captured: positions was"):
        tiny.generate(llm, [tiny.prompt(5)], 3)
    llm.shutdown()


# --- replay equals eager ----------------------------------------------------------------------------------------------


@functools.cache
def known() -> tuple[str, ...]:
    assert "v3" in tiny_deepseeks.NAMES
    assert "gemma3" in tiny_dense.NAMES
    assert "gpt-oss" in tiny_experts.NAMES
    return ("llama", "qwen3-window", "gemma3", "mixtral", "qwen2-moe", "glm4-moe", "gpt-oss", "qwen3.5-moe", "v3")


@pytest.mark.parametrize("name", known())
def test_every_kind_of_model(name: str) -> None:
    """Prompts that come together, of unlike lengths and ends: prefills beside decodes, padded and whole sizes."""
    prompts = [tiny.prompt(length) for length in (5, 23, 9, 1, 40, 12)]
    found = []
    for eager in (True, False):
        llm = make_llm(name, enforce_eager=eager)
        assert bool(captured(llm)) is not eager
        parts = [tiny.generate(llm, prompts[i:], 20 + i) for i in (0, 3)]
        found.append([tiny.tokens(part) for part in parts])
        llm.llm_engine.scheduler.check_integrity()
        assert eager or runner_of(llm).counts.replayed > 40
        llm.shutdown()
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_thousand_steps(dtype: str) -> None:
    found = []
    for eager in (True, False):
        llm = make_llm(
            "llama",
            enforce_eager=eager,
            dtype=dtype,
            max_model_len=1100,
            hf_overrides={"max_position_embeddings": 2048},
        )
        found.append(tiny.tokens(tiny.generate(llm, [tiny.prompt(5)], 1040)))
        llm.shutdown()
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["llama", "qwen3.5"])
def test_other_lengths_than_captured(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Captured with four requests of one token, replayed with fewer and longer ones."""
    ones = np.ones(4, dtype=np.int64)
    monkeypatch.setattr(StepGraphs, "_trials", lambda self, size: tuple(Trial(ones, ones, seed) for seed in range(3)))
    llm = make_llm(name, compilation_config={"cudagraph_capture_sizes": [4]})
    runner = runner_of(llm)
    for lengths in ([9, 3], [2, 7, 5], [70, 1, 33, 2], []):
        trial = Trial(np.ones(len(lengths), dtype=np.int64), np.array(lengths, dtype=np.int64), 5)
        results = []
        for replayed in (False, True):
            with torch.inference_mode():
                inputs, context = runner.graphs._prepare(4, trial)
                with context:
                    if replayed:
                        hidden = runner.graphs.replay(inputs)
                    else:
                        hidden = runner.model(inputs.input_ids, inputs.positions)
            results.append(hidden[: len(lengths)].clone())
        assert torch.equal(*results)
        assert results[0].isfinite().all()
    llm.shutdown()


def test_states_of_others_over_a_thousand_replays() -> None:
    """One request in steps of four rows: what the padding carries writes no state, the pad slot's included."""
    llm = make_llm(
        "qwen3.5",
        compilation_config={"cudagraph_capture_sizes": [4]},
        max_model_len=1100,
        hf_overrides={"max_position_embeddings": 2048},
        num_gpu_blocks_override=200,
    )
    runner = runner_of(llm)
    states = [
        x
        for layer in runner.cached_layers.values()
        if hasattr(layer, "clear_state")
        for x in (layer.conv_state, layer.recurrent_state)
    ]
    assert states
    for x in states:
        x.fill_(7.0)
    tiny.generate(llm, [tiny.prompt(5)], 1010)
    assert runner.counts.replayed >= 1000
    changed = {i for x in states for i in range(len(x)) if not (x[i] == 7.0).all()}
    assert len(changed) == 1, f"state slots {changed} were written by one request"
    llm.shutdown()


def test_rows_that_are_no_tokens_may_hold_nan() -> None:
    """All memory of captured steps and all rows of padding hold NaN before each replay."""
    llm = make_llm("qwen3.5-moe", compilation_config={"cudagraph_capture_sizes": [4]})
    runner, prompts = runner_of(llm), [tiny.prompt(5), tiny.prompt(9)]
    replay = runner.graphs.replay

    def poisoned(inputs: Any) -> torch.Tensor:
        runner.graphs.pool.poison()
        for buffer in runner.step_buffers._buffers.values():
            buffer.fill_(torch.nan)
        return replay(inputs)

    runner.graphs.replay = poisoned  # type: ignore[method-assign]
    found = tiny.tokens(tiny.generate(llm, prompts, 24))
    assert runner.counts.replayed >= 22
    llm.shutdown()
    assert found == [hybrids.greedy("qwen3.5-moe", ids, 24) for ids in prompts]


def test_hooks_are_called(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever hangs a hook on a module sees each step; steps are replayed again once it is gone."""
    llm, seen = make_llm("llama"), list[int]()
    runner = runner_of(llm)
    hook = runner.model.model.layers[1].register_forward_hook(lambda _, args, out: seen.append(len(args[0])))
    assert tiny.tokens(tiny.generate(llm, [tiny.prompt(5)], 4)) == [tiny.greedy("llama", tiny.prompt(5), 4)]
    assert seen == [5, 1, 1, 1]
    assert not runner.counts.replayed
    assert "steps run eagerly while the model's modules have forward hooks" in caplog.text
    hook.remove()
    tiny.generate(llm, [tiny.prompt(5)], 4)
    assert runner.counts.replayed == 3
    llm.shutdown()


def test_nan_trace_looks_at_eager_steps(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A NaN behind the first layer, of which a replay would say nothing."""
    caplog.set_level("INFO")
    monkeypatch.setenv("VLLM_DEBUG_NAN", "1")
    llm = make_llm("llama")
    runner = runner_of(llm)
    assert not captured(llm)
    assert caplog.text.count("steps are not captured: each layer is looked at (VLLM_DEBUG_NAN)") == 1
    assert tiny.tokens(tiny.generate(llm, [tiny.prompt(5)], 4)) == [tiny.greedy("llama", tiny.prompt(5), 4)]
    assert not runner.counts.replayed

    def spoil(_: Any, args: Any, out: Any) -> None:
        out[0].fill_(torch.nan)

    runner.model.model.layers[0].register_forward_hook(spoil)
    [output] = tiny.generate(llm, [tiny.prompt(5)], 4)
    assert output.outputs[0].finish_reason == "error"
    assert "layer_idx=1" in llm.llm_engine.worker.nan_trace.finding
    llm.shutdown()


def test_profiler_shows_replays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", str(tmp_path))
    llm = make_llm("llama")
    llm.start_profile()
    assert tiny.tokens(tiny.generate(llm, [tiny.prompt(5)], 6)) == [tiny.greedy("llama", tiny.prompt(5), 6)]
    llm.stop_profile()
    [trace] = tmp_path.iterdir()
    read = gzip.open if trace.suffix == ".gz" else open
    with read(trace, "rt") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert names.count("replay of 1 rows") == 5
    llm.shutdown()


def test_steps_ahead_of_a_late_device() -> None:
    """Replayed on the thread that stands for the device, while the host prepares the next step."""
    prompts = [tiny.prompt(length) for length in (5, 23, 9, 1, 40, 12)]
    for name, where in (("llama", tiny), ("qwen3.5-moe", hybrids)):
        llm = make_llm(name, async_scheduling=True)
        assert tiny.tokens(tiny.generate(llm, prompts, 20)) == [where.greedy(name, ids, 20) for ids in prompts]
        assert runner_of(llm).counts.replayed > 15
        llm.shutdown()


# --- arrivals, aborts, preemption -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Any]]:
    """An eager engine and one that replays, with blocks for some three long requests."""
    engines = [
        make_llm(
            "llama",
            enforce_eager=eager,
            num_gpu_blocks_override=14,
            block_size=8,
            max_model_len=96,
            enable_prefix_caching=True,
            max_num_batched_tokens=12,
        )
        for eager in (True, False)
    ]
    yield engines
    for llm in engines:
        llm.shutdown()


arrivals = st.lists(
    st.tuples(
        st.integers(0, 3),  # steps before it comes
        st.integers(1, 40),  # tokens of its prompt
        st.integers(1, 30),  # tokens to generate
        st.sampled_from([0.0, 0.0, 0.9]),
        st.one_of(st.none(), st.none(), st.integers(0, 20)),  # steps after which it is aborted
    ),
    min_size=1,
    max_size=8,
)


def drive(llm: Any, plan: list[Any]) -> dict[str, Any]:
    engine, results, step, aborts = llm.llm_engine, {}, 0, {}
    due = 0
    queue = list(enumerate(plan))
    if queue:
        due = queue[0][1][0]
    while queue or engine.has_unfinished_requests():
        while queue and step >= due:
            number, (_, length, most, temperature, abort) = queue.pop(0)
            params = SamplingParams(
                temperature=temperature, seed=number, max_tokens=most, ignore_eos=True, detokenize=False
            )
            engine.add_request(str(number), {"prompt_token_ids": list(tiny.prompt(length, number % 2))}, params)
            if abort is not None:
                aborts[str(number)] = step + abort
            due = step + queue[0][1][0] if queue else 0
        engine.abort_request([name for name, at in aborts.items() if at == step])
        for output in engine.step():
            completion = output.outputs[0]
            results[output.request_id] = (tuple(completion.token_ids), completion.finish_reason, step)
        step += 1
    engine.scheduler.check_integrity()
    return results


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=arrivals)
def test_side_by_side(pair: list[Any], plan: list[Any]) -> None:
    eager, replayed = (drive(llm, plan) for llm in pair)
    assert eager == replayed


# --- what is asked for, and what cannot be ----------------------------------------------------------------------------


def test_operators_that_ask_the_host_stay_outside(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Plain torch loops over requests on the host: it is called between the captured pieces, and the log names it."""
    monkeypatch.setenv(
        "VLLM_KERNELS", "paged_attention=reference,reshape_and_cache=reference,gated_delta_net=reference"
    )
    llm = make_llm("qwen3.5")
    assert captured(llm) == [1, 2, 4]
    assert re.search(r"pieces, between them .*gated_delta_net.*paged_attention", caplog.text)
    prompts = [tiny.prompt(length) for length in (5, 23, 9)]
    assert tiny.tokens(tiny.generate(llm, prompts, 20)) == [hybrids.greedy("qwen3.5", ids, 20) for ids in prompts]
    assert runner_of(llm).counts.replayed > 15
    llm.shutdown()


def test_sizes_that_the_caches_are_too_small_for(caplog: pytest.LogCaptureFixture) -> None:
    llm = make_llm(
        "llama",
        compilation_config={"cudagraph_capture_sizes": [2, 4, 40]},
        num_gpu_blocks_override=5,
        block_size=8,
        max_model_len=32,
    )
    assert captured(llm) == [2, 4]
    assert "cudagraph_capture_sizes [40] are not captured: steps of at most 32 rows are" in caplog.text
    llm.shutdown()


def test_a_size_that_the_largest_step_is_padded_to() -> None:
    """Of 12 tokens at most; those of 9 to 12 are padded to 16, and replayed."""
    llm = make_llm(
        "llama",
        compilation_config={"cudagraph_capture_sizes": [2, 8, 16]},
        max_num_batched_tokens=12,
        max_num_seqs=4,
    )
    assert captured(llm) == [2, 8, 16]
    assert tiny.tokens(tiny.generate(llm, [tiny.prompt(11)], 4)) == [tiny.greedy("llama", tiny.prompt(11), 4)]
    assert runner_of(llm).counts.replayed == 4
    assert runner_of(llm).counts.padded_rows == 5 + 3 * 1
    llm.shutdown()


def test_decodes_only() -> None:
    llm = make_llm(
        "llama", compilation_config={"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2]}
    )
    assert captured(llm) == [1, 2]
    tiny.generate(llm, [tiny.prompt(2)], 6)
    assert runner_of(llm).counts.replayed == 5, "the prompt's step is no decode"
    llm.shutdown()


def test_sizes_by_default() -> None:
    llm = make_llm("llama", compilation_config=None, max_num_seqs=12)
    assert captured(llm) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12]
    tiny.generate(llm, [tiny.prompt(5)] * 9, 8)
    assert runner_of(llm).counts.padded_rows == 7, "nine decodes in ten rows, and no other padding"
    llm.shutdown()


@pytest.mark.parametrize("given", [{"enforce_eager": True}, {"compilation_config": {"cudagraph_mode": "NONE"}}])
def test_switched_off(given: dict[str, Any]) -> None:
    llm = make_llm("llama", **given)
    assert not captured(llm)
    llm.shutdown()


def test_memory_that_is_short(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Fewer sizes, and one warning, after which the others are captured, with nothing left of those that failed."""
    empty = MemoryPool.empty
    failed: list[Any] = []

    def short(self: Any, shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        if shape[:1] in ((6,), (7,)):
            failed.append(weakref.ref(recording.active))
            raise MemoryError(f"no room for {tuple(shape)}")
        assert not any(recorder() for recorder in failed if recorder() is not recording.active), "a recorder is left"
        return empty(self, shape, stride, dtype)

    monkeypatch.setattr(MemoryPool, "empty", short)
    llm = make_llm("llama", compilation_config={"cudagraph_capture_sizes": [1, 2, 6, 7]})
    assert captured(llm) == [1, 2]
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
        "steps of 6 7 rows are not captured: memory is short: no room for (7, 64)"
    ]
    assert tiny.tokens(tiny.generate(llm, [tiny.prompt(5)], 4)) == [tiny.greedy("llama", tiny.prompt(5), 4)]
    assert runner_of(llm).counts.replayed == 3
    llm.shutdown()


def test_an_operator_that_cannot_be_captured(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It alone stays eager, in all sizes, and is named once."""
    silu_and_mul = cpu.silu_and_mul

    def asks(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        assert (x * 2).sum().item() is not None
        return silu_and_mul(x, out)

    monkeypatch.setattr(cpu, "silu_and_mul", asks)
    llm = make_llm("llama")
    assert captured(llm) == [1, 2, 4]
    assert {step.num_pieces for step in runner_of(llm).graphs.steps.values()} == {5}, "two layers"
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
        "silu_and_mul runs eagerly between the pieces of captured steps: aten.item.default brings a value of the step "
        "to the host in silu_and_mul of model.layers.0.self_attn.attn"
    ]
    assert tiny.tokens(tiny.generate(llm, [tiny.prompt(5)], 12)) == [tiny.greedy("llama", tiny.prompt(5), 12)]
    assert runner_of(llm).counts.replayed == 11
    llm.shutdown()


def test_kernels_that_run_interpreted(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("VLLM_KERNELS", "silu_and_mul=triton")
    llm = make_llm("llama")
    assert not captured(llm)
    assert caplog.text.count("steps are not captured: silu_and_mul by kernels that run interpreted") == 1
    llm.shutdown()


def test_a_constant_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that each step makes of the same values of the host is no value of one step."""
    patch_attention(
        monkeypatch, lambda m: with_(m, seq_lens=m.seq_lens + torch.tensor([3, 3], dtype=torch.int32)[:1] - 3)
    )
    llm = make_llm("llama")
    assert captured(llm) == [1, 2, 4]
    assert tiny.tokens(tiny.generate(llm, [tiny.prompt(5)], 12)) == [tiny.greedy("llama", tiny.prompt(5), 12)]
    assert runner_of(llm).counts.replayed == 11
    llm.shutdown()


def test_new_weights_are_replayed() -> None:
    """``load_weights`` in the middle of an engine's life: in place where it can, else steps are captured anew."""
    llm = make_llm("llama")
    runner = runner_of(llm)
    first = tiny.tokens(tiny.generate(llm, [tiny.prompt(5)], 12))
    assert first == [tiny.greedy("llama", tiny.prompt(5), 12)]
    weights = tiny.reference_model("llama", 1).state_dict()
    runner.model.load_weights(weights.items())
    before = runner.counts.replayed
    assert tiny.tokens(tiny.generate(llm, [tiny.prompt(5)], 12)) == [tiny.greedy("llama", tiny.prompt(5), 12, 1)]
    assert runner.counts.replayed - before == 11
    for layer in runner.model.model.layers:
        packed = layer.mlp.down_proj.packed
        layer.mlp.down_proj.packed = dataclasses.replace(packed, data=packed.data.clone())
    runner.model.load_weights(weights.items())
    assert tiny.tokens(tiny.generate(llm, [tiny.prompt(5)], 12)) == [tiny.greedy("llama", tiny.prompt(5), 12, 1)]
    assert runner.counts.replayed - before == 22
    llm.shutdown()
