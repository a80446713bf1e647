# SPDX-License-Identifier: Apache-2.0
"""GGUF files over processes: every layout gives transformers' tokens, uninitialised memory NaN."""

from __future__ import annotations

import logging
from typing import Any

import launcher
import pytest
import tiny_gguf
import tiny_models as tiny
from layout_checks import check, rank_llm

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize(
    ("name", "tp", "dp", "ep"),
    [("q4_k_m:mixtral", 2, 2, True), ("q5_k_m:llama", 2, 1, False)],
)
def test_layout(name: str, tp: int, dp: int, ep: bool) -> None:
    check(tiny_gguf, name, tp, dp, ep, "cpu", ["b60", "idle-rank"], 0.001)


def told(folder: str, prompt: tuple[int, ...]) -> tuple[Any, list[str]]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("vllm").addHandler(handler)
    llm = rank_llm(folder, 2, 1, False)
    got = tiny.tokens(tiny.generate(llm, [prompt], 8))
    llm.shutdown()
    return got, [line for line in records if line.startswith("GGUF matrices")]


def test_blocks_that_tensor_parallelism_would_cut_are_dequantised_and_said() -> None:
    """256 inputs of o_proj and down_proj over two ranks: of a block of 256, but of eight of 32."""
    prompt = tiny.prompt(9, seed=4)
    for name, line in (
        (
            "q4_k_m:narrow",
            "GGUF matrices kept as they are: 8 Q4_K, 4 Q6_K; dequantised to float32: 2 Q4_K whose blocks tensor "
            "parallelism would cut, 2 Q6_K whose blocks tensor parallelism would cut",
        ),
        ("q4_0:narrow", "GGUF matrices kept as they are: 14 Q4_0, 2 Q8_0; dequantised to float32: none"),
    ):
        by_rank = launcher.run_ranks(told, 2, tiny_gguf.checkpoint(name), prompt, deadline_s=120)
        assert [got for got, _ in by_rank] == [[tiny_gguf.greedy(name, prompt, 8)]] * 2
        assert by_rank[0][1] == [line]
