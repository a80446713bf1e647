# SPDX-License-Identifier: Apache-2.0
"""What watches a running engine: one observer of all collectives, and a thread that notices when nothing moves.

``VLLM_STALL_TIMEOUT_S`` keeps the watchdog, ``VLLM_TRACE_COLLECTIVES`` prints the collectives or writes the ledger,
``VLLM_CHECK_COLLECTIVES`` adds the consensus check. With all three off there is no observer.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from vllm import envs, forward_context
from vllm.distributed import observer
from vllm.distributed.observer import CollectiveObserver, CollectiveRecord
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.v1.debug.consensus import Board, ConsensusGuard
from vllm.v1.debug.ledger import Entry, Ledger, describe

_POLL_S = 0.25
# A rank that fails stays this long, so that the others print before the launcher ends them.
_GRACE_S = 6 * _POLL_S
_SHOWN = 20


@dataclass(eq=False)
class Diagnosis:
    """The observer of one rank; ``inner``, the one that was installed before, still sees everything.

    A rank that fails says so on the board; each that reads it prints its last collectives and all stacks, once.
    """

    ledger: Ledger
    guard: ConsensusGuard | None = None
    board: Board | None = None
    inner: CollectiveObserver | None = None
    stall_timeout_s: float = 0.0

    def __post_init__(self) -> None:
        self._step_runs = self._failed = self._reported = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="vllm-watchdog", daemon=True)

    def start(self) -> None:
        observer.set_collective_observer(self)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        if observer.get_collective_observer() is self:
            observer.set_collective_observer(self.inner)
        if not self._failed:
            self.ledger.state = "ended"
        self.ledger.close()

    def before(self, record: CollectiveRecord) -> tuple[Entry, Any]:
        entry = self.ledger.begin(record)
        try:
            if self.guard is not None:
                self.guard.check(record)
            return entry, None if self.inner is None else self.inner.before(record)
        except Exception as error:
            self.ledger.end(entry, error)
            self.fail(str(error))
            raise

    def after(self, token: tuple[Entry, Any], error: BaseException | None = None) -> None:
        entry, inner_token = token
        self.ledger.end(entry, error)
        if self.inner is not None:
            self.inner.after(inner_token, error)
        if error is not None:
            self.fail(f"{describe(entry.record)} failed: {error}")
        elif self.guard is not None:
            self.guard.done(entry.record)

    @contextmanager
    def running(self, dp_rank: int, step: int) -> Iterator[None]:
        """Around one step: only inside can anything stall."""
        trace = f"[TRACE] rank={self.ledger.rank} execute_model %s dp={dp_rank} iter={step}"
        if self.ledger.prints:
            print(trace % "ENTER", flush=True)
        self._step_runs = True
        try:
            yield
        except Exception as error:
            self.fail(f"step {step} failed, layer {forward_context.current_layer or 'none'}: {error!r}")
            raise
        finally:
            self._step_runs = False
        if self.ledger.prints:
            print(trace % "EXIT", flush=True)

    def fail(self, reason: str, how: str = "failed") -> None:
        """This rank cannot go on: say so in the ledger and to the others, who get time to print."""
        if not self._failed:
            self._failed, self.ledger.state = True, f"{how}: {reason}"
            self.ledger.show_life()
            if self.board is not None:
                # A launcher that sees another rank die ends this one before its exception is shown.
                os.write(2, f"[FAIL] rank={self.ledger.rank} {how}: {reason}\n".encode())
                self._on_board(lambda board: board.raise_alarm(reason))
                time.sleep(_GRACE_S)

    def _on_board(self, call: Callable[[Board], Any]) -> Any:
        """The board goes with the process that serves it (the launcher, or rank 0); then there is nobody to tell."""
        try:
            return None if self.board is None else call(self.board)
        except dist.DistError:
            self.board = None
            return None

    def _watch(self) -> None:
        # Time is counted in polls: a process that was suspended has not stalled.
        still, seen = 0, None
        while not self._stop.wait(_POLL_S):
            self.ledger.show_life()
            self._on_board(Board.show_life)
            if alarm := self._on_board(lambda board: board.read("alarm")):
                self._report(alarm)
            now = (self.ledger.events, forward_context.current_step, forward_context.current_layer)
            still = still + 1 if self._step_runs and now == seen else 0
            seen = now
            if 0 < self.stall_timeout_s <= still * _POLL_S:
                self._end()

    def _end(self) -> None:
        last = self.ledger.entries[-1] if self.ledger.entries else None
        place = f"inside {describe(last.record)}" if last and last.end is None else "outside any collective"
        step, layer = forward_context.current_step, forward_context.current_layer or "none"
        reason = (
            f"no progress for VLLM_STALL_TIMEOUT_S={self.stall_timeout_s:g} s in step {step}, layer {layer}, {place}"
        )
        self._report(reason)
        self.fail(reason, "stalled")
        os._exit(1)

    def _report(self, reason: str) -> None:
        if not self._reported:
            self._reported = True
            text = (
                f"[STALL] rank={self.ledger.rank} {reason}\n{self.ledger.tail(_SHOWN)}[STALL] stacks of all threads:\n"
            )
            os.write(2, text.encode())
            faulthandler.dump_traceback(2, all_threads=True)


_installed: Diagnosis | None = None


def install(world: GroupCoordinator) -> None:
    """Watch this rank from now on; every rank calls it, after the groups exist."""
    global _installed
    uninstall()
    trace, checks, stall = envs.VLLM_TRACE_COLLECTIVES, envs.VLLM_CHECK_COLLECTIVES, envs.VLLM_STALL_TIMEOUT_S
    run = world.all_gather_object(f"{time.time():.6f}")[0]
    prints, folder = trace == "1", None if trace in ("", "0", "1") else trace
    if not (prints or folder or checks or stall > 0):
        return
    rank, several = world.rank, world.world_size > 1
    _installed = Diagnosis(
        Ledger(rank, world.world_size, run, folder, prints),
        ConsensusGuard(Board(run, rank)) if checks and several else None,
        Board(run, rank) if several else None,
        observer.get_collective_observer(),
        stall,
    )
    _installed.start()


def uninstall() -> None:
    global _installed
    if _installed is not None:
        _installed.stop()
        _installed = None


@contextmanager
def running(dp_rank: int, step: int) -> Iterator[None]:
    """Around one step of this rank; names it for all diagnostics."""
    forward_context.set_current_step(step)
    if _installed is None:
        yield
    else:
        with _installed.running(dp_rank, step):
            yield
