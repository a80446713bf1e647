# SPDX-License-Identifier: Apache-2.0
"""Copies between host and device for which the host does not wait, unless it says so.

A copy that does not block needs pinned memory, and reads or writes it some time later: until then nothing else may
touch that memory. On CPU host and device are one, and nothing here copies or waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, overload

import torch


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


class Staging:
    """Which of ``num_sets`` sets of pinned memory a step's inputs are written to.

    The copies of the last step may be pending while the next one is prepared, so they take turns: a set is written
    again two steps later, and not before its copies are done. On CPU there is one set, the memory of the step itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._copied = [] if is_host(device) else [make_event(device), make_event(device)]
        self.num_sets, self.current = max(len(self._copied), 1), 0
        self.is_open = not self._copied

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Around all that is written in one step, and the launch of its copies."""
        if not self._copied:
            yield
            return
        self.current = (self.current + 1) % self.num_sets
        self._copied[self.current].synchronize()
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False
            self._copied[self.current].record()


class HostCopies:
    """What a step brings to the host: ``add`` queues a copy, and all of them are there after one ``wait``."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._are_pending = device, False

    @overload
    def add(self, tensor: torch.Tensor) -> torch.Tensor: ...
    @overload
    def add(self, tensor: None) -> None: ...

    def add(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """The host's copy, not to be read before ``wait``; None of None."""
        if tensor is None or is_host(self._device):
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        self._are_pending = True
        return host

    def wait(self) -> None:
        if self._are_pending:
            self._are_pending = False
            event = make_event(self._device)
            event.record()
            event.synchronize()
