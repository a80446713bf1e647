# SPDX-License-Identifier: Apache-2.0
"""Expert-parallel load balancing: the placement by hand and by property, experts that move in the middle of a run (no
answer changes, on any layout, under poison, with idle ranks), and weights that come from a trainer after they moved."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import rank_checks
import tiny_hybrids as hybrids
import tiny_models as tiny
import torch
from async_cases import late
from hypothesis import given
from hypothesis import strategies as st
from launcher import run_ranks
from layout_checks import LOADS, check, load_of, rank_llm

from vllm.distributed.eplb import balance, describe, first_placement, imbalance

PROMPTS = [tiny.prompt(5, seed=1), tiny.prompt(7, seed=2)]
AHEAD = ["b60", "idle-rank"]
EVERY_3 = {"enable_eplb": True, "eplb_config": {"step_interval": 3}}


def test_placement_by_hand() -> None:
    owners = first_placement(6, 3)
    assert owners == [[0, 1], [2, 3], [4, 5]]
    load = [10, 9, 0, 1, 5, 0]
    assert imbalance(load, owners) == 19 * 3 / 25
    # 10 to rank 0, 9 to rank 1, 5 to rank 2, 1 to rank 2 (5 is least); then 0 to rank 1, which it is on, 0 to the last
    assert balance(load, owners) == [[0, 5], [2, 1], [4, 3]]
    assert balance([1] * 6, owners) == owners
    assert balance([0] * 6, owners) == owners
    assert first_placement(3, 4) == [[0], [1], [2], []]
    assert describe([[0, 1, 2, 7], []]) == "rank 0: 0-2 7; rank 1: none"


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 5), st.randoms())
def test_any_placement_keeps_all_experts_and_gets_no_worse(load: list[int], ranks: int, random: Any) -> None:
    owners = first_placement(len(load), ranks)
    for _ in range(3):
        placed = balance(load, owners)
        assert sorted(itertools.chain(*placed)) == list(range(len(load)))
        assert [len(of) for of in placed] == [len(of) for of in owners]
        assert imbalance(load, placed) <= imbalance(load, owners)
        for before, after in zip(owners, placed, strict=True):  # who stays keeps its place
            assert all(before.index(e) == after.index(e) for e in set(before) & set(after))
        owners, load = placed, random.sample(load, len(load))


@pytest.mark.multiprocess
@pytest.mark.parametrize(("tp", "dp", "policies"), [(2, 2, "cpu"), (1, 2, "xpu"), (2, 1, "cpu")])
def test_tokens_are_the_same_while_experts_move(tp: int, dp: int, policies: str) -> None:
    check(tiny, "qwen3-moe", tp, dp, True, policies, list(LOADS), 0.001, options=EVERY_3)


def moved_ahead(folder: str) -> Any:
    """On a rank of two: tokens by load, the experts of each layer at the end, and the steps that their loads were
    summed in, as the collectives have it."""
    from vllm.model_executor.layers.fused_moe import FusedMoE

    llm = rank_llm(folder, 1, 2, async_scheduling=True, **EVERY_3)
    layers = [m for m in llm.llm_engine.worker.runner.model.modules() if isinstance(m, FusedMoE)]
    tokens = []
    with late(0.004, seed=rank_checks.own_rank()), rank_checks.observed() as ledger:
        for load in AHEAD:
            prompts, num_tokens = load_of(load, rank_checks.own_rank(), 2)
            tokens.append(tiny.tokens(tiny.generate(llm, prompts, num_tokens)))
    steps = [record.step for record in ledger.records if record.op == "expert_load"]
    experts = [layer.local_experts for layer in layers]
    llm.shutdown()
    return tokens, experts, steps


@pytest.mark.multiprocess
def test_experts_move_between_steps_that_are_launched_ahead() -> None:
    """The host is in the next step's agreement meanwhile. The steps, and so the loads and the moves, are not those of
    the engine that runs one step at a time: the last row of a request is thrown away."""
    by_rank = run_ranks(moved_ahead, 2, tiny.checkpoint("qwen3-moe"), poison=True)
    for rank, (tokens, _, steps) in enumerate(by_rank):
        for load, got in zip(AHEAD, tokens, strict=True):
            prompts, num_tokens = load_of(load, rank, 2)
            assert got == [tiny.greedy("qwen3-moe", prompt, num_tokens) for prompt in prompts], (rank, load)
        assert steps == list(range(3, steps[-1] + 1, 3))
        assert len(steps) > 3
    first = [experts for _, experts, _ in by_rank]
    assert any(layer != list(range(4)) for layer in first[0]), "no expert moved"
    assert all(sorted(one + other) == list(range(8)) for one, other in zip(*first, strict=True))


@pytest.mark.multiprocess
def test_hybrid_with_a_shared_expert_and_more_ranks_than_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    cls, fields = hybrids.CHECKPOINTS["qwen3-next"]
    monkeypatch.setitem(hybrids.CHECKPOINTS, "qwen3-next-3-moving", (cls, fields | {"num_experts": 3}))
    check(hybrids, "qwen3-next-3-moving", 2, 2, True, "cpu", ["b60", "idle-rank"], 0.0, options=EVERY_3)


def moved_and_reloaded(folder: str, tp: int, dp: int, other: dict[str, torch.Tensor]) -> Any:
    """On a rank: the experts of each layer before and after a run, and their load; then tokens with other weights,
    which came before the experts moved, too. The second DP rank has one prompt, and rows of padding."""
    from vllm.model_executor.layers.fused_moe import FusedMoE

    llm = rank_llm(folder, tp, dp, **EVERY_3)
    runner = llm.llm_engine.worker.runner
    layers = [m for m in runner.model.modules() if isinstance(m, FusedMoE)]
    first = [layer.local_experts for layer in layers]
    prompts = PROMPTS[: 2 - rank_checks.own_rank() // tp]
    llm.collective_rpc("apply_model", args=(lambda model: model.load_weights(other.items()),))
    tiny.generate(llm, prompts, 3)  # steps 0 to 2
    counted = [layer.expert_load.tolist() for layer in layers]
    tiny.generate(llm, prompts, 6)
    last = [layer.local_experts for layer in layers]
    llm.collective_rpc("apply_model", args=(lambda model: model.load_weights(other.items()),))
    tokens = tiny.tokens(tiny.generate(llm, prompts, 8))
    llm.shutdown()
    return first, last, counted, tokens


@pytest.mark.multiprocess
def test_loads_count_tokens_alone_and_a_trainer_finds_the_moved_experts() -> None:
    from safetensors.torch import load_file

    name = "qwen3-moe"
    other = load_file(f"{tiny.checkpoint(name, seed=5)}/model.safetensors")
    by_rank = run_ranks(
        moved_and_reloaded, 4, tiny.checkpoint(name), 2, 2, other, env={"VLLM_POLICIES": "xpu"}, poison=True
    )
    expected = [tiny.greedy(name, prompt, 8, seed=5) for prompt in PROMPTS]
    for layer in range(2):
        before = [experts for rank in by_rank for experts in rank[0][layer]]
        after = [experts for rank in by_rank for experts in rank[1][layer]]
        assert before == list(range(8))
        assert sorted(after) == before
    assert any(first != last for first, last, _, _ in by_rank)
    for rank, (_, _, counted, tokens) in enumerate(by_rank):
        num_prompts = 2 - rank // 2
        assert tokens == expected[:num_prompts]
        for load in counted:
            # the prompts, then two steps of a token each; two experts a token
            assert sum(load[:-1]) == 2 * (sum(map(len, PROMPTS[:num_prompts])) + 2 * num_prompts)


@pytest.mark.parametrize(
    ("options", "error", "names"),
    [
        ({"enable_eplb": True}, ValueError, "needs enable_expert_parallel=True"),
        ({"eplb_config": {"step_interval": 0}}, ValueError, "step_interval=0"),
        ({"eplb_config": {"num_redundant_experts": 2}}, NotImplementedError, "num_redundant_experts=2"),
        ({"eplb_config": {"steps": 2}}, NotImplementedError, "steps=2"),
    ],
)
def test_bad_input_is_named(options: dict[str, Any], error: type[Exception], names: str) -> None:
    from vllm.engine.arg_utils import EngineArgs

    with pytest.raises(error, match=names):
        EngineArgs(model=tiny.checkpoint("qwen3-moe"), **options).create_engine_config()
