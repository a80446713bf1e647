# SPDX-License-Identifier: Apache-2.0
"""Ranks that schedule steps ahead: host and device in collectives at one time, ranks that idle, that come late and end.

The host agrees on the next step while the thread that stands for the device is in the last one's collectives; both are
delayed at random, on each rank in its own way. Uninitialised memory is NaN.
"""

from __future__ import annotations

import random
from typing import Any

import launcher
import pytest
import rank_checks
import tiny_hybrids as hybrids
import tiny_models as tiny
from async_cases import Arrival, Result, compare, drive, late
from test_step import make_llm

from vllm.distributed import parallel_state

pytestmark = pytest.mark.multiprocess


def arrivals_of(dp_rank: int, round_: int, num: int = 5) -> list[Arrival]:
    """Drawn for a DP rank; the second one has nothing in every third round, and all have less and less."""
    rng = random.Random(100 * round_ + dp_rank)
    if dp_rank == 1 and round_ % 3 == 2:
        return []
    arrivals = []
    for seed in range(rng.randint(1, num)):
        params: dict[str, Any] = {"max_tokens": rng.choice([1, 2, 5, 9]), "seed": seed}
        params["temperature"] = rng.choice([0.0, 1.0])
        params |= rng.choice([{}, {"ignore_eos": True}, {"stop_token_ids": rng.sample(range(3, 100), 25)}])
        params |= rng.choice([{}, {}, {"repetition_penalty": 1.2}, {"logprobs": 2}, {"prompt_logprobs": 0}])
        at = rng.randint(0, 8)
        aborted_at = at + rng.randint(1, 5) if rng.random() < 0.2 else None
        arrivals.append(Arrival(at, tiny.prompt(rng.randint(1, 40), seed=rng.randint(0, 3)), params, aborted_at))
    return arrivals


def rank(folder: str, tp: int, dp: int, rounds: int, async_scheduling: bool, delay: float, **kwargs: Any) -> Any:
    llm = make_llm(folder, tp, dp, async_scheduling=async_scheduling, **kwargs)
    dp_rank = rank_checks.own_rank() // tp
    results: list[list[Result]] = []
    with late(delay, seed=rank_checks.own_rank()), rank_checks.observed(delay / 2) as ledger:
        for round_ in range(rounds):
            results.append(drive(llm, arrivals_of(dp_rank, round_), calls=9))
    name = f"dp:{rank_checks.own_rank() % tp}:cpu"
    agreed = sum(record.group == name for record in ledger.records)
    steps = llm.llm_engine.worker.num_steps
    llm.shutdown()
    return results, steps, agreed


@pytest.mark.parametrize(
    ("name", "tp", "dp", "policies", "rounds"),
    [
        ("mixtral", 1, 2, "cpu", 2),
        ("qwen3-moe", 2, 2, "xpu", 3),
        pytest.param("qwen3.5-moe", 2, 2, "cpu", 12, marks=pytest.mark.slow),
    ],
)
def test_ranks_ahead_give_what_ranks_in_step_give(name: str, tp: int, dp: int, policies: str, rounds: int) -> None:
    models = tiny if name in tiny.CHECKPOINTS else hybrids
    folder = models.checkpoint(name)
    env = {"VLLM_POLICIES": policies, "VLLM_CHECK_COLLECTIVES": str(int(tp == 1))}
    given = {"env": env, "poison": True, "deadline_s": 240}
    ahead = launcher.run_ranks(rank, tp * dp, folder, tp, dp, rounds, True, 0.004, **given)
    in_step = launcher.run_ranks(rank, tp * dp, folder, tp, dp, rounds, False, 0.0, **given)
    assert len({steps for _, steps, _ in ahead}) == 1
    for (found, steps, agreed), (expected, before, _) in zip(ahead, in_step, strict=True):
        for one, other in zip(found, expected, strict=True):
            compare(one, other)
        # Each round ends one step later; a request that waits for its token takes two steps for each.
        assert steps <= 2 * before + rounds
        assert agreed >= steps
    for tp_rank in range(1, tp):
        assert [x[0] for x in ahead[tp_rank::tp]] == [x[0] for x in ahead[::tp]]


def test_put_back_one_group_for_host_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank is in the next step's reduction while its peer is in this step's sum: the check before each collective
    sees the two meet; without it they would be added up."""
    folder = tiny.checkpoint("llama")
    assert {o.status for o in launcher.rank_outcomes(shared_group, 2, folder, False)} == {"ok"}
    found = launcher.rank_outcomes(shared_group, 2, folder, True, env={"VLLM_CHECK_COLLECTIVES": "1"})
    assert {o.status for o in found} == {"raised"}
    assert any("disagree on collective" in o.error and "compare_work_across_tp" in o.error for o in found), found


def shared_group(folder: str, is_shared: bool) -> None:
    if is_shared:
        parallel_state._separate_twins = lambda *_: None
    llm = make_llm(folder, 2, 1, ep=False, async_scheduling=True)
    with late(0.05 * rank_checks.own_rank()):  # so that the host of one comes before its device, of the other after
        for _ in range(3):
            tiny.generate(llm, [tiny.prompt(9), tiny.prompt(5)], 30)
    llm.shutdown()
