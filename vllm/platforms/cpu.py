# SPDX-License-Identifier: Apache-2.0
"""CPU with Gloo: runs anywhere; the ranks of a node share its memory and cores."""

from __future__ import annotations

import os
import platform as host
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm.platforms import host_limits
from vllm.platforms.interface import PeakMemory, Platform


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Those among an operation's arguments or results, which nest in lists and tuples alone."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


class _CountsStorages:
    """Counts the bytes of the memory that operations make while it lives: torch keeps no such count on CPU."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes: dict[weakref.ref[torch.UntypedStorage], int] = {}
        self._known: set[int] = set()
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [s for x in _tensors((out,)) if (s := x.untyped_storage())._cdata not in self._known]
        if made:
            given = {x.untyped_storage()._cdata for x in _tensors((*args, *(kwargs or {}).values()))}
            for storage in made:
                if storage._cdata not in given | self._known:
                    self._add(storage)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        number, size = storage._cdata, storage.nbytes()

        def freed(reference: weakref.ref[torch.UntypedStorage]) -> None:
            self.live -= self._bytes.pop(reference)
            self._known.discard(number)

        self._bytes[weakref.ref(storage, freed)] = size
        self._known.add(number)
        self.live += size
        self.peak = max(self.peak, self.live)


class _LiveStorages(_CountsStorages, TorchDispatchMode):
    """Torch hides the handler that a mode has in its own body from the compiler, and imports all of that to do so."""


class CpuPlatform(Platform):
    device_type = "cpu"
    environment_prefixes = ("GLOO_",)

    @property
    def dist_backend(self) -> str:
        return "gloo"

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int | None:
        return None

    def get_device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def device_name(self, device: torch.device) -> str:
        return host.processor() or host.machine()

    def memory_info(self, device: torch.device) -> tuple[int, int]:
        """(what this process can still get, physical) bytes of the host."""
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return min(int(limit.free) for limit in host_limits.memory_limits()), total

    def memory_limits(self, device: torch.device, utilization: float) -> list[host_limits.Limit]:
        return [
            host_limits.Limit(limit.label, int(limit.free * utilization), limit.pool)
            for limit in host_limits.memory_limits()
        ]

    def default_graph_mode(self, world_size: int) -> tuple[str, str]:
        return "FULL_AND_PIECEWISE", "steps that are recorded once run without Python between their kernels"

    def why_no_graphs(self) -> str | None:
        return None

    def processor_limits(self) -> list[host_limits.Limit]:
        return host_limits.processor_limits()

    @contextmanager
    def measure_peak(self, device: torch.device) -> Iterator[PeakMemory]:
        measured = PeakMemory()
        with _LiveStorages() as storages:
            yield measured
        measured.bytes = storages.peak
