# SPDX-License-Identifier: Apache-2.0
"""DP, TP and EP on devices: the B60 case's shapes, uneven and idle ranks, NaN in all that is padding.

Over the device's own backend where each rank can have a device, else over Gloo with ranks that share what there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import device_models
import device_ranks as ranks
import device_suite as suite
import launcher
import pytest
from layout_checks import LOADS, load_of

pytestmark = [pytest.mark.device, pytest.mark.multiprocess]

DEADLINE_S = 150.0


@pytest.fixture(autouse=True, scope="module")
def _launcher_ends() -> Iterator[None]:
    yield
    launcher.stop()


def run(device: str, function: Any, world: int, *args: Any, backend: str = "") -> list[Any]:
    """The ranks' values, over ``backend`` or the best that this machine allows."""
    shared = suite.device_count() < world
    env = {"VLLM_TARGET_DEVICE": device, "VLLM_DIST_BACKEND": backend or ("gloo" if shared else "")}
    return launcher.run_ranks(function, world, *args, deadline_s=DEADLINE_S, env=env)


@pytest.mark.parametrize("backend", ["own", "gloo"])
@pytest.mark.parametrize("world", [2, 4])
def test_collectives(world: int, backend: str, device: str) -> None:
    """Cases 7, 8, 22 and 24: sizes that hung, inputs unchanged, a device by local rank, barriers that name it."""
    count = suite.device_count()
    if backend == "own" and count < world:
        pytest.skip(
            f"{world} ranks over the device's own backend need {world} devices and this machine has {count}: the same "
            "runs over Gloo, with ranks that share one"
        )
    by_rank = run(device, ranks.exchange, world, backend="gloo" if backend == "gloo" else "")
    assert len({collectives for _, _, collectives in by_rank}) == 1
    if device != "cpu":
        assert [where for where, _, _ in by_rank] == [f"{device}:{rank % count}" for rank in range(world)]
        assert {name == "gloo" for _, name, _ in by_rank} == {backend == "gloo"}


def test_groups_stay_apart(device: str) -> None:
    """Cases 9 and 10: a sum over one group has no term of another's ranks."""
    run(device, ranks.groups_stay_apart, 4, 2, 2)


@pytest.mark.parametrize(
    ("tp", "real", "padded", "many_bytes"),
    [
        (2, (26, 30), (30, 30), False),
        (2, (26, 30), (30, 30), True),
        (2, (0, 7), (0, 7), False),
        (1, (0, 9), (9, 9), True),
    ],
    ids=["26 of 30", "26 of 30 in slices", "idle", "idle padded"],
)
def test_exchanged_experts(
    tp: int, real: tuple[int, int], padded: tuple[int, int], many_bytes: bool, device: str
) -> None:
    """Cases 14 and 15: tokens go to experts on other ranks and back; pads are exactly 0 and change nothing."""
    worst = run(device, ranks.exchanged_experts, 2 * tp, tp, 2, real, padded, many_bytes)
    assert max(worst) < 0.06, f"relative errors by rank: {worst}; bfloat16 rounds to 0.02 or so"


@pytest.mark.parametrize(
    ("name", "tp", "dp", "ep"),
    [
        ("mixtral-wide", 2, 2, True),
        ("qwen3.5-moe-wide", 2, 2, True),
        ("qwen3-moe-wide", 1, 2, True),
        ("llama-wide", 2, 1, False),
    ],
)
def test_layout(name: str, tp: int, dp: int, ep: bool, device: str) -> None:
    """The B60 run (prompts of [5, 5, 8, 8] and [7, 5, 11, 7] tokens), an idle rank, one far longer than the other."""
    models = device_models.module_of(name)
    by_rank = run(device, ranks.loads, tp * dp, models.checkpoint(name), tp, dp, ep, list(LOADS))
    for rank, got in enumerate(by_rank):
        for load in LOADS:
            prompts, _ = load_of(load, rank // tp, dp)
            assert len(got[load]) == len(prompts)
            for prompt, tokens in zip(prompts, got[load], strict=True):
                device_models.assert_transformers_tokens(name, prompt, tokens)


@pytest.mark.parametrize("name", ["mixtral-wide", "qwen3.5-moe-wide"])
def test_an_idle_rank_changes_no_bit(name: str, device: str) -> None:
    """Cases 13 and 18: NaN in its dummies, its caches and its states goes nowhere, and nothing of it is written."""
    (_, tokens), (unchanged, nothing) = run(device, ranks.idle_rank, 2, device_models.module_of(name).checkpoint(name))
    assert unchanged
    assert nothing == []
    device_models.assert_transformers_tokens(name, ranks.tiny.prompt(9, seed=10), tokens[0])
