# SPDX-License-Identifier: Apache-2.0
"""Copies between host and device for which the host does not wait, unless it says so.

A copy that does not block needs pinned memory, and reads or writes it some time later: until then nothing else may
touch that memory. On CPU host and device are one, and nothing here copies or waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, overload

import numpy as np
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


class PersistentBuffer:
    """Host arrays, one for each of the sets of ``staging``, and their device tensor of ``rows`` rows; on CPU they are
    the same memory."""

    def __init__(
        self, rows: int, dtype: torch.dtype, pad_value: int, staging: Staging, device: torch.device, width: int = 0
    ) -> None:
        shape = (rows, width) if width else (rows,)
        self.pad_value, self.staging = pad_value, staging
        self._hosts = [
            torch.full(shape, pad_value, dtype=dtype, device="cpu", pin_memory=not is_host(device))
            for _ in range(staging.num_sets)
        ]
        self._arrays = [host.numpy() for host in self._hosts]
        self._is_shared = is_host(device)
        self.device = self._hosts[0] if self._is_shared else self._hosts[0].to(device)

    @property
    def host(self) -> torch.Tensor:
        """What this step wrote (by ``fill_columns``: side by side); it stays so until the second step after it."""
        return self._hosts[self.staging.current]

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
        target = self.device[:num_padded, :num_columns]
        if self._is_shared:
            written = array[:num_padded, :num_columns]
        else:  # side by side: a copy of pieces would go through memory that is not pinned, and the host wait for it
            written = array.reshape(-1)[: num_padded * num_columns].reshape(num_padded, num_columns)
        written[:num_unpadded] = table[rows, :num_columns]
        written[num_unpadded:] = self.pad_value
        if not self._is_shared:
            packed = self.host.view(-1)[: num_padded * num_columns].view(num_padded, num_columns)
            target.copy_(packed.to(target.device, non_blocking=True))
        return target

    def upload(self, num_rows: int) -> torch.Tensor:
        """The device's view of rows [0, num_rows), as ``array`` has them."""
        if not self._is_shared:
            self.device[:num_rows].copy_(self.host[:num_rows], non_blocking=True)
        return self.device[:num_rows]


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
