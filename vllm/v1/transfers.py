# SPDX-License-Identifier: Apache-2.0
"""Work and copies between host and device for which the host does not wait, unless it says so.

A copy that does not block needs pinned memory, and reads or writes it some time later: until then nothing else may
touch that memory. On CPU host and device are one, and nothing here copies or waits, unless steps are scheduled ahead:
then a thread stands for the device (:class:`ThreadStream`).
"""

from __future__ import annotations

import atexit
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue
from typing import Any, overload

import numpy as np
import torch

from vllm.forward_context import working

# An engine that ends waits so long for work that nobody asks for any more.
_LAST_WORK_S = 5.0


def is_host(device: torch.device) -> bool:
    """Whether what lies on ``device`` is the host's own memory, which is looked at without a copy or a wait."""
    return device.type == "cpu"


def make_event(device: torch.device) -> Any:
    """An event of the device's streams; one that was never recorded has come."""
    return torch.get_device_module(device).Event()


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``values`` of the host, on ``device``; those that are there already are not copied.

    Torch gives the pinned memory in between to nobody else before the copy is done.
    """
    return values if is_host(device) else values.pin_memory().to(device, non_blocking=True)


class _Passed:
    """An event of work that is done when its call returns."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Stream:
    """What is launched for ``device`` and done in the order of launching, step after step.

    So a step may use what an earlier one still writes or reads: a token that it samples, a cache block or a state slot
    that its requests gave back. Here that is the device's own stream, on which each call of torch queues its work; on
    CPU the calls do the work. ``is_late``: work may be done after its launch, and what it reads stays until then.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_host = device, is_host(device)
        self.is_late = not self.is_host

    def launch(self, work: Callable[[], Any]) -> None:
        work()

    def make_event(self) -> Any:
        return make_event(self.device) if self.is_late else _Passed()

    def check(self) -> None:
        """Raise what work has failed with."""

    def wait(self) -> None:
        """Until all that was launched is done."""
        event = self.make_event()
        event.record()
        event.synchronize()

    def close(self) -> None: ...


class ThreadStream(Stream):
    """The CPU as a device that is late: one thread does the work, while the caller prepares what comes next.

    Work that fails is the last that is done. ``on_failure`` is told at once, on that thread; then whoever waits for it
    or for later work gets the exception.
    """

    def __init__(self, on_failure: Callable[[BaseException], None] = lambda error: None) -> None:
        super().__init__(torch.device("cpu"))
        self.is_late = True
        self.queue: SimpleQueue[Any] = SimpleQueue()
        self._errors: list[BaseException] = []
        args = self.queue, self._errors, on_failure
        thread = threading.Thread(target=_work, args=args, name="vllm-stream", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _end, self.queue, thread)  # type: ignore[method-assign]
        atexit.register(
            self.close
        )  # before the groups go, which were made before: the last step may be in a collective

    def launch(self, work: Callable[[], Any]) -> None:
        self.queue.put(work)

    def make_event(self) -> Any:
        return _ThreadEvent(self)

    def check(self) -> None:
        if self._errors:
            raise self._errors[0]


class _ThreadEvent:
    def __init__(self, stream: ThreadStream) -> None:
        self._stream = stream
        self._passed: threading.Event | None = None

    def record(self) -> None:
        self._passed = threading.Event()
        self._stream.queue.put(self._passed)

    def synchronize(self) -> None:
        if self._passed is not None:
            self._passed.wait()
            self._stream.check()


def _work(queue: SimpleQueue[Any], errors: list[BaseException], on_failure: Callable[[BaseException], None]) -> None:
    with torch.inference_mode():
        while (work := queue.get()) is not None:
            if isinstance(work, threading.Event):
                work.set()
            elif not errors:
                try:
                    with working():
                        work()
                except BaseException as error:  # it is raised where somebody waits
                    try:
                        on_failure(error)
                    finally:
                        errors.append(error)
            del work  # and all that it holds


def _end(queue: SimpleQueue[Any], thread: threading.Thread) -> None:
    """Once what was launched is done, for a moment at most: it may wait for a peer that never comes."""
    queue.put(None)
    if thread is not threading.current_thread():
        thread.join(_LAST_WORK_S)


_AT_ONCE = nullcontext()


class Staging:
    """Which of ``num_sets`` sets of memory a step's inputs are written to.

    The copies of the last step may be pending while the next one is prepared, so they take turns: a set is written
    again two steps later, and not before its copies are done. Where work is done at once there is one set, the memory
    of the step itself.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._copied = [stream.make_event(), stream.make_event()] if stream.is_late else []
        self.num_sets, self.current = max(len(self._copied), 1), 0
        self.is_open = not self._copied

    def filling(self) -> AbstractContextManager[None]:
        """Around all that is written in one step, and the launch of its copies."""
        return self._taking_turns() if self._copied else _AT_ONCE

    @contextmanager
    def _taking_turns(self) -> Iterator[None]:
        self.current = (self.current + 1) % self.num_sets
        self._copied[self.current].synchronize()
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False
            self._copied[self.current].record()


