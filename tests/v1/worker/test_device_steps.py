# SPDX-License-Identifier: Apache-2.0
"""Steps on a device that is late (``late_device.py``): right tokens, and one wait of the host a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import late_device
import launcher
import numpy as np
import pytest
import rank_checks
import tiny_hybrids as hybrids
import tiny_models as tiny
import torch

from vllm import SamplingParams
from vllm.kernels import reference
from vllm.v1 import transfers
from vllm.v1.sample import state
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.input_buffers import InputBuffers, PersistentBuffer

ENDS_A_STEP = "event in v1/transfers.py:wait"
BEFORE_A_FILL = "event in v1/transfers.py:_taking_turns"


def generate(llm: Any, prompts: list[tuple[int, ...]], params: SamplingParams) -> list[Any]:
    return llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params, use_tqdm=False)


# --- memory that a copy still reads -----------------------------------------------------------------------------------


def long_prompt_in_chunks(monkeypatch: pytest.MonkeyPatch) -> tuple[tuple[int, ...], Counter[str]]:
    """60 tokens in chunks of 16: three steps without a sampled token, in which nothing is waited for."""
    with late_device.stand_in(monkeypatch) as device:
        limits = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "block_size": 64}
        llm = tiny.make_llm("qwen3", async_scheduling=False, **limits)
        device.waits.clear()
        (tokens,) = tiny.tokens(tiny.generate(llm, [tiny.prompt(60)], 8))
        waits = device.waits.copy()
        llm.shutdown()
    return tokens, waits


def test_a_late_device_reads_what_its_step_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, waits = long_prompt_in_chunks(monkeypatch)
    assert tokens == tiny.greedy("qwen3", tiny.prompt(60), 8)
    # A chunk is prepared ahead of the one before, but not of the one before that.
    assert waits == {BEFORE_A_FILL: 2, ENDS_A_STEP: 8}


def test_put_back_one_set_of_staging_memory_gives_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def at_once(self: transfers.Staging) -> Iterator[None]:
        self.is_open = True
        yield

    monkeypatch.setattr(transfers.Staging, "filling", at_once)
    tokens, _ = long_prompt_in_chunks(monkeypatch)
    assert tokens != tiny.greedy("qwen3", tiny.prompt(60), 8)


def test_staging_memory_is_written_in_its_turn_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with late_device.stand_in(monkeypatch):
        llm = tiny.make_llm("qwen3")
        with pytest.raises(AssertionError, match=r"outside InputBuffers\.filling: a copy may be reading it"):
            llm.llm_engine.worker.runner.buffers.positions.fill([1], 1)
        llm.shutdown()


def test_of_the_block_table_the_columns_in_use_are_uploaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 requests of up to 131,072 tokens have a table of 4 MB; its rows stay where they are, whatever is uploaded."""
    width = 131072 // 16
    table = np.arange(128 * width, dtype=np.int32).reshape(128, width)
    with late_device.stand_in(monkeypatch) as device, torch.inference_mode():
        buffers = InputBuffers(256, 128, width, late_device.HERE)
        device.waits.clear()
        device.bytes_uploaded, seen = 0, []
        for rows, num_columns, num_padded in (([5, 3], 3, 4), (list(range(128)), 40, 128), ([127], 1, 2)):
            with buffers.filling():
                seen.append(buffers.block_table.fill_columns(table, np.array(rows), num_columns, num_padded))
        assert device.bytes_uploaded == 4 * (4 * 3 + 128 * 40 + 2)
        assert {x.stride() for x in seen} == {(width, 1)}
        assert {x.data_ptr() for x in seen} == {buffers.block_table.device.data_ptr()}
        # The third step's memory is the first one's again.
        assert device.waits == {BEFORE_A_FILL: 1}
        held = buffers.block_table.device.cpu()
    first = table[list(range(128)), :40].copy()
    first[:2, :1] = [[127 * width], [0]]
    assert held[:, :40].tolist() == first.tolist()
    assert not held[:, 40:].any()


def test_uploads_of_a_decode_do_not_grow_with_the_longest_context(monkeypatch: pytest.MonkeyPatch) -> None:
    uploaded = []
    with late_device.stand_in(monkeypatch) as device:
        for num_blocks in (4, 16):
            llm = tiny.make_llm("qwen3", max_model_len=16 * num_blocks, block_size=16)
            num_columns = llm.llm_engine.worker.runner.buffers.block_table.device.shape[1]
            device.bytes_uploaded = 0
            tokens = tiny.tokens(tiny.generate(llm, [tiny.prompt(20)], 4))
            uploaded.append(device.bytes_uploaded)
            llm.shutdown()
            assert num_columns == num_blocks
            assert tokens == [tiny.greedy("qwen3", tiny.prompt(20), 4)]
    assert uploaded[0] == uploaded[1]


