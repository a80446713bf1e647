# SPDX-License-Identifier: Apache-2.0
"""VLLM_DEBUG_NAN: each injected NaN is told once, with its layer, its row and the row's owner, and ends whom it should.

Reference tokens are transformers'. NaN is put in where a fault of a kernel, a cache or a buffer would put it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import launcher
import pytest
import rank_checks
import tiny_hybrids as hybrids
import tiny_models as tiny
import torch
from test_step import make_llm as make_rank_llm

from vllm.kernels import ops
from vllm.model_executor.layers.attention import attention
from vllm.v1.debug.nan_trace import NanError

NAN = float("nan")
PROMPTS = [tiny.prompt(length, seed=5) for length in (5, 9, 4)]
NUM_TOKENS = 6
ERROR_LINE = re.compile(r"\[(?:NAN_CHECK_\w+|ATTN_MASK_CHECK)\] ERROR .*")


@pytest.fixture(scope="module", autouse=True)
def _stop_launcher() -> Iterator[None]:
    yield
    launcher.stop()


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """trace(mode, name, **settings) → an engine under ``VLLM_DEBUG_NAN=mode``."""
    made: list[Any] = []

    def make(mode: str, name: str = "mixtral", **settings: Any) -> Any:
        monkeypatch.setenv("VLLM_DEBUG_NAN", mode)
        llm = (hybrids if name.startswith("qwen3.5") else tiny).make_llm(name, **settings)
        made.append(llm)
        return llm

    yield make
    for llm in made:
        llm.shutdown()


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.worker.runner


def layers_of(llm: Any) -> Any:
    return runner_of(llm).model.model.layers


def row_of(llm: Any, request_id: str) -> int:
    return runner_of(llm).input_batch.row_of[request_id]


def before_step(llm: Any, step: int, action: Callable[[], None]) -> None:
    runner = runner_of(llm)
    execute = runner.execute_model

    def run(*args: Any, **kwargs: Any) -> Any:
        if runner.step == step:
            action()
        return execute(*args, **kwargs)

    runner.execute_model = run


def spoil_row(llm: Any, layer: int, step: int, row: int) -> None:
    """NaN in one row of what goes into ``layer``'s attention in ``step``."""

    def hook(_: Any, inputs: Any) -> None:
        if runner_of(llm).step == step + 1:
            inputs[1][row] = NAN

    # Before the trace's own hook, which is there already.
    layers_of(llm)[layer].self_attn.register_forward_pre_hook(hook, prepend=True)


