# SPDX-License-Identifier: Apache-2.0
"""Collectives of a device, which return when they are queued: the diagnosis names the one that does not end.

Gloo stands for the device's backend: its collectives run in the background, in order, and an event that is recorded
after them comes when they have ended.
"""

from __future__ import annotations

import ctypes
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faulty_runs
import launcher
import pytest
import rank_checks
import torch
import torch.distributed as dist

from vllm.distributed import get_ep_group
from vllm.distributed.device_communicators import base_device_communicator as base
from vllm.v1.debug import watchdog

pytestmark = pytest.mark.multiprocess
queue: list[tuple[Any, ...]] = []


class Event:
    def record(self) -> None:
        self.works = [work for work, *_ in queue]

    def query(self) -> bool:
        # One that lost its peer has ended for Gloo; a device's never would.
        return all(work.is_completed() and work.is_success() for work in self.works)


def in_background(collective: Any) -> Any:
    def call(*args: Any, group: Any, **kwargs: Any) -> None:
        queue.append((collective(*args, group=group, async_op=True, **kwargs), args))
        # Whoever frees the group would wait for a collective that never ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    return call


def run(fault: str, believes_the_call: bool = False) -> None:
    """As ``faulty_runs.run``, with the EP group on a device."""
    faulty_runs.start_groups()
    faulty_runs.be_patient()
    get_ep_group().device_communicator.device = torch.device("xpu", 0)
    torch.get_device_module = lambda device: SimpleNamespace(Event=Event)  # type: ignore[assignment]
    for module, name in ((base, "_all_gather_single"), (dist, "all_reduce"), (dist, "all_to_all_single")):
        collective = getattr(module, name)
        late = in_background(collective)

        def chosen(*args: Any, late: Any = late, collective: Any = collective, **kwargs: Any) -> Any:
            return (collective if "async_op" in kwargs else late)(*args, **kwargs)

        setattr(module, name, chosen)
    if believes_the_call:
        watchdog.Diagnosis.queued = lambda self, token, event: self.after(token)  # type: ignore[method-assign]
    for step in range(6):
        faulty_runs.run_step(step, fault, entered="dp")
        if not fault and rank_checks.own_rank() == 1:
            time.sleep(0.1)
    watchdog.uninstall()


def outcomes_of(fault: str, trace: str, *args: Any) -> list[launcher.RankOutcome]:
    env = {"VLLM_STALL_TIMEOUT_S": "2", "TORCH_CPP_LOG_LEVEL": "FATAL", "VLLM_TRACE_COLLECTIVES": trace}
    return launcher.rank_outcomes(run, 2, fault, *args, deadline_s=90, env=env)


HANGING = "all_reduce #21 of ep:0 (step 3, layer layers.1.mlp)"
NEXT_ON_THE_HOST = "coordinate_batch_across_dp #4 of dp:0 (step 4, layer none)"


def test_the_collective_that_hangs_is_named_and_not_the_next_wait(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    waiting, _ = outcomes_of("sleeps for ever", str(tmp_path))
    code, text = faulty_runs.doctor(tmp_path, capsys)
    assert code == 1
    assert text.startswith(f"Rank 0 waits for rank 1 in {HANGING} since "), text
    assert re.search(r", queued on the device at [\d:.]+\. Rank 1 \(pid", text), text
    said = f"{waiting.error}\n{waiting.output}"
    assert re.search(rf"\[LEDGER\] .*{re.escape(HANGING)} .*: queued after [\d.]+ ms, NOT FINISHED", said), said
    assert NEXT_ON_THE_HOST in said  # which it is in, too
    assert faulty_runs.doctor(tmp_path, capsys)[1].count(NEXT_ON_THE_HOST) == 0


def test_put_back_an_end_that_is_believed_blames_the_next_wait(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes_of("sleeps for ever", str(tmp_path), True)
    _, text = faulty_runs.doctor(tmp_path, capsys)
    assert f"Rank 0 waits for rank 1 in {NEXT_ON_THE_HOST}" in text, text
    assert HANGING not in text


def test_the_counter_of_the_one_that_hangs_stays_1() -> None:
    waiting, _ = outcomes_of("sleeps for ever", "1")
    last: dict[str, str] = {}
    for name, count in re.findall(r"\[COUNTER\] rank=0 (seq=\d+ \S+) counter=(\d)", waiting.output):
        last[name] = count
    still = [name for name, count in last.items() if count == "1"]
    assert still[0] == "seq=21 all_reduce/uniform"
    assert "[TRACE] rank=0 ep QUEUED all_reduce: " in waiting.output


def test_late_collectives_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = outcomes_of("", str(tmp_path))
    assert [outcome.status for outcome in outcomes] == ["ok", "ok"], outcomes
    code, text = faulty_runs.doctor(tmp_path, capsys)
    assert code == 0, text
    assert text.startswith("Nothing is wrong: ")
    assert text.count("and each has ended") == 1