def _parts_of(tensor: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Rows (and columns) → the view of so many first ones of ``tensor``, which stays where it is. Making one takes
    longer than to write what a decode step needs, so the last ones are kept."""
    return functools.lru_cache(maxsize=64)(lambda *shape: tensor[tuple(map(slice, shape))])


class PersistentBuffer:
    """Host arrays, one for each of the sets of ``staging``, and their device tensor of ``rows`` rows; the same memory
    where work is done at once."""

    def __init__(self, rows: int, dtype: torch.dtype, pad_value: int, staging: Staging, width: int = 0) -> None:
        shape, device = (rows, width) if width else (rows,), staging.stream.device
        self.pad_value, self.staging = pad_value, staging
        self._hosts = [
            torch.full(shape, pad_value, dtype=dtype, device="cpu", pin_memory=not is_host(device))
            for _ in range(staging.num_sets)
        ]
        self._arrays = [host.numpy() for host in self._hosts]
        self._is_shared = not staging.stream.is_late
        self.device = self._hosts[0] if self._is_shared else self._hosts[0].to(device, copy=True)
        self._part = _parts_of(self.device)
        self._host_parts = [self._part] if self._is_shared else [_parts_of(host) for host in self._hosts]

    @property
    def host(self) -> torch.Tensor:
        """What this step wrote (by ``fill_columns``: side by side); it stays so until the second step after it."""
        return self._hosts[self.staging.current]

    def rows(self, *shape: int) -> torch.Tensor:
        """The device's view of so many first rows, and columns where it has any."""
        return self._part(*shape)

    def host_rows(self, num_rows: int) -> torch.Tensor:
        """``host``, rows [0, num_rows)."""
        return self._host_parts[self.staging.current](num_rows)

    @property
    def array(self) -> np.ndarray:
        """``host`` for writing, which only a step that is being prepared may do."""
        assert self.staging.is_open, "a buffer is written outside InputBuffers.filling: a copy may be reading it"
        return self._arrays[self.staging.current]

    def fill(self, values: np.ndarray, num_padded: int) -> torch.Tensor:
        """Rows [0, len(values)) from ``values``, rows up to ``num_padded`` padding; returns the device's view."""
        num_unpadded, array = len(values), self.array
        assert num_unpadded <= num_padded <= len(array), (
            f"{num_unpadded} values, {num_padded} padded rows, {len(array)} rows in the buffer"
        )
        array[:num_unpadded] = values
        array[num_unpadded:num_padded] = self.pad_value
        return self.upload(num_padded)

    def fill_columns(self, table: np.ndarray, rows: np.ndarray, num_columns: int, num_padded: int) -> torch.Tensor:
        """As ``fill``, for ``table[rows, :num_columns]``; returns [num_padded, num_columns].

        Nothing else crosses to the device, and its row stays where it is: columns further on hold what they held, so a
        kernel that is given whole rows reads none past the blocks of a row's request.
        """
        num_unpadded, array = len(rows), self.array
        assert num_unpadded <= num_padded <= len(array), (
            f"{num_unpadded} rows, {num_padded} padded rows, {len(array)} rows in the buffer"
        )
        target = self._part(num_padded, num_columns)
        if self._is_shared:
            written = array[:num_padded, :num_columns]
        else:  # side by side: a copy of pieces would go through memory that is not pinned, and the host wait for it
            written = array.reshape(-1)[: num_padded * num_columns].reshape(num_padded, num_columns)
        written[:num_unpadded] = table[rows, :num_columns]
        written[num_unpadded:] = self.pad_value
        if not self._is_shared:
            packed = self.host.view(-1)[: num_padded * num_columns].view(num_padded, num_columns)
            self.staging.stream.launch(lambda: target.copy_(packed.to(target.device, non_blocking=True)))
        return target

    def upload(self, num_rows: int) -> torch.Tensor:
        """The device's view of rows [0, num_rows), as ``array`` has them."""
        target = self._part(num_rows)
        if not self._is_shared:
            source = self.host_rows(num_rows)
            self.staging.stream.launch(lambda: target.copy_(source, non_blocking=True))
        return target


class HostCopies:
    """What a step brings to the host: ``add`` queues a copy, and after ``wait`` all are there that were added before
    ``close``."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._event: Any = None
        self._are_pending = stream.is_late and stream.is_host  # there all results are the thread's

    @overload
    def add(self, tensor: torch.Tensor) -> torch.Tensor: ...
    @overload
    def add(self, tensor: None) -> None: ...

    def add(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """The host's copy, not to be read before ``wait``; None of None."""
        if tensor is None or self._stream.is_host:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        self._are_pending = True
        return host

    def close(self) -> None:
        if self._are_pending:
            self._event = self._stream.make_event()
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()
