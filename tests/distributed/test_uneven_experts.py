# SPDX-License-Identifier: Apache-2.0
"""Experts that cannot be divided over the ranks: tokens are transformers', placement is as even as can be.

Ragged ranks, idle ranks, uninitialised memory NaN; with 3 experts over 4 ranks one rank has none.
"""

from __future__ import annotations

import pytest
import tiny_hybrids as hybrids
import tiny_models as tiny
from launcher import run_ranks
from layout_checks import LOADS, check, rank_llm

pytestmark = pytest.mark.multiprocess

LAYOUTS = [  # experts, TP, DP
    (5, 2, 1),
    (5, 1, 2),
    (6, 2, 2),
    (6, 4, 1),
    (3, 1, 4),
]


@pytest.fixture
def mixtral_of(monkeypatch):
    def name_of(experts: int) -> str:
        name = f"mixtral-{experts}-experts"
        stem, fields = tiny.CHECKPOINTS["mixtral"]
        monkeypatch.setitem(tiny.CHECKPOINTS, name, (stem, fields | {"num_local_experts": experts}))
        return name

    return name_of


@pytest.mark.parametrize(("experts", "tp", "dp"), LAYOUTS)
def test_layout(mixtral_of, experts: int, tp: int, dp: int) -> None:
    check(tiny, mixtral_of(experts), tp, dp, True, "cpu", list(LOADS), 0.001)


@pytest.mark.parametrize(("experts", "tp", "dp"), [(5, 1, 2), (3, 2, 2)])
def test_layout_with_xpu_policies(mixtral_of, experts: int, tp: int, dp: int) -> None:
    check(tiny, mixtral_of(experts), tp, dp, True, "xpu", list(LOADS), 0.001)


def test_a_shared_expert_beside_a_rank_without_experts(monkeypatch) -> None:
    cls, fields = hybrids.CHECKPOINTS["qwen3-next"]
    monkeypatch.setitem(hybrids.CHECKPOINTS, "qwen3-next-3-experts", (cls, fields | {"num_experts": 3}))
    check(hybrids, "qwen3-next-3-experts", 2, 2, True, "cpu", ["b60", "idle-rank"], 0.001)


def placement(folder: str, tp: int, dp: int) -> list[list[int]]:
    """On a rank: its experts of each layer."""
    from vllm.model_executor.layers.fused_moe import FusedMoE

    llm = rank_llm(folder, tp, dp)
    layers = [m for m in llm.llm_engine.worker.runner.model.modules() if isinstance(m, FusedMoE)]
    for layer in layers:
        assert (layer.w13.E if layer.w13 is not None else 0) == layer.local_num_experts
    held = [layer.local_experts for layer in layers]
    llm.shutdown()
    return held


def test_placement(mixtral_of) -> None:
    by_rank = run_ranks(placement, 4, tiny.checkpoint(mixtral_of(6)), 2, 2)
    assert by_rank == [[one, one] for one in ([0, 1], [2, 3], [4], [5])]
