# SPDX-License-Identifier: Apache-2.0
"""What watches a running engine: one observer of all collectives, and a thread that notices when nothing moves.

``install`` composes them out of what the environment asks for:

| variable | adds |
|---|---|
| ``VLLM_STALL_TIMEOUT_S`` (on) | the watchdog; 0 takes it away |
| ``VLLM_TRACE_COLLECTIVES=1`` | ``[TRACE]`` and ``[COUNTER]`` lines |
| ``VLLM_TRACE_COLLECTIVES=FOLDER`` | the ledger as ``FOLDER/rank-N.jsonl``, for ``vllm doctor FOLDER`` |
| ``VLLM_CHECK_COLLECTIVES=1`` | the consensus check before each collective |
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from vllm import envs, forward_context
from vllm.distributed import observer
from vllm.distributed.observer import CollectiveObserver, CollectiveRecord
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.v1.debug.consensus import Board, ConsensusGuard
from vllm.v1.debug.ledger import Entry, Ledger, describe, record_fields

_POLL_S = 0.5
# A rank that fails stays this long, so that the others print before the launcher ends them.
_GRACE_S = 4 * _POLL_S
_SHOWN = 20


class Diagnosis:
    """The observer of one rank; ``inner`` is the observer that was installed before, which still sees everything.

    Ranks tell each other of failures on the board, and each rank that hears of one prints its last collectives and all
    stacks, once.
    """

    def __init__(
        self,
        ledger: Ledger,
        guard: ConsensusGuard | None = None,
        board: Board | None = None,
        inner: CollectiveObserver | None = None,
        stall_timeout_s: float = 0.0,
    ) -> None:
        self.ledger, self.guard, self.board, self.inner = ledger, guard, board, inner
        self.stall_timeout_s = stall_timeout_s
        self.step_is_running = False
        self._failed = self._reported = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="vllm-watchdog", daemon=True)

    # -- the collectives

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
            self.fail(f"{describe(record_fields(entry.record))} failed: {error}")
        elif self.guard is not None:
            self.guard.done(entry.record)

    # -- the step

    @contextmanager
    def running(self, dp_rank: int, step: int) -> Iterator[None]:
        """Around one step: the watchdog looks only inside."""
        trace = f"[TRACE] rank={self.ledger.rank} execute_model %s dp={dp_rank} iter={step}"
        if self.ledger.prints:
            print(trace % "ENTER", flush=True)
        self.step_is_running = True
        try:
            yield
        except Exception as error:
            self.fail(f"step {step} failed, {forward_context.current_layer or 'no layer'}: {error!r}")
            raise
        finally:
            self.step_is_running = False
        if self.ledger.prints:
            print(trace % "EXIT", flush=True)

    def fail(self, reason: str) -> None:
        """This rank cannot go on: say so in the ledger and to the other ranks, who get time to print."""
        if self._failed:
            return
        self._failed = True
        self.ledger.state = f"failed: {reason}"
        self.ledger.show_life()
        if self.board is not None:
            self._on_board(lambda board: board.raise_alarm(reason))
            time.sleep(_GRACE_S)

    def _on_board(self, call: Any) -> Any:
        """The board goes with the process that serves it (the launcher, or rank 0), and from then on all do without."""
        try:
            return None if self.board is None else call(self.board)
        except dist.DistError:
            self.board = None
            return None

    # -- the thread

    def start(self) -> None:
        observer.set_collective_observer(self)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        if observer.get_collective_observer() is self:
            observer.set_collective_observer(self.inner)
        self.ledger.close(self.ledger.state if self._failed else "ended")

    def _watch(self) -> None:
        # Time is counted in polls: a process that was suspended has not stalled.
        still, seen = 0, None
        while not self._stop.wait(_POLL_S):
            self.ledger.show_life()
            self._on_board(lambda board: board.show_life())
            if alarm := self._on_board(lambda board: board.alarm()):
                self._report(alarm)
            now = (self.ledger.events, forward_context.current_step, forward_context.current_layer)
            still = still + 1 if self.step_is_running and now == seen else 0
            seen = now
            if 0 < self.stall_timeout_s <= still * _POLL_S:
                self._end(still * _POLL_S)

    def _end(self, seconds: float) -> None:
        entry = self.ledger.entries[-1] if self.ledger.entries else None
        inside = entry is not None and entry.end is None
        where = f"inside {describe(record_fields(entry.record))}" if entry and inside else "outside any collective"
        reason = (
            f"no progress for {seconds:g} s (VLLM_STALL_TIMEOUT_S={self.stall_timeout_s:g}) in step "
            f"{forward_context.current_step}, layer {forward_context.current_layer or 'none'}, {where}"
        )
        self.ledger.state = f"stalled: {reason}"
        self.ledger.show_life()
        self._report(reason)
        self._on_board(lambda board: board.raise_alarm(reason))
        time.sleep(_GRACE_S)
        os._exit(1)

    def _report(self, reason: str) -> None:
        if self._reported:
            return
        self._reported = True
        text = f"[STALL] rank={self.ledger.rank} {reason}\n{self.ledger.tail(_SHOWN)}[STALL] stacks of all threads:\n"
        os.write(2, text.encode())
        faulthandler.dump_traceback(2, all_threads=True)


_installed: Diagnosis | None = None


def install(world: GroupCoordinator) -> None:
    """Watch this rank from now on; every rank calls it, after the groups exist.

    Raises:
        ValueError: the variables differ between the ranks (on every rank).
    """
    global _installed
    uninstall()
    trace, checks, stall = envs.VLLM_TRACE_COLLECTIVES, envs.VLLM_CHECK_COLLECTIVES, envs.VLLM_STALL_TIMEOUT_S
    told = world.all_gather_object((checks, f"{time.time():.6f}"))
    if len({check for check, _ in told}) > 1:
        raise ValueError(f"VLLM_CHECK_COLLECTIVES differs between the ranks: {[c for c, _ in told]} by rank")
    prints, folder = trace == "1", None if trace in ("", "0", "1") else trace
    if not (prints or folder or checks or stall > 0):
        return
    rank, run = world.rank, told[0][1]
    several = world.world_size > 1
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
