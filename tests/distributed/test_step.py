# SPDX-License-Identifier: Apache-2.0
"""The step over DP ranks: idle and starved ranks, pad rows, dummies, and what a step costs in collectives.

Field reports are named by their case numbers. Where a fix is tested, the fault is put back and its symptom seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import launcher
import pytest
import rank_checks
import tiny_models as tiny
import torch
from padding_slots import slots

pytestmark = pytest.mark.multiprocess


def make_llm(folder: str, tp: int, dp: int, ep: bool = True, **kwargs: Any) -> Any:
    from vllm import LLM

    settings: dict[str, Any] = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": 40,
        "enable_prefix_caching": False,
    }
    return LLM(
        folder, tensor_parallel_size=tp, data_parallel_size=dp, enable_expert_parallel=ep, **{**settings, **kwargs}
    )


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.worker.runner


def cache_checksum(llm: Any) -> list[bytes]:
    """Every byte of every layer's cache, the null block included."""
    caches = [layer.kv_cache for layer in runner_of(llm).cached_layers.values()]
    return [rank_checks.bits(tensor).numpy().tobytes() for pair in caches for tensor in pair]


@contextmanager
def rows_after(module: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """The outputs of ``module``, step by step."""
    seen: list[torch.Tensor] = []
    handle = module.register_forward_hook(lambda _, __, output: seen.append(output.clone()))
    yield seen
    handle.remove()


# --- case 1: a rank that can schedule nothing stays in step -----------------------------------------------------------


def starved_rank(folder: str) -> tuple[int, dict[str, int], list[tuple[int, ...]]]:
    """Rank 1's second request finds no block free until the first ends; rank 0 decodes 50 tokens meanwhile."""
    llm = make_llm(folder, 1, 2, num_gpu_blocks_override=9, max_model_len=100)
    rank = rank_checks.own_rank()
    prompts = [tiny.prompt(9)] if rank == 0 else [tiny.prompt(100 - 30), tiny.prompt(60)]
    runner, empty = runner_of(llm), Counter()
    execute = runner.execute_model

    def counted(scheduler_output: Any, has_unfinished: bool) -> Any:
        starved = has_unfinished and len(llm.llm_engine.scheduler.waiting) > 0
        empty["starved" if starved else "fed"] += 1
        empty["nothing scheduled"] += scheduler_output.total_num_scheduled_tokens == 0
        return execute(scheduler_output, has_unfinished)

    runner.execute_model = counted
    with rank_checks.observed() as ledger:
        outputs = tiny.generate(llm, prompts, 50 if rank == 0 else 6)
    counts = Counter(f"{record.group}/{record.op}" for record in ledger.records)
    llm.shutdown()
    return empty["nothing scheduled"], dict(counts), tiny.tokens(outputs)


def test_case_1_starved_rank_runs_dummies() -> None:
    folder = tiny.checkpoint("mixtral")
    (_, counts_0, tokens_0), (idle_1, counts_1, tokens_1) = launcher.run_ranks(starved_rank, 2, folder, poison=True)
    assert counts_0 == counts_1, "the ranks issued different collectives"
    assert idle_1 > 20, f"rank 1 ran only {idle_1} dummies"
    assert tokens_0 == [tiny.greedy("mixtral", tiny.prompt(9), 50)]
    assert tokens_1 == [tiny.greedy("mixtral", tiny.prompt(n), 6) for n in (70, 60)]


# --- case 10: the same prompt on both DP ranks ------------------------------------------------------------------------


def same_prompt(folder: str) -> list[tuple[int, ...]]:
    llm = make_llm(folder, 2, 2)
    result = tiny.tokens(tiny.generate(llm, [tiny.prompt(11)], 16))
    llm.shutdown()
    return result


def test_case_10_same_prompt_same_tokens() -> None:
    expected = [tiny.greedy("qwen3-moe", tiny.prompt(11), 16)]
    assert launcher.run_ranks(same_prompt, 4, tiny.checkpoint("qwen3-moe"), poison=True) == [expected] * 4


# --- case 13 and fix 9: dummies write nothing -------------------------------------------------------------------------


def idle_rank_dummies(folder: str, dummy_slot: int) -> tuple[bool, list[tuple[int, ...]]]:
    """Rank 1 idles through 20 steps with NaN embeddings; is its cache the same, byte for byte?"""
    llm = make_llm(folder, 1, 2)
    runner = runner_of(llm)
    runner.buffers.slot_mapping.pad_value = dummy_slot
    rank = rank_checks.own_rank()
    tiny.generate(llm, [tiny.prompt(20)], 2)  # something to lose
    before = cache_checksum(llm)
    if rank == 1:
        runner.model.model.embed_tokens.register_forward_hook(lambda _, __, out: out.fill_(torch.nan))
    tokens = tiny.tokens(tiny.generate(llm, [tiny.prompt(5)] if rank == 0 else [], 20))
    unchanged = cache_checksum(llm) == before
    llm.shutdown()
    return unchanged, tokens


def test_case_13_dummies_leave_the_cache_unchanged() -> None:
    (_, tokens), (unchanged, _) = launcher.run_ranks(idle_rank_dummies, 2, tiny.checkpoint("mixtral"), -1, poison=True)
    assert unchanged
    assert tokens == [tiny.greedy("mixtral", tiny.prompt(5), 20)], "NaN of the idle rank reached the other"


def test_fault_9_put_back_dummies_write_the_null_block() -> None:
    _, (unchanged, _) = launcher.run_ranks(idle_rank_dummies, 2, tiny.checkpoint("mixtral"), 0, poison=True)
    assert not unchanged


# --- case 15, fixes 2 and 7: pad rows are exactly 0 before the collective ---------------------------------------------


def padded_ranks(folder: str, fault: str) -> tuple[list[Any], list[tuple[int, ...]]]:
    """Tokens [6, 2], padded to 8 rows by capture size and policy."""
    from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager

    # Eager: the batches that steps are captured with would have written the memory whose tail is looked at.
    llm = make_llm(folder, 1, 2, compilation_config={"cudagraph_capture_sizes": [8]}, enforce_eager=True)
    if fault == "attention tail":
        rank_checks.attend_real_rows_only()
    elif fault == "router":
        from vllm.kernels import ops

        select = ops.topk_softmax
        ops.topk_softmax = lambda logits, k, renormalize, slots, _: select(logits, k, renormalize, slots.abs())
    sent: list[Any] = []
    dispatch = AgRsAll2AllManager.dispatch

    def watched(self: Any, hidden: Any, weights: Any, ids: Any, *args: Any) -> Any:
        sent.append((hidden.clone(), ids.clone(), weights.clone()))
        return dispatch(self, hidden, weights, ids, *args)

    AgRsAll2AllManager.dispatch = watched
    with rows_after(runner_of(llm).model.model.layers[0].self_attn) as attended:
        length = (6, 2)[rank_checks.own_rank()]
        tokens = tiny.tokens(tiny.generate(llm, [tiny.prompt(length)], 4))
    llm.shutdown()
    first_hidden, first_ids, first_weights = sent[0]
    return [attended[0][length:], first_ids, first_weights, first_hidden[length:]], tokens


def run_padded(fault: str, policies: str = "xpu") -> list[Any]:
    env = {"VLLM_POLICIES": policies}
    return launcher.run_ranks(padded_ranks, 2, tiny.checkpoint("mixtral"), fault, env=env, poison=True)


@pytest.mark.parametrize("policies", ["cpu", "xpu"])
def test_case_15_pad_rows_are_zero_and_case_14_are_not_routed(policies: str) -> None:
    for length, ((attended, ids, weights, hidden), tokens) in zip((6, 2), run_padded("none", policies), strict=True):
        assert attended.shape[0] == 8 - length
        assert (attended == 0).all(), "attention and output projection of pad rows"
        assert hidden.isfinite().all()
        assert (ids[length:] == -1).all()
        assert (weights[length:] == 0).all()
        assert all(len(set(row)) == len(row) for row in ids[:length].tolist()), "an expert twice in one row"
        assert tokens == [tiny.greedy("mixtral", tiny.prompt(length), 4)]


def test_fault_7_put_back_pad_rows_are_nan() -> None:
    for length, ((attended, *_), _) in zip((6, 2), run_padded("attention tail"), strict=True):
        assert attended.isnan().all(), f"rows {length}..7 held something else than poison"


def test_case_14_put_back_nan_rows_are_routed() -> None:
    """Without -1 on pad rows they are sent to experts as if they were tokens."""
    for length, ((_, ids, *_), _) in zip((6, 2), run_padded("router"), strict=True):
        assert (ids[length:] >= 0).any()


def test_case_14_nan_logits_choose_no_expert_twice() -> None:
    from vllm.kernels import ops

    logits = torch.randn(8, 8)
    logits[5:] = torch.nan
    weights, ids = ops.topk_softmax(logits, 2, True, slots(5, 8))
    assert (ids[5:] == -1).all()
    assert (weights[5:] == 0).all()
    exact = torch.softmax(logits[:5].double(), -1).topk(2)
    assert torch.equal(ids[:5].long(), exact.indices)


# --- fix 2 / law 4 and case 19: metadata that cannot lie --------------------------------------------------------------


def test_fault_2_put_back_raised_count_is_refused() -> None:
    """num_actual_tokens=30 over query_start_loc[-1]=26: the B60 case's fix 2 cannot be built."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, 5, 10, 18, 26], dtype=torch.int32)
    lens = torch.tensor([5, 5, 8, 8], dtype=torch.int32)

    def build(num_actual_tokens: int) -> CommonAttentionMetadata:
        return CommonAttentionMetadata(
            starts, starts, lens, lens, torch.zeros(4, 1, dtype=torch.int32), torch.full((30,), -1),
            torch.zeros(4, dtype=torch.int32), 4, num_actual_tokens, 30, 8, 8,
        )  # fmt: skip

    assert build(26).num_actual_tokens == 26
    with pytest.raises(AssertionError, match="ends at 26 but num_actual_tokens=30"):
        build(30)


def slots_at_build_time(folder: str) -> list[tuple[int, list[int]]]:
    llm = make_llm(folder, 1, 2)
    runner, seen = runner_of(llm), []
    builder = next(iter(runner.builders.values()))
    build = builder.build

    def snapshot(common: Any) -> Any:
        seen.append((common.num_actual_tokens, common.slot_mapping.tolist()))
        return build(common)

    builder.build = snapshot
    tiny.generate(llm, [tiny.prompt(30)], 2)  # every slot row holds a real slot once
    seen.clear()
    tiny.generate(llm, [tiny.prompt(7)] if rank_checks.own_rank() == 0 else [], 6)
    llm.shutdown()
    return seen


def test_case_19_builders_see_the_pad_slots() -> None:
    env = {"VLLM_POLICIES": "xpu"}
    busy, idle = launcher.run_ranks(slots_at_build_time, 2, tiny.checkpoint("mixtral"), env=env, poison=True)
    assert [len(slots) for _, slots in busy] == [len(slots) for _, slots in idle] == [7, 1, 1, 1, 1, 1]
    assert all(real == 0 and set(slots) == {-1} for real, slots in idle)
    assert all(-1 not in slots for _, slots in busy)


# --- what a step costs ------------------------------------------------------------------------------------------------


def collectives_of_a_step(folder: str, tp: int, dp: int) -> tuple[dict[str, int], int, int]:
    """Of one decode step: collectives by group and operation, bytes into the MoE layers', host synchronisations."""
    llm = make_llm(folder, tp, dp)
    engine = llm.llm_engine
    from vllm import SamplingParams

    prompt = {"prompt_token_ids": list(tiny.prompt(4))}
    engine.add_request("0", prompt, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, detokenize=False))
    engine.step()
    to_host = Counter()
    tolist, item = torch.Tensor.tolist, torch.Tensor.item

    def counted(name: str, call: Any) -> Any:
        def wrapper(self: torch.Tensor, *args: Any) -> Any:
            to_host[name] += 1
            return call(self, *args)

        return wrapper

    torch.Tensor.tolist, torch.Tensor.item = counted("tolist", tolist), counted("item", item)
    with rank_checks.observed() as ledger:
        engine.step()
    torch.Tensor.tolist, torch.Tensor.item = tolist, item
    while engine.has_unfinished_requests():
        engine.step()
    llm.shutdown()
    counts = Counter(f"{record.group.split(':')[0]}/{record.op}" for record in ledger.records)
    moved = sum(record.num_bytes for record in ledger.records if record.op in ("all_gatherv", "reduce_scatterv"))
    return dict(counts), moved, sum(to_host.values())


@pytest.mark.parametrize(("tp", "dp"), [(1, 2), (2, 2)])
def test_collectives_and_bytes_per_layer(tp: int, dp: int) -> None:
    layers, hidden, top_k = 2, 64, 2
    for counts, moved, to_host in launcher.run_ranks(
        collectives_of_a_step, tp * dp, tiny.checkpoint("mixtral"), tp, dp
    ):
        assert counts.pop("dp/coordinate_batch_across_dp") == 1
        assert counts.pop("tp/compare_work_across_tp", 0) == (tp > 1)
        assert sum(counts.pop(f"{group}/all_gatherv", 0) for group in ("ep", "dp")) == layers
        assert counts.pop("ep/reduce_scatterv") == layers
        if tp == 1:
            assert not counts
        # Gather: this rank's row with ids and weights; reduce-scatter: one row for every rank.
        rows_in, rows_back = 1, tp * dp
        assert moved == layers * 4 * (rows_in * (hidden + 2 * top_k) + rows_back * hidden)
        assert to_host <= 8, f"{to_host} host synchronisations in a step"