def test_whole_rows_of_the_block_table_may_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a captured step will be. What no request of the step has is a block that does not exist."""
    fill = PersistentBuffer.fill_columns

    def whole(self: PersistentBuffer, table: Any, rows: Any, num_columns: int, num_padded: int) -> torch.Tensor:
        given = fill(self, table, rows, num_columns, num_padded)
        self.device[:num_padded, num_columns:] = 1 << 20
        return self.device[: len(given)]

    monkeypatch.setattr(PersistentBuffer, "fill_columns", whole)
    with late_device.stand_in(monkeypatch):
        llm = tiny.make_llm("qwen3", block_size=16)
        prompts = [tiny.prompt(40), tiny.prompt(7), tiny.prompt(17)]
        tokens = tiny.tokens(tiny.generate(llm, prompts, 6))
        llm.shutdown()
    assert tokens == [tiny.greedy("qwen3", prompt, 6) for prompt in prompts]


# --- what a step waits for --------------------------------------------------------------------------------------------

NUM_TOKENS = 3
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "random": {"temperature": 1.0, "seed": 5},
    "top-k": {"temperature": 1.0, "seed": 5, "top_k": 20},
    "top-k and top-p": {"temperature": 1.0, "seed": 5, "top_k": 20, "top_p": 0.8},
    "top-p and min-p": {"temperature": 0.7, "seed": 5, "top_p": 0.8, "min_p": 0.02},
    "log-probabilities": {"temperature": 0, "logprobs": 3, "prompt_logprobs": 2},
    "penalties": {
        "temperature": 1.0, "seed": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2,
        "min_tokens": 3, "stop_token_ids": [7], "logit_bias": {9: 2.0, 11: -3.0},
    },
    "allowed": {"temperature": 1.0, "seed": 5, "allowed_token_ids": list(range(5, 70))},
}  # fmt: skip


def answers(llm: Any) -> dict[str, tuple[list[Any], list[float]]]:
    """Of two requests of each kind: tokens and ranks, and log-probabilities."""
    found = {}
    for kind, kwargs in KINDS.items():
        # More rows than are scored at a time, where prompts are.
        prompts = [tiny.prompt(300 if "prompt_logprobs" in kwargs else 20), tiny.prompt(9)]
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, **kwargs)
        outputs = generate(llm, prompts, params)
        each = [x or {} for o in outputs for x in [*(o.prompt_logprobs or ()), *(o.outputs[0].logprobs or ())]]
        ranks: list[Any] = [(token, one.rank) for x in each for token, one in x.items()]
        tokens = [o.outputs[0].token_ids for o in outputs]
        found[kind] = ([*tokens, *ranks], [one.logprob for x in each for one in x.values()])
    return found


def test_one_wait_a_step_whatever_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny.make_llm("qwen3")
    expected = answers(llm)
    llm.shutdown()
    assert len({str(tokens[:2]) for tokens, _ in expected.values()}) > 5
    with late_device.stand_in(monkeypatch) as device:
        llm = tiny.make_llm("qwen3", async_scheduling=False)
        execute, waits = llm.llm_engine.worker.execute_model, []

        def counted(*args: Any, **kwargs: Any) -> Any:
            device.waits.clear()
            output = execute(*args, **kwargs)
            waits.append(dict(device.waits))
            return output

        llm.llm_engine.worker.execute_model = counted
        found = answers(llm)
        llm.shutdown()
    for kind, (tokens, logprobs) in expected.items():
        assert found[kind] == (tokens, pytest.approx(logprobs, abs=1e-4)), kind
    assert waits == [{ENDS_A_STEP: 1}] * (NUM_TOKENS * len(KINDS))


@pytest.mark.parametrize(("kwargs", "given"), [(KINDS["greedy"], []), (KINDS["random"], [torch.int64] * 4)])
def test_a_decode_step_copies_what_it_drew_and_no_parameters(
    kwargs: dict[str, Any], given: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the host a token id a request, and whether it means something; to the device, of random rows, positions."""
    there: list[torch.dtype] = []
    back: list[torch.dtype] = []
    move, add = state.to_device, transfers.HostCopies.add
    monkeypatch.setattr(state, "to_device", lambda x, device: there.append(x.dtype) or move(x, device))

    def added(self: Any, x: torch.Tensor | None) -> torch.Tensor | None:
        back.extend([] if x is None else [x.dtype])
        assert x is None or x.shape == (2,)
        return add(self, x)

    monkeypatch.setattr(transfers.HostCopies, "add", added)
    llm = tiny.make_llm("qwen3")
    llm.llm_engine.worker.runner.is_host = False  # as on a device, where what comes to the host is copied
    params = SamplingParams(max_tokens=5, ignore_eos=True, detokenize=False, **kwargs)
    for i in range(2):
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": list(tiny.prompt(9))}, params)
    llm.llm_engine.step()
    there.clear()
    back.clear()
    for _ in range(4):
        llm.llm_engine.step()
    llm.shutdown()
    assert there == given
    assert back == [torch.int64, torch.float32] * 4


