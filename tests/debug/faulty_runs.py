# SPDX-License-Identifier: Apache-2.0
"""A run of cheap steps on real ranks, shaped as the engine's, in which one rank goes wrong in step 3.

It does so when all others have come to where they wait for it, and until then a rank may stand still for a minute.
"""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import launcher
import rank_checks
import torch

from vllm.distributed import (
    get_dp_group,
    get_ep_group,
    get_tp_group,
    get_world_group,
    init_distributed_environment,
    initialize_model_parallel,
    observer,
)
from vllm.forward_context import set_current_layer
from vllm.v1.debug import watchdog
from vllm.v1.debug.consensus import Board

FAULTS = ("skips a step", "swaps two collectives", "gathers another size", "sleeps for ever", "dies")
FAULTY_RANK, FAULTY_STEP = 1, 3
LAYERS = ("layers.0.mlp", "layers.1.mlp")


def start_groups() -> None:
    """DP 2, and TP over the rest."""
    init_distributed_environment()
    initialize_model_parallel(rank_checks.own_world() // 2, 2, enable_expert_parallel=True)
    watchdog.install(get_world_group())


def be_patient() -> None:
    """The limit on standing still counts on the faulty rank alone, from its fault on."""
    global _stall_timeout_s
    _stall_timeout_s, _installed().stall_timeout_s = _installed().stall_timeout_s, 60.0
    if rank_checks.own_rank() != FAULTY_RANK:
        watchdog._LET_GO_S = 30.0  # the others leave with an exception, however late they run


_stall_timeout_s = 60.0


def _installed() -> watchdog.Diagnosis:
    assert watchdog._installed is not None
    return watchdog._installed


def stay_for(seconds: float) -> None:
    """This rank's watchdog ends it so long after it has told the others, where that is not 0: the others then hear of
    it before they lose the connection, however late they run."""
    if seconds:
        end = _installed()._end
        _installed()._end = lambda reason, how, grace_s=seconds: end(reason, how, grace_s)  # type: ignore[method-assign]


def until_all_wait_here(entered: str = "") -> None:
    """Until every other rank is in a collective that a rank, and in the end this one, has not come to; and until all
    have entered more collectives of the group of this kind than this one has, where one is named."""
    board, own = Board(_installed().ledger._about["run"], rank_checks.own_rank()), rank_checks.own_rank()
    until = time.monotonic() + 50
    while time.monotonic() < until:
        time.sleep(0.02)
        others = board.places([rank for rank in range(rank_checks.own_world()) if rank != own])
        mine = observer.entered()
        told = {**others, own: {"entered": mine}}
        waiting = [of for of in others.values() if of["waits"] and watchdog.Diagnosis._missing(of["waits"], told)]
        in_group = [
            any(num > mine.get(group, num) for group, num in of["entered"].items() if group.startswith(entered))
            for of in others.values()
        ]
        if others and len(waiting) == len(others) and (not entered or all(in_group)):
            return
    raise AssertionError(f"not all wait for rank {own}: {others}")


def run_step(
    step: int, fault: str = "", layers: tuple[str, ...] = LAYERS, max_delay_s: float = 0.0, entered: str = ""
) -> None:
    """One agreement; for each layer a sum over TP and EP, a ragged gather and its scatter. ``entered``: see
    :func:`until_all_wait_here`."""
    faulty = rank_checks.own_rank() == FAULTY_RANK and step == FAULTY_STEP
    delay = random.Random(1000 * step + rank_checks.own_rank())
    ep, sizes = get_ep_group(), [2 + step % 2 + rank % 2 for rank in range(rank_checks.own_world())]
    with watchdog.running(get_dp_group().rank_in_group, step):
        get_dp_group().cpu_all_reduce(torch.zeros(2, 6, dtype=torch.int32), "coordinate_batch_across_dp")
        if faulty and fault == "swaps two collectives":
            until_all_wait_here()
        for layer in reversed(layers) if faulty and fault == "swaps two collectives" else layers:
            set_current_layer(layer)
            if max_delay_s and delay.random() < 0.1:
                time.sleep(delay.uniform(0, max_delay_s))
            if faulty and fault in ("sleeps for ever", "dies") and layer == layers[-1]:
                until_all_wait_here(entered)
            if faulty and fault == "sleeps for ever" and layer == layers[-1]:
                _installed().stall_timeout_s = _stall_timeout_s
                stay_for(float(os.environ.get("DRILL_GRACE_S", "0")))
                time.sleep(3600)
            if faulty and fault == "dies" and layer == layers[-1]:
                os.kill(os.getpid(), signal.SIGKILL)
            get_tp_group().all_reduce(torch.ones(4, 8))
            ep.all_reduce(torch.ones(4, 8))
            rows, told = sizes[ep.rank_in_group], list(sizes)
            if faulty and fault == "gathers another size":
                if layer == layers[0]:
                    until_all_wait_here()
                rows, told = rows + 1, [size + (rank == ep.rank_in_group) for rank, size in enumerate(sizes)]
            ep.all_gatherv([torch.ones(rows, 8), torch.ones(rows, 2, dtype=torch.int64)], 0, told)
            ep.reduce_scatterv(torch.ones(sum(sizes), 8), 0, sizes)
        set_current_layer("")


def run(fault: str, num_steps: int = 6, max_delay_s: float = 0.0, linger_s: float = 0.0) -> None:
    start_groups()
    be_patient()
    for step in range(num_steps):
        if fault == "skips a step" and rank_checks.own_rank() == FAULTY_RANK and step == FAULTY_STEP:
            until_all_wait_here()
            continue
        run_step(step, fault, max_delay_s=max_delay_s)
    time.sleep(linger_s)
    watchdog.uninstall()


def outcomes_of(fault: str, world_size: int, timeout_s: float = 2.0, **env: str) -> list[launcher.RankOutcome]:
    """``timeout_s``: how long the faulty rank may stand still."""
    variables = {"VLLM_STALL_TIMEOUT_S": str(timeout_s), "TORCH_CPP_LOG_LEVEL": "FATAL", **env}
    return launcher.rank_outcomes(run, world_size, fault, deadline_s=90, env=variables)


def told_by(outcomes: list[launcher.RankOutcome]) -> dict[int, str]:
    """What each rank but the faulty one said."""
    return {o.rank: f"{o.error}\n{o.output}" for o in outcomes if o.rank != FAULTY_RANK}


def doctor(folder: Any, capsys: Any, *options: str) -> tuple[int, str]:
    """The exit code and the paragraph of ``vllm doctor``."""
    from vllm.entrypoints.cli.main import main

    capsys.readouterr()
    code = main(["doctor", str(folder), *options])
    printed = capsys.readouterr()
    return code, printed.out + printed.err
