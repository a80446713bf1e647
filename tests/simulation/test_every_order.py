# SPDX-License-Identifier: Apache-2.0
"""The protocol of serving in every order of events, and faults of the field that this search must find."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
from simulation import faults
from simulation.explore import Explorer, Script, freeze
from simulation.world import Job, Layout, Rank, Violation, Vote, decide

from vllm.v1.engine.messages import Add, Stop
from vllm.v1.engine.protocol import FrontProtocol
from vllm.v1.worker.dp_utils import DPVote, agree

DP2, DP3, TP2, TP2_DP2 = Layout(1, 2), Layout(1, 3), Layout(2, 1), Layout(2, 2)
AB, ABA = [Job("a"), Job("b", 1)], [Job("a"), Job("b", 1), Job("a", 1)]
HELD_AND_TOO_LARGE = [Job("a", tokens=2), Job("b", 1, hold=2), Job("c", blocks=3)]
FULL_POOL = [Job("a", tokens=2, blocks=2), Job("b", blocks=2), Job("c", 1)]
ONE_GROUP = [Job("a"), Job("b"), Job("a")]

# States of a search: at least so many, or it has lost events. All together 530 thousand, in the slow ones 1.9 million.
SEARCHES = {
    "DP 2, an id used again": (Script(DP2, ABA, aborts=1, stop=True), 40_000),
    "DP 2, held, too large, a duplicate": (
        Script(DP2, HELD_AND_TOO_LARGE, stop=True, duplicates=1, max_empty=3),
        50_000,
    ),
    "DP 2, a full pool": (Script(DP2, FULL_POOL, stop=True), 1_000),
    "DP 2, an abort, a duplicate": (Script(DP2, AB, aborts=1, stop=True, duplicates=1), 50_000),
    "DP 2, a death": (Script(DP2, [Job("a", tokens=2), Job("b", 1)], stop=True, deaths=1), 30_000),
    "TP 2, all but a death": (Script(TP2, ONE_GROUP, aborts=1, stop=True, duplicates=1), 20_000),
    "TP 2, a death": (Script(TP2, ONE_GROUP[:2], aborts=1, stop=True, deaths=1), 15_000),
    "DP 3, an abort": (Script(DP3, AB, aborts=1, stop=True), 80_000),
    "DP 3, a request each": (Script(DP3, [Job("a"), Job("b", 1), Job("c", 2)], stop=True), 50_000),
    "DP 3, a death": (Script(DP3, AB[:1], stop=True, deaths=1), 30_000),
    "TP 2 x DP 2": (Script(TP2_DP2, AB, aborts=1, stop=True), 15_000),
}
LONG_SEARCHES = {
    "DP 2, two aborts": (Script(DP2, ABA, aborts=2, stop=True), 200_000),
    "DP 2, a full pool, an abort": (Script(DP2, FULL_POOL, aborts=1, stop=True), 100_000),
    "DP 2, an abort, a death": (Script(DP2, AB, aborts=1, stop=True, deaths=1), 200_000),
    "DP 3, a request each, an abort": (Script(DP3, [Job("a"), Job("b", 1), Job("c", 2)], aborts=1, stop=True), 200_000),
    "TP 2 x DP 2, three requests": (Script(TP2_DP2, [Job("a"), Job("b", 1), Job("c")], aborts=1, stop=True), 100_000),
}


def _search(script: Script, at_least: int) -> None:
    explorer = Explorer(script)
    states = explorer.run()
    print(
        f"{states} states, {explorer.transitions} events, {explorer.rests} at rest, {explorer.last_step} steps at most"
    )
    assert states >= at_least
    _check_agreed_commutes(explorer)


def _check_agreed_commutes(explorer: Explorer) -> None:
    """What a rank is told, and the end of the step that it is in, give the same in either order."""
    checked = 0
    for number, *event in list(explorer._memo):
        if event[:1] != ["take"] or not explorer.objects[number].protocol.running:
            continue
        counted, message = explorer.objects[event[1]]
        for any_unfinished, all_stopping in ((True, False), (False, False), (False, True)):
            before = copy.deepcopy(explorer.objects[number].protocol)
            if all_stopping and (isinstance(message, Add | Stop) or before._additions or before._stop_is_new):
                continue  # who leaves has been told to, and nothing is told to it after that
            after = copy.deepcopy(before)
            before.receive(counted, message)
            told = before.agreed(any_unfinished, all_stopping)
            assert after.agreed(any_unfinished, all_stopping) == told
            after.receive(counted, message)
            assert freeze(after) == freeze(before), message
            checked += 1
    assert checked > 0


@pytest.mark.parametrize("name", SEARCHES)
def test_every_order_of_events(name: str) -> None:
    _search(*SEARCHES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG_SEARCHES)
def test_every_order_of_more_events(name: str) -> None:
    _search(*LONG_SEARCHES[name])


@pytest.mark.parametrize("layout", [DP2, TP2], ids=["DP 2", "TP 2"])
def test_events_that_come_first_leave_no_end_out(layout: Layout) -> None:
    ends: list[set[Any]] = []
    for reduce in (True, False):
        explorer = Explorer(Script(layout, [Job("a"), Job("b", layout.dp - 1)], aborts=1, stop=True), reduce=reduce)
        found: set[Any] = set()

        def note(state: Any, explorer: Explorer = explorer, found: set[Any] = found) -> None:
            found.add(freeze([explorer.objects[state[0]], [explorer.objects[rank] for rank in state[1]]]))

        explorer.check = note  # type: ignore[method-assign]
        explorer.run()
        ends.append(found)
    assert len(ends[0]) > 20
    assert ends[0] == ends[1]


FAULTS: dict[str, tuple[type, type, Script, str]] = {
    "a step without tokens skips the agreement": (
        faults.SkipsEmptySteps, FrontProtocol, Script(DP2, [Job("a", tokens=2), Job("b", 1, hold=2)], max_empty=3),
        r"diverged: .*'agree', (\d+).* and .*'agree', (?!\1)",
    ),
    "a rank pauses on its own": (
        faults.PausesAlone, FrontProtocol, Script(DP2, [Job("a", tokens=3)], stop=True), "waits for ever: .*'agree'",
    ),
    "who wakes waits to be woken": (
        faults.WaitsForItsOwnWake, FrontProtocol, Script(DP2, [Job("a")]), r"waits for ever: .*\{1: \('agree', 0\)\}",
    ),
    "a stale wave": (faults.TakesStaleWakes, FrontProtocol, Script(DP2, AB), "waits for ever: .*'agree'"),
    "a wake without a step's number": (
        faults.WakesWithoutNumbers, FrontProtocol, Script(DP2, AB), "waits for ever: .*'agree'",
    ),
    "a dummy decided on local counts": (
        faults.DecidesDummiesAlone, FrontProtocol, Script(DP2, [Job("a")]), "waits for ever: .*'forward', 0.*'agree', 1"
    ),
    "max_num_seqs // dp == 0": (
        Rank, FrontProtocol, Script(Layout(1, 2, max_num_seqs=1 // 2), [Job("a")]), "empty: 2 steps in a row",
    ),
    "a stop that is not agreed on": (
        faults.LeavesAlone, FrontProtocol, Script(DP2, [Job("a")], stop=True), "waits for ever: .*'agree'",
    ),
    "a rank takes duplicates": (
        faults.TakesAllTwice, FrontProtocol, Script(DP2, [Job("a", tokens=2)], duplicates=1), "twice: a#1 was added",
    ),
    "the front end takes duplicates": (
        Rank, faults.HearsAllTwice, Script(DP2, [Job("a", tokens=2)], duplicates=1), r"twice: .* gets \[0\]",
    ),
    "an abort is forgotten": (
        faults.ForgetsAborts, FrontProtocol, Script(DP2, AB[:1] * 2, aborts=1), "late: .* run on",
    ),
    "an id comes again": (
        Rank, faults.ReusesIds, Script(DP2, [Job("a", tokens=2), Job("a")], aborts=1), "(twice|late): ",
    ),
    "a wake is lost": (Rank, faults.LosesWakes, Script(DP2, AB), "waits for ever: .*'agree'"),
}  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_field_is_found(name: str) -> None:
    rank_class, front_class, script, symptom = FAULTS[name]
    with pytest.raises(Violation, match=symptom):
        Explorer(script, rank_class, front_class, reduce=False).run(limit=300_000)


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_the_toy_agrees_as_the_engine_does(dp: int) -> None:
    for votes in itertools.product([Vote(0, False, True), Vote(0, True, False), Vote(3, True, True)], repeat=dp):
        own = decide(votes)
        real = agree(
            [DPVote(v.tokens, v.tokens, 0, int(v.unfinished), 7, 0, stopping=int(v.stopping)) for v in votes], dp_rank=0
        )
        assert (own.sizes if any(own.sizes) else (0,) * dp) == real.num_tokens_padded_across_dp
        assert own[1:3] == (real.any_unfinished, real.all_stopping)
        assert bool(own.sizes) == real.should_run