@pytest.mark.parametrize("name", ["mixtral", "qwen3.5-moe"])
def test_one_wait_a_step_with_experts_and_states(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models = tiny if name in tiny.CHECKPOINTS else hybrids
    with late_device.stand_in(monkeypatch) as device:
        llm = models.make_llm(name)
        device.waits.clear()
        tokens = tiny.tokens(tiny.generate(llm, [tiny.prompt(9)], 5))
        llm.shutdown()
    assert tokens == [models.greedy(name, tiny.prompt(9), 5)]
    assert device.waits == {ENDS_A_STEP: 5}


def rank_on_device(name: str, tp: int, dp: int) -> tuple[list[tuple[int, ...]], dict[str, int], int]:
    """DP rank 1 idles in the last steps; the policies are those of XPUs."""
    from test_step import make_llm

    models = tiny if name in tiny.CHECKPOINTS else hybrids
    with late_device.stand_in(pytest.MonkeyPatch(), late=False) as device:
        llm = make_llm(models.checkpoint(name), tp, dp)
        device.waits.clear()
        rank = rank_checks.own_rank() // tp
        with rank_checks.observed() as ledger:
            tokens = tiny.tokens(tiny.generate(llm, [tiny.prompt(9 + rank)], 6 - 2 * rank))
        waits = dict(device.waits)
        llm.shutdown()
    return tokens, waits, [record.op for record in ledger.records].count("barrier")


@pytest.mark.multiprocess
@pytest.mark.parametrize(("name", "tp", "dp"), [("qwen3.5-moe", 1, 2), ("mixtral", 2, 2)])
def test_ranks_on_devices_wait_for_nothing_but_tokens(name: str, tp: int, dp: int) -> None:
    """Every device has done its work by the time that its host asks, so any wait is another one."""
    models = tiny if name in tiny.CHECKPOINTS else hybrids
    found = launcher.run_ranks(rank_on_device, tp * dp, name, tp, dp, deadline_s=240)
    for rank, (tokens, waits, barriers) in enumerate(found):
        assert waits == {}
        assert barriers > 0
        dp_rank = rank // tp
        assert tokens == [models.greedy(name, tiny.prompt(9 + dp_rank), 6 - 2 * dp_rank)]


# --- steps that are scheduled ahead -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5-moe"])
def test_a_device_has_the_next_step_before_the_host_has_the_last_ones_tokens(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wait a step, and then for the step before."""
    models = tiny if name in tiny.CHECKPOINTS else hybrids
    with late_device.stand_in(monkeypatch) as device:
        llm = models.make_llm(name, async_scheduling=True)
        device.waits.clear()
        finish, left = llm.llm_engine.worker.runner.finish, []

        def finished(step: Any) -> Any:
            output = finish(step)
            left.append(device.launched - device.done)
            return output

        monkeypatch.setattr(llm.llm_engine.worker.runner, "finish", finished)
        prompts = [tiny.prompt(9), tiny.prompt(20)]
        tokens = tiny.tokens(tiny.generate(llm, prompts, 6))
        waits = {what: count for what, count in device.waits.items() if "transfers.py:wait" in what}
        others = set(device.waits) - set(waits)
        llm.shutdown()
    assert tokens == [models.greedy(name, prompt, 6) for prompt in prompts]
    assert list(waits.values()) == [6]
    assert others <= {"event in v1/transfers.py:_taking_turns"}
    assert all(left[:5]), f"the device had nothing to do after a step: {left}"


# --- profiling --------------------------------------------------------------------------------------------------------


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """What attention and states were given: tokens of each request, and lengths where the operator has them."""
    seen: dict[str, list[Any]] = {"paged_attention": [], "gated_delta_net": []}

    def note(operator: str, starts: torch.Tensor, lengths: torch.Tensor) -> None:
        form = (starts.diff().tolist(), lengths.tolist())
        if form not in seen[operator]:
            seen[operator].append(form)

    attention, states = reference.paged_attention, reference.gated_delta_net

    def paged_attention(*args: Any) -> None:
        note("paged_attention", args[4], args[5])
        attention(*args)

    def gated_delta_net(*args: Any) -> torch.Tensor:
        note("gated_delta_net", args[4], args[5])
        return states(*args)

    monkeypatch.setattr(reference, "paged_attention", paged_attention)
    monkeypatch.setattr(reference, "gated_delta_net", gated_delta_net)
    return seen


SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "max_model_len": 128}


def test_profiling_runs_attention_states_and_sampler_at_their_largest(
    ran: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled = []
    call = Sampler.__call__
    monkeypatch.setattr(Sampler, "__call__", lambda *args: sampled.append(args[1].shape) or call(*args))
    with late_device.stand_in(monkeypatch):
        llm = hybrids.make_llm("qwen3.5-moe", **SIZES)
        forms = {operator: list(seen) for operator, seen in ran.items()}
        largest, tokens = list(sampled), tiny.tokens(tiny.generate(llm, [tiny.prompt(9)], 4))
        blocks = {
            len(x.kv_cache[0]) for x in llm.llm_engine.worker.runner.cached_layers.values() if hasattr(x, "kv_cache")
        }
        planned = llm.llm_engine.worker.runner.kv_cache_config.num_blocks
        llm.shutdown()
    assert forms["paged_attention"] == [([1], [128]), ([1] * 4, [128] * 4), ([48], [128])]
    assert forms["gated_delta_net"] == [([1], [1]), ([1] * 4, [1] * 4), ([48], [1])]
    assert [rows for rows, _ in largest] == [4, 4], "without penalties and with them"
    assert tokens == [hybrids.greedy("qwen3.5-moe", tiny.prompt(9), 4)], "a state of profiling was left"
    assert blocks == {planned}


def test_profiling_on_cpu_runs_a_small_step(ran: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KERNELS", "reference")
    hybrids.make_llm("qwen3.5-moe", enforce_eager=True, **SIZES).shutdown()
    assert ran["paged_attention"] == [([1], [1]), ([32], [32])]
    assert ran["gated_delta_net"] == [([1], [1]), ([32], [1])]


# --- the stand-in itself ----------------------------------------------------------------------------------------------

WAITS: dict[str, Any] = {
    "item": lambda x: x[0].item(),
    "int": lambda x: int(x[0]),
    "bool": lambda x: bool((x > 1).any()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "copy": lambda x: torch.empty(4, device="cpu").copy_(x),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 1),
    "unique": lambda x: x.unique(sorted=False),
    "boolean index": lambda x: x[x > 1],
    "boolean write": lambda x: x.index_put_((x > 1,), x.new_zeros(())),
    "index from the host": lambda x: x[torch.tensor([0, 2], device="cpu")],
    "repeats": lambda x: x.repeat_interleave(x.long()),
    "equal": lambda x: torch.equal(x, x + 1),
    "pageable": lambda x: torch.ones(4, device="cpu").to(x.device, non_blocking=True),
    "blocking": lambda x: torch.ones(4, device="cpu").pin_memory().to(x.device),
    "constant": lambda x: torch.tensor([1.0, 2.0], device=x.device),
}


@pytest.mark.parametrize("name", WAITS)
def test_the_stand_in_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with late_device.stand_in(monkeypatch) as device, torch.inference_mode():
        x = torch.ones(4, device="xpu:0") * 2
        assert not device.waits
        WAITS[name](x)
        assert device.waits.total() > 0


def test_the_stand_in_computes_late_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    with late_device.stand_in(monkeypatch) as device, torch.inference_mode():
        pinned = torch.ones(4, device="cpu").pin_memory()
        x = pinned.to("xpu", non_blocking=True)
        y = x[1:].add_(1)
        z = torch.stack([x, x]).softmax(0)
        event = torch.xpu.Event()
        event.record()
        pinned.fill_(5)
        assert not event.query()
        assert not device.waits
        assert x.tolist() == [5, 6, 6, 6]
        assert (y.cpu().tolist(), z.cpu().tolist()) == ([6, 6, 6], [[0.5] * 4] * 2)
        assert event.query()
        with pytest.raises(RuntimeError, match="mixes devices"):
            x + torch.ones(4, device="cpu")
        with pytest.raises(TypeError, match="can't convert xpu"):
            x.numpy()
        with pytest.raises(AssertionError, match="fp64"):
            x.double()