def spoil_key(llm: Any, layer: int, step: int, request_id: str, position: int) -> list[int]:
    """NaN in the cached key of one position; the block is appended to what is returned when it is done."""
    blocks: list[int] = []

    def spoil() -> None:
        table = runner_of(llm).input_batch.block_table
        block = int(table.table[row_of(llm, request_id), position // table.block_size])
        layers_of(llm)[layer].self_attn.attn.kv_cache[0][block, 0, position % table.block_size, 0] = NAN
        blocks.append(block)

    before_step(llm, step, spoil)
    return blocks


def run(llm: Any, prompts: list[tuple[int, ...]] = PROMPTS) -> tuple[list[str], list[tuple[int, ...]]]:
    outputs = tiny.generate(llm, prompts, NUM_TOKENS)
    return [output.outputs[0].finish_reason for output in outputs], tiny.tokens(outputs)


def expected(prompts: list[tuple[int, ...]] = PROMPTS, name: str = "mixtral") -> list[tuple[int, ...]]:
    greedy = hybrids.greedy if name.startswith("qwen3.5") else tiny.greedy
    return [greedy(name, prompt, NUM_TOKENS) for prompt in prompts]


def errors(text: str) -> dict[str, str]:
    """Error lines by kind; each kind at most once."""
    lines = ERROR_LINE.findall(text)
    by_kind = {line[1 : line.index("]")]: line for line in lines}
    assert len(by_kind) == len(lines), "a kind was printed twice:\n" + "\n".join(lines)
    return by_kind


# --- off, and nothing wrong ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["", "0"])
def test_off_means_no_hook(trace: Callable[..., Any], mode: str) -> None:
    llm = trace(mode)
    assert llm.llm_engine.worker.nan_trace is None
    for module in runner_of(llm).model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_unknown_mode_is_refused(trace: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="VLLM_DEBUG_NAN='yes' is unknown; use 0, 1, raise or abort"):
        trace("yes")


@pytest.mark.parametrize(("name", "layer"), [("mixtral", 0), ("qwen3.5-moe", 3)])
def test_a_healthy_run_prints_one_line(
    trace: Callable[..., Any], capfd: pytest.CaptureFixture[str], name: str, layer: int
) -> None:
    """On the first layer with full attention, with padding, and with what is uninitialised NaN in profiling too."""
    reasons, tokens = run(trace("raise", name, compilation_config={"cudagraph_capture_sizes": [24]}))
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("[")]
    assert lines == [
        f"[ATTN_MASK_CHECK] dp_rank=0 layer_idx={layer} num_actual_tokens=18 seq_lens=[5, 9, 4] "
        "query_start_loc=[0, 5, 14, 18] hidden_shape=[24, 64]"
    ]
    assert reasons == ["length"] * 3
    assert tokens == expected(name=name)


# --- where the NaN is, and whose -------------------------------------------------------------------------------------


def test_real_row(trace: Callable[..., Any], capfd: pytest.CaptureFixture[str]) -> None:
    llm = trace("1")
    spoil_row(llm, layer=1, step=0, row=7)  # request 1 begins in row 5
    reasons, tokens = run(llm)
    found = errors(capfd.readouterr().out)
    common = "nan_count=64 inf_count=0 shape=[18, 64]"
    owner = "owners=[7: request '1' position 2 (real)"
    assert found["NAN_CHECK_PRE_ATTN"] == (
        f"[NAN_CHECK_PRE_ATTN] ERROR dp_rank=0 layer_idx=1 NaN/Inf detected BEFORE attention! {common} "
        f"nan_row_indices=[7]... total_nan_rows=1 {owner}] step=0 tp_rank=0"
    )
    # Later rows of the request attend to the bad one; no other request's do.
    assert "nan_row_indices=[7, 8, 9, 10, 11, 12, 13]... total_nan_rows=7" in found["NAN_CHECK_POST_ATTN"]
    assert (
        "actual_nan_rows=7 actual_nan_elems=448 padding_nan_rows=0 padding_nan_elems=0"
        in (found["NAN_CHECK_POST_ATTN"])
    )
    assert owner in found["NAN_CHECK_POST_ATTN"]
    assert "input was clean" not in found["NAN_CHECK_POST_ATTN"]
    assert "AFTER MoE!" in found["NAN_CHECK_POST_MOE"]
    assert "nan_row_indices=[1]... total_nan_rows=1 owners=[request '1' position 8 (real)]" in found["NAN_CHECK_LOGITS"]
    assert reasons == ["length", "error", "length"], "NaN logits end their request in every mode"
    assert tokens[::2] == expected()[::2]


def test_pad_row(trace: Callable[..., Any], capfd: pytest.CaptureFixture[str]) -> None:
    """It stays in its row and is gone after attention; nobody's tokens change."""
    llm = trace("1", compilation_config={"cudagraph_capture_sizes": [8, 24]})
    spoil_row(llm, layer=1, step=2, row=6)
    reasons, tokens = run(llm)
    found = errors(capfd.readouterr().out)
    assert list(found) == ["NAN_CHECK_PRE_ATTN"]
    line = found["NAN_CHECK_PRE_ATTN"]
    assert line.endswith("nan_row_indices=[6]... total_nan_rows=1 owners=[6: pad] step=2 tp_rank=0")
    assert reasons == ["length"] * 3
    assert tokens == expected()


def test_the_b60_case_told_right(
    trace: Callable[..., Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, nan_poison: None
) -> None:
    """26 tokens on 30 rows with a count of 30 put back: the same four rows, this time not called actual."""
    from vllm.v1.worker import gpu_model_runner

    def raised_count(**fields: Any) -> SimpleNamespace:
        return SimpleNamespace(**{**fields, "num_actual_tokens": fields["num_padded_tokens"]})

    monkeypatch.setattr(gpu_model_runner, "CommonAttentionMetadata", raised_count)
    monkeypatch.setattr(ops, "paged_attention", rank_checks.of_real_rows(ops.paged_attention))
    monkeypatch.setattr(attention, "zero_padding_rows", lambda output, slot_mapping: None)
    llm = trace("1", "qwen3.5-moe", compilation_config={"cudagraph_capture_sizes": [4, 30]})
    run(llm, [tiny.prompt(length, seed=10) for length in (5, 5, 8, 8)])
    found = errors(capfd.readouterr().out)
    assert (
        "layer_idx=3 num_actual_tokens=30 seq_lens=[5, 5, 8, 8] query_start_loc=[0, 5, 10, 18, 26]"
        in (found["ATTN_MASK_CHECK"])
    )
    assert "rows from 26 on belong to no request" in found["ATTN_MASK_CHECK"]
    assert (
        "layer_idx=3 NaN/Inf detected AFTER attention! nan_count=256 inf_count=0 shape=[30, 64] num_actual_tokens=26 "
        "actual_nan_rows=0 actual_nan_elems=0 padding_nan_rows=4 padding_nan_elems=256 "
        "nan_row_indices=[26, 27, 28, 29]... total_nan_rows=4 owners=[26: pad, 27: pad, 28: pad, 29: pad]"
    ) in found["NAN_CHECK_POST_ATTN"]


@pytest.mark.parametrize("mode", ["1", "abort"])
def test_kv_block(trace: Callable[..., Any], capfd: pytest.CaptureFixture[str], mode: str) -> None:
    """Named with block and position; the request's cached blocks are not found again, and reused blocks are right."""
    prompts = [tiny.prompt(20, seed=6), tiny.prompt(21, seed=7)]
    llm = trace(mode, block_size=8, num_gpu_blocks_override=12, max_model_len=32, enable_prefix_caching=True)
    blocks = spoil_key(llm, layer=1, step=2, request_id="1", position=3)
    reasons, tokens = run(llm, prompts)
    found = errors(capfd.readouterr().out)
    assert "NAN_CHECK_PRE_ATTN" not in found
    line = found["NAN_CHECK_POST_ATTN"]
    assert "layer_idx=1 NaN/Inf detected AFTER attention!" in line
    assert "owners=[1: request '1' position 22 (real)]" in line
    assert f"input was clean; kv_blocks={blocks} nan_at_positions=[3]..." in line
    assert reasons == ["length", "error"]
    assert tokens[0] == expected(prompts)[0]
    assert tokens[1] == expected(prompts)[1][:2]
    again = tiny.generate(llm, prompts[::-1], NUM_TOKENS)
    assert tiny.tokens(again) == expected(prompts[::-1])
    assert [output.num_cached_tokens for output in again] == [0, 16], "a block of the bad request was found"
    llm.llm_engine.scheduler.check_integrity()


def test_abort_before_a_token_is_due(trace: Callable[..., Any]) -> None:
    """In the middle of a chunked prompt there are no logits yet; only this mode ends the request there."""
    prompts = [tiny.prompt(4, seed=8), tiny.prompt(40, seed=9)]
    llm = trace("abort", max_num_batched_tokens=12, max_num_seqs=4)
    spoil_row(llm, layer=1, step=1, row=6)
    reasons, tokens = run(llm, prompts)
    assert reasons == ["length", "error"]
    assert runner_of(llm).step == NUM_TOKENS, "the bad request did not run on"
    assert tokens == [expected(prompts)[0], ()]


@pytest.mark.parametrize("pool", ["conv_state", "recurrent_state"])
def test_state_slot(trace: Callable[..., Any], capfd: pytest.CaptureFixture[str], pool: str) -> None:
    llm = trace("abort", "qwen3.5-moe")
    slots: list[int] = []

    def spoil() -> None:
        slots.append(int(runner_of(llm).input_batch.state_slots[row_of(llm, "2")]))
        getattr(layers_of(llm)[1].self_attn, pool)[slots[0]] = NAN

    before_step(llm, 2, spoil)
    reasons, tokens = run(llm)
    line = errors(capfd.readouterr().out)["NAN_CHECK_POST_ATTN"]
    assert "layer_idx=1 NaN/Inf detected AFTER attention! nan_count=64" in line
    assert "owners=[2: request '2' position 5 (real)]" in line
    assert re.search(rf"input was clean; state_slot={slots[0]} nan_in=\[.*'recurrent_state'\] step=2", line)
    assert reasons == ["length", "length", "error"]
    assert tokens[:2] == expected(name="qwen3.5-moe")[:2]
    assert run(llm)[1] == expected(name="qwen3.5-moe"), "the slot was handed on with its NaN"


def test_stale_slots_of_pad_rows(
    trace: Callable[..., Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pad rows that keep what the prefill step left: the first decode would overwrite slots of the prompts."""
    llm = trace("1", compilation_config={"cudagraph_capture_sizes": [8, 24]}, block_size=8)
    runner_of(llm).host_inputs = None  # the fault is in what fills the buffers elsewhere
    slots = runner_of(llm).buffers.slot_mapping
    monkeypatch.setattr(slots, "fill", lambda values, padded: fill_real_rows_only(slots, values, padded))
    slots.array[:] = -1
    run(llm)
    line = errors(capfd.readouterr().out)["ATTN_MASK_CHECK"]
    assert "dp_rank=0 layer_idx=0 num_actual_tokens=3" in line
    assert "expected=[-1, -1, -1, -1, -1]... row_indices=[3, 4, 5, 6, 7]... total_stale_rows=5" in line
    assert "owners=[3: pad, 4: pad, 5: pad, 6: pad, 7: pad] step=1 tp_rank=0" in line


def fill_real_rows_only(buffer: Any, values: Any, num_padded: int) -> torch.Tensor:
    buffer.array[: len(values)] = values
    return buffer.device[:num_padded]


def test_stale_slot_of_a_real_row(trace: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = trace("raise", block_size=8)
    runner_of(llm).host_inputs = None
    table = runner_of(llm).input_batch.block_table
    honest, kept = table.slots, []

    def one_step_late(rows: Any, positions: Any) -> Any:
        slots = honest(rows, positions)
        kept.append(slots.copy())
        if len(kept) == 4:
            slots[1] = kept[2][1]
        return slots

    monkeypatch.setattr(table, "slots", one_step_late)
    with pytest.raises(NanError, match=r"stale slot_mapping.*owners=\[1: request '1' position 11 \(real\)\]"):
        run(llm)


@pytest.mark.parametrize("row", [1, 6])
def test_raise_names_it(trace: Callable[..., Any], row: int) -> None:
    """A pad row counts as well: law 2 is broken, whoever gets hurt."""
    llm = trace("raise", compilation_config={"cudagraph_capture_sizes": [8, 24]})
    spoil_row(llm, layer=1, step=3, row=row)
    owner = "request '1' position 11" if row == 1 else "pad"
    with pytest.raises(NanError, match=rf"PRE_ATTN\] ERROR dp_rank=0 layer_idx=1 .*owners=\[{row}: {owner}"):
        run(llm)


# --- several processes -----------------------------------------------------------------------------------------------


def on_ranks(folder: str, tp: int, dp: int, fault: str) -> tuple[list[str], list[tuple[int, ...]]]:
    llm = make_rank_llm(folder, tp, dp, block_size=8)
    rank = rank_checks.own_rank()
    if fault == "key" and rank == 1:
        spoil_key(llm, layer=1, step=2, request_id="1", position=3)
    elif fault == "row" and rank == 1:
        spoil_row(llm, layer=1, step=2, row=1)
    elif fault == "dummy" and rank == 1:
        embedding = runner_of(llm).model.model.embed_tokens
        handle = embedding.register_forward_hook(lambda _, __, out: out.fill_(NAN))
        run(llm, [])
        handle.remove()
        spoil_row(llm, layer=1, step=runner_of(llm).step, row=0)
        result = run(llm)
        llm.shutdown()
        return result
    if fault == "dummy":
        run(llm, PROMPTS[:1])
    result = run(llm)
    llm.shutdown()
    return result


def outcomes_of(fault: str, tp: int, dp: int, mode: str) -> list[launcher.RankOutcome]:
    env = {"VLLM_DEBUG_NAN": mode, "VLLM_POLICIES": "xpu"}
    return launcher.rank_outcomes(on_ranks, tp * dp, tiny.checkpoint("mixtral"), tp, dp, fault, env=env)


@pytest.mark.multiprocess
def test_tp_ranks_take_one_decision() -> None:
    """The key is NaN in rank 1's part of the heads only. Both ranks end the request in the same step."""
    for rank, outcome in enumerate(outcomes_of("key", 2, 1, "abort")):
        assert outcome.status == "ok", outcome.error + outcome.output
        reasons, tokens = outcome.value
        assert reasons == ["length", "error", "length"]
        assert tokens[::2] == expected()[::2]
        assert tokens[1] == expected()[1][:2]
        line = errors(outcome.output)["NAN_CHECK_POST_ATTN"]
        assert "layer_idx=1 " in line
        assert "owners=[1: request '1' position 10 (real)]" in line
        assert line.endswith(f"step=2 tp_rank={rank}")
        assert ("nan_at_positions=[3]" in line) == (rank == 1), "only rank 1's cache holds the NaN"


@pytest.mark.multiprocess
def test_other_dp_ranks_go_on() -> None:
    good, bad = outcomes_of("row", 1, 2, "abort")
    assert good.status == bad.status == "ok", bad.error + bad.output
    assert errors(good.output) == {}
    assert good.value == (["length"] * 3, expected())
    assert bad.value[0] == ["length", "error", "length"]
    assert bad.value[1][::2] == expected()[::2]
    assert "dp_rank=1 layer_idx=1" in errors(bad.output)["NAN_CHECK_PRE_ATTN"]


@pytest.mark.multiprocess
@pytest.mark.parametrize(("tp", "dp"), [(1, 2), (2, 2)])
def test_raise_stops_every_rank_with_the_finders_line(tp: int, dp: int) -> None:
    """On (2, 2) the NaN goes in on TP rank 1 of the first DP group only."""
    for outcome in outcomes_of("row", tp, dp, "raise"):
        assert outcome.status == "raised"
        assert isinstance(outcome.exception, NanError)
        assert re.search(
            rf"dp_rank={2 - tp} layer_idx=1 .*owners=\[1: request '1' position 10 \(real\)\]", outcome.error
        )
        assert outcome.seconds < 20


@pytest.mark.multiprocess
def test_dummies_are_silent_until_something_real_is_told() -> None:
    _, idle = outcomes_of("dummy", 1, 2, "1")
    assert idle.status == "ok", idle.error + idle.output
    lines = errors(idle.output)
    first = lines["NAN_CHECK_PRE_ATTN"]
    assert "owners=[0: request '0' position 0 (real)]" in first
    assert first.endswith("first_dummy_with_nan=[PRE_ATTN layer_idx=0 step=0]")
    assert all("first_dummy" not in line for kind, line in lines.items() if kind != "NAN_CHECK_PRE_ATTN")
