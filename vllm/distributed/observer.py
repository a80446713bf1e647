# SPDX-License-Identifier: Apache-2.0
"""The one point that every collective passes.

An observer sees each collective before and after it runs: a ledger, a stall watchdog, a consensus check, or a test
that delays ranks at random. Without one, a collective costs one counter increment more than the bare call. A failed
or timed-out collective leaves here as :class:`CollectiveError`, which names rank, group, operation, step and layer.

On a device the call returns once the collective is queued. It has ended when its work has, which an event tells.

A peer is waited for as long as it takes. What ends the waiting is :func:`give_up`: the run is lost, with the reason.
"""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed import ProcessGroup, Work

from vllm import envs, forward_context

UNIFORM = "uniform"
VARIABLE = "variable-size"


class CollectiveError(RuntimeError):
    """A collective failed or timed out; ``record`` says which."""

    def __init__(self, message: str, record: CollectiveRecord) -> None:
        super().__init__(message)
        self.record = record

    def __reduce__(self) -> tuple[type[CollectiveError], tuple[str, CollectiveRecord]]:
        return CollectiveError, (str(self), self.record)


class CollectiveRecord(NamedTuple):
    """One collective of this process.

    Attributes:
        step, layer: where in the run; -1 and empty outside a step.
        op: what the engine asked for (``all_gatherv``, ``reduce_scatterv``, …).
        group: unique name of the group, ``kind:index`` (``ep:0``); ``seq`` counts that group's collectives from 0.
        rank, ranks: this process's global rank, and the group's.
        path: ``uniform`` where all ranks pass the same shape, else ``variable-size``.
        sizes: rows of each rank of the group where the operation has them.
        shapes, dtypes: of this rank's input tensors.
        num_bytes: of this rank's input tensors.
    """

    step: int
    seq: int
    op: str
    group: str
    rank: int
    ranks: tuple[int, ...]
    path: str
    sizes: tuple[int, ...] | None
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    num_bytes: int
    layer: str

    @property
    def repeated(self) -> tuple[Any, ...]:
        """The fields after ``step`` and ``seq``, which come back in every step of decode."""
        return self[2:]


class CollectiveObserver(Protocol):
    def before(self, record: CollectiveRecord) -> Any:
        """Called on the issuing thread before the collective; what it returns is passed to ``after``."""

    def after(self, token: Any, error: BaseException | None = None) -> None:
        """Called once the collective has ended, or with the exception that it raised."""

    def queued(self, token: Any, event: Any) -> None:
        """Called in the place of ``after`` where the collective waits in the queue of a device: ``event.query()``, on
        any thread, says whether it has ended."""


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_observer: CollectiveObserver | None = None
_running: record_collective | None = None
_seq: Counter[str] = Counter()
_lost = ""
_PIECE = timedelta(seconds=0.5)


def set_collective_observer(observer: CollectiveObserver | None) -> CollectiveObserver | None:
    """Install the observer (None removes it) and return the one that was installed before."""
    global _observer
    previous, _observer = _observer, observer
    return previous


def get_collective_observer() -> CollectiveObserver | None:
    return _observer


def reset_sequence_numbers() -> None:
    """Start every group's count anew; called when the groups are destroyed."""
    global _lost
    _seq.clear()
    _lost = ""


def entered() -> Mapping[str, int]:
    """Group → how many of its collectives this rank has begun."""
    return dict(_seq)


def give_up(reason: str) -> None:
    """The run is lost: no collective begins any more, and one that the host waits in fails; the first reason stays."""
    global _lost
    _lost = _lost or reason


def lost() -> str:
    """Why the run is lost; empty while it is not."""
    return _lost


def mark_queued(device: torch.device) -> None:
    """The collective that is being recorded was queued on ``device``, and the host goes on."""
    if _running is not None:
        event = torch.get_device_module(device).Event()
        event.record()
        _running.event = event


def wait_for(work: Work, group: ProcessGroup | None) -> None:
    """Wait until a host collective has ended, for as long as its peers take, unless :func:`give_up` is called.

    Raises ``RuntimeError`` from the backend, or because the run was given up.
    """
    try:
        while True:
            try:
                work.wait(_PIECE)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # it may have ended just after the piece did
                    return
            if _lost:
                raise RuntimeError(f"the run was given up: {_lost}")
    finally:
        if not work.is_completed():  # given up, or interrupted
            # The backend's thread stays in the operation, and whoever frees the group would wait for that thread.
            for kept in (work, group):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


class record_collective:
    """Context manager around one collective call; see :class:`CollectiveRecord` for the arguments.

    Raises :class:`CollectiveError` from whatever ``RuntimeError`` or ``ValueError`` the backend raises inside.
    """

    __slots__ = ("_args", "_seq", "_token", "_watcher", "event")

    def __init__(
        self,
        op: str,
        group: str,
        ranks: Sequence[int],
        rank: int,
        tensors: Sequence[torch.Tensor] = (),
        *,
        path: str = UNIFORM,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self._args = (op, group, ranks, rank, tensors, path, sizes)
        self.event: Any = None

    def _record(self) -> CollectiveRecord:
        op, group, ranks, rank, tensors, path, sizes = self._args
        place = forward_context.get_place()
        return CollectiveRecord(
            place.step,
            self._seq,
            op,
            group,
            rank,
            tuple(ranks),
            path,
            None if sizes is None else tuple(sizes),
            tuple([tuple(t.shape) for t in tensors]),
            tuple([_dtype_name(t.dtype) for t in tensors]),
            sum([t.nbytes for t in tensors]),
            place.layer,
        )

    def __enter__(self) -> None:
        global _running
        group = self._args[1]
        self._seq = _seq[group]
        _seq[group] += 1
        self._watcher = _observer
        if _lost:
            record = self._record()
            where = f"{record.op} #{record.seq} of group {record.group}, step {record.step}"
            raise CollectiveError(f"rank {record.rank}: {where}, does not begin: the run is lost: {_lost}", record)
        if self._watcher is not None:
            self._token = self._watcher.before(self._record())
            _running = self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        global _running
        if self._watcher is not None:
            _running = None
            if self.event is not None and error is None:
                self._watcher.queued(self._token, self.event)
            else:
                self._watcher.after(self._token, error)
        if isinstance(error, (RuntimeError, ValueError)):
            r = self._record()
            why = _lost or (
                f"{error}. Another rank died, left the lockstep or took longer than the backend's deadline "
                f"VLLM_COLLECTIVE_TIMEOUT_S={envs.VLLM_COLLECTIVE_TIMEOUT_S:g}; look for the rank that reports an "
                "error of its own"
            )
            raise CollectiveError(
                f"rank {r.rank}: collective {r.op} #{r.seq} ({r.path}, sizes={r.sizes}, shapes={list(r.shapes)}) of "
                f"group {r.group} (ranks {list(r.ranks)}) failed in step {r.step}, layer {r.layer or 'none'}: {why}",
                r,
            ) from error
