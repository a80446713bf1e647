# SPDX-License-Identifier: Apache-2.0
"""Each process of a served engine dies or stops while it streams: all ends, with a name, and nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import served
import tiny_models as tiny

pytestmark = [pytest.mark.multiprocess, pytest.mark.alone]
SILENCE_S = 3.0
# Where nobody is to be taken for dead because the machine is busy.
PATIENCE_S = 300.0
# The bound for an error after a death; silence is a death once it has lasted.
BOUND_S = 10.0

slow = pytest.mark.slow
DRILLS = [
    pytest.param("rank 1", signal.SIGKILL, r"rank 1 (was killed by SIGKILL|ended without a word|is gone)"),
    pytest.param("rank 0", signal.SIGSTOP, r"rank 0 has given no sign of life for 3 s"),
    pytest.param("agent", signal.SIGKILL, r"the agent that started the ranks was killed by SIGKILL", marks=slow),
    pytest.param("agent", signal.SIGSTOP, r"the agent that started the ranks has given no sign of life", marks=slow),
    pytest.param("front end", signal.SIGKILL, None),
    pytest.param("front end", signal.SIGSTOP, None, marks=slow),
]


@contextlib.contextmanager
def front_end(
    max_restarts: int = 0, silence_s: float = PATIENCE_S
) -> Iterator[tuple[subprocess.Popen[str], dict[str, int]]]:
    paths = [str(Path(__file__).parent), *sys.path]
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("drill.py")), str(max_restarts)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "VLLM_SILENCE_TIMEOUT_S": str(silence_s),
            "GLOO_SOCKET_IFNAME": "lo",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pids: dict[str, int] = {}
    try:
        said = hear(process, "pids")
        assert said is not None, process.stderr.read()  # type: ignore[union-attr]
        pids = said
        yield process, pids
    finally:
        for pid in {process.pid, *pids.values()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def hear(process: subprocess.Popen[str], word: str) -> Any:
    """What it says under ``word``; None where it ends before."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{") and word in (said := json.loads(line)):
            return said[word]
    return None


def wait_for_end(pids: dict[str, int], seconds: float) -> None:
    left = served.left_of(pids.values(), seconds)
    assert not left, f"still there: {left} of {pids}"


@pytest.mark.parametrize(("victim", "how", "named"), DRILLS)
def test_all_ends_with_a_name(victim: str, how: signal.Signals, named: str | None) -> None:
    before = served.remains()
    with front_end(silence_s=SILENCE_S if how == signal.SIGSTOP else PATIENCE_S) as (process, pids):
        time.sleep(0.3)
        os.kill(pids[victim], how)
        began = time.monotonic()
        if named is not None:
            errors = hear(process, "errors")
            assert time.monotonic() - began < BOUND_S + SILENCE_S * (how == signal.SIGSTOP)
            assert len(errors) == 4
            assert all(re.search(named, error) for error in errors), errors
            assert re.search(named, hear(process, "health"))
        wait_for_end(pids, BOUND_S + SILENCE_S * (how == signal.SIGSTOP))
        process.wait(60)
        assert process.returncode == (0 if named is not None else -signal.SIGKILL)
        assert process.stderr is not None
        if how == signal.SIGSTOP and named is None:
            assert "the front end has given no sign of life for 3 s" in process.stderr.read()
    assert served.remains() == before


@pytest.mark.parametrize("victim", ["rank 0", "rank 1"])
def test_a_late_front_end_names_what_was_lost_first(victim: str) -> None:
    """The machine is busy: when the front end runs again, the other rank has failed with its peer and the agent, having
    lost a rank, has ended. All of it is to be read at once, in no order."""
    with front_end() as (process, pids):
        os.kill(process.pid, signal.SIGSTOP)
        os.kill(pids[victim], signal.SIGKILL)
        assert not served.left_of([pids["agent"]], 120), "the agent has lost a rank and goes on"
        os.kill(process.pid, signal.SIGCONT)
        errors = hear(process, "errors")
        assert all(re.search(rf"{victim} was killed by SIGKILL", e) for e in errors), errors


@slow
def test_ranks_start_again() -> None:
    with front_end(max_restarts=1) as (process, pids):
        os.kill(pids["rank 0"], signal.SIGKILL)
        errors = hear(process, "errors")
        assert all("rank 0 ended" in error and "being started again" in error for error in errors), errors
        assert hear(process, "tokens") == list(tiny.greedy(served.MODEL, tiny.prompt(9), 5))
        new = hear(process, "pids")
        assert new["agent"] == pids["agent"]
        assert not {new["rank 0"], new["rank 1"]} & set(pids.values())
        assert process.wait(30) == 0
        wait_for_end({**pids, **new}, BOUND_S)


@slow
@pytest.mark.parametrize("seed", range(24))
def test_parts_that_are_lost_together(seed: int) -> None:
    """One or two die or stop, at once or one after the other; half the time the front end finds all of it at once."""
    chance, before = random.Random(seed), served.remains()
    victims = chance.sample(["rank 0", "rank 1", "agent"], chance.choice((1, 2, 2)))
    restarts = 0 if "agent" in victims else chance.choice((0, 1))
    is_late = chance.random() < 0.5
    with front_end(restarts) as (process, pids):
        if is_late:
            os.kill(process.pid, signal.SIGSTOP)
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):  # it went with the other
                os.kill(pids[victim], chance.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP)))
            time.sleep(chance.choice((0, 0, 0.05, 0.5)))
        os.kill(process.pid, signal.SIGCONT)
        errors = hear(process, "errors")
        names = "|".join(["the agent that started the ranks", *victims])
        assert all(re.search(rf"the engine was lost: .*({names}) ", error) for error in errors), (victims, errors)
        assert all(("being started again" in error) == bool(restarts) for error in errors), errors
        new = {}
        if restarts:
            assert hear(process, "tokens") == list(tiny.greedy(served.MODEL, tiny.prompt(9), 5))
            new = hear(process, "pids")
        assert process.wait(60) == 0
        wait_for_end({**pids, **new}, BOUND_S + SILENCE_S)
    assert served.remains() == before
