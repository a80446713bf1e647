# SPDX-License-Identifier: Apache-2.0
"""Quantised models over processes: every layout gives transformers' tokens, uninitialised memory NaN."""

from __future__ import annotations

import re

import launcher
import pytest
import tiny_deepseeks  # noqa: F401  its checkpoints are among tiny_models'
import tiny_fp8_caches as fp8_caches
import tiny_quantised as quantised
from layout_checks import check, rank_llm

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize(
    ("name", "tp", "dp", "ep"),
    [
        ("ct-int4:qwen3.5-moe", 2, 2, True),
        ("gptq:qwen3-moe", 2, 2, True),
        ("fp8-block:mixtral", 2, 1, False),
        (r"fp8-block:llama:layers\.0\.self_attn\.k_proj", 2, 1, False),
    ],
)
def test_layout(name: str, tp: int, dp: int, ep: bool) -> None:
    check(quantised, name, tp, dp, ep, "cpu", ["b60", "idle-rank"], 0.001)


@pytest.mark.parametrize("name", ["mixtral", pytest.param("v3", marks=pytest.mark.slow)])
def test_layout_over_an_fp8_cache(name: str) -> None:
    """The scales of a layer are one number on all ranks; the tokens are those of a cache that the test rounds."""
    loads = ["b60", "idle-rank", "far-apart"]
    check(fp8_caches, name, 2, 2, True, "cpu", loads, 0.001, options={"kv_cache_dtype": "fp8"})


def test_experts_that_move_take_the_order_of_their_columns_along() -> None:
    moving = {"enable_eplb": True, "eplb_config": {"step_interval": 3}}
    check(quantised, "gptq-order:qwen3-moe", 1, 2, True, "cpu", ["b60", "idle-rank"], 0.001, options=moving)


def test_layout_with_xpu_policies() -> None:
    check(quantised, "fp8-block:qwen3.5-moe", 2, 2, True, "xpu", ["b60", "idle-rank"], 0.001)


def refusal(folder: str) -> str:
    with pytest.raises(ValueError) as caught:
        rank_llm(folder, 2, 1, False)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "gptq-order:llama",
            r"o_proj\.weight: columns quantised in the order of their activations.*tensor_parallel_size=1",
        ),
        (
            "gptq-order:qwen3-moe",
            r"experts\.0\.down_proj\.weight: columns .*order.*tensor_parallel_size=1 \(.*enable_expert_parallel=True",
        ),
        (
            "ct-mxfp4:llama",
            r"down_proj\.weight: columns (0 to 48|48 to 96) of 96 cut a group of 32.*tensor_parallel_size",
        ),
    ],
)
def test_what_tensor_parallelism_would_cut_is_refused(name: str, message: str) -> None:
    for told in launcher.run_ranks(refusal, 2, quantised.checkpoint(name), deadline_s=120):
        assert re.search(message, told), told
