# SPDX-License-Identifier: Apache-2.0
"""Law 7 over processes: every TP x DP x EP layout gives transformers' greedy tokens, whatever the ranks' loads.

The kind of fault: what one rank runs, pads, or is late with reaches another rank's tokens or leaves it waiting. All
of it runs with uninitialised memory NaN, under random delays before collectives, with the CPU and the XPU policies.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import tiny_models as tiny
from layout_checks import LOADS, check

pytestmark = pytest.mark.multiprocess

LAYOUTS = [  # name, TP, DP, EP
    *itertools.product(("mixtral", "qwen3-moe"), (2, 4), (1,), (False, True)),
    *itertools.product(("mixtral", "qwen3-moe"), (1, 2), (2,), (False, True)),
    *itertools.product(("mixtral", "qwen3-moe"), (1,), (4,), (False, True)),
    ("qwen3-moe-mixed", 2, 1, True),
    ("llama", 2, 1, False),
    ("llama", 4, 1, False),
    ("llama-bias", 2, 1, False),
]


def cases(layouts: list[tuple[str, int, int, bool]]) -> Any:
    """qwen3-moe's experts are divided and exchanged as mixtral's are: the default run has its richest layout."""
    rare = {layout for layout in layouts if layout[0] == "qwen3-moe" and layout[1:] != (2, 2, True)}
    marked = [pytest.param(*layout, marks=[pytest.mark.slow] * (layout in rare)) for layout in layouts]
    return pytest.mark.parametrize(("name", "tp", "dp", "ep"), marked)


@cases(LAYOUTS)
def test_layout(name: str, tp: int, dp: int, ep: bool) -> None:
    check(tiny, name, tp, dp, ep, "cpu", list(LOADS), 0.001)


@cases([layout for layout in LAYOUTS if layout[2] > 1 and layout[3]])
def test_layout_with_xpu_policies(name: str, tp: int, dp: int, ep: bool) -> None:
    check(tiny, name, tp, dp, ep, "xpu", list(LOADS), 0.001)


@pytest.mark.parametrize("policies", ["cpu", "xpu"])
def test_long_delays(policies: str) -> None:
    """The B60 layout and load, each rank late by up to 50 ms before each collective."""
    check(tiny, "mixtral", 2, 2, True, policies, ["b60"], 0.05)


def test_layout_with_the_attention_of_devices() -> None:
    """TP 4 over 2 key-value heads, which two ranks share, through the plain torch backend."""
    env = {"VLLM_ATTENTION_BACKEND": "TORCH_PAGED"}
    check(tiny, "llama-rope", 4, 1, False, "cpu", ["b60", "one-long"], 0, env)
