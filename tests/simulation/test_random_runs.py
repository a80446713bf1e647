# SPDX-License-Identifier: Apache-2.0
"""Large engines in random runs of simulated time. A failure names its seed, ranks and steps."""

from __future__ import annotations

import pytest
from simulation import faults
from simulation.timed import ENDS, SILENCE, TICK, World
from simulation.world import Layout, Rank, Violation

from vllm.v1.engine.messages import Alive, Left
from vllm.v1.engine.protocol import FrontProtocol, Silence


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(("size", "steps"), [(64, 300), (192, 60), (1024, 10)])
def test_random_runs(size: int, steps: int, end: str) -> None:
    seed = 1000 * size + ENDS.index(end)
    summary = World(seed, size, steps, end=end).run()
    print(summary)
    assert summary.steps >= steps
    assert summary.requests > 0
    assert (summary.named_after is not None) == (end in ("die", "fail", "freeze"))


# 10^6 engine steps in all, 77 million rank steps: 17 minutes on a core that makes 76,000 rank steps a second.
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(20))
def test_a_million_steps(part: int) -> None:
    rank_steps = steps = 0
    sizes = ((64, 6400),) * 7 + ((128, 4000), (256, 1000), (1024, 200))
    for index, (size, target) in enumerate(sizes):
        summary = World(1_000_000 + 100 * part + index, size, target).run()
        steps += summary.steps
        rank_steps += summary.steps * size
    print(f"{steps} engine steps, {rank_steps} rank steps")
    assert steps >= 50_000


@pytest.mark.parametrize(
    ("rank_class", "symptom"),
    [
        (faults.SkipsEmptySteps, "diverged: .*agree"),
        (faults.WaitsForItsOwnWake, "waits for ever"),
        (faults.TakesStaleWakes, "waits for ever|apart|leak"),
        (faults.WakesWithoutNumbers, "waits for ever|apart|leak"),
        (faults.DecidesDummiesAlone, "waits for ever"),
        (faults.LeavesAlone, "waits for ever|end:"),
        (faults.TakesAllTwice, "twice: .* was added|late"),
    ],
)
def test_random_runs_find_a_fault(rank_class: type[Rank], symptom: str) -> None:
    def run_all() -> None:
        for seed in range(40):
            World(seed, 4, 200, rank_class, end="stop early").run()

    with pytest.raises(Violation, match=f"(?s)({symptom}).*again by seed"):
        run_all()


def test_a_seed_gives_the_same_run_again() -> None:
    assert World(11, 64, 100).run() == World(11, 64, 100).run()


def test_who_slept_hears_before_it_judges() -> None:
    silence = Silence([0, 1], SILENCE)
    silence.heard(0, 1.0)
    silence.heard(1, 1.0)
    assert silence.silent(100.0) == []  # this side was stopped for 99 s
    silence.heard(0, 100.1)
    found = [second for second in range(101, 115) if silence.silent(float(second)) == [1]]
    assert found[0] <= 101 + SILENCE + TICK
    assert silence.silent(115.0) == [0, 1]


def test_a_rank_that_said_that_it_leaves_may_be_silent() -> None:
    front = FrontProtocol(Layout(1, 2).places(), SILENCE)
    front.stop()
    front.receive(0, 1, Left(3), now=1.0)
    front.receive(1, 1, Alive(), now=1.9)
    assert front.closed(0).lost is None
    assert not front.has_ended
    assert [rank for rank, _ in front.tick(2.0).sends] == [1]
    lost = [front.tick(float(second)).lost for second in range(3, 20)]
    assert "rank 1 has given no sign of life for 8 s" in lost
