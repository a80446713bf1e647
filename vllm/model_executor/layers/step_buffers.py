# SPDX-License-Identifier: Apache-2.0
"""Outputs that the decoder layers share: nothing for each layer that one buffer can serve.

What ``self_attn.qkv_proj`` of a layer puts out is read up before the next layer's writes its own, so a step needs one
tensor for each name inside a layer. Every row that a step hands out is written before it is read: rows of an earlier
step are never in sight.
"""

from __future__ import annotations

import re

import torch

from vllm.forward_context import get_forward_context, is_forward_context_available

Key = tuple[str, int, torch.dtype]


class StepBuffers:
    """The buffers of one engine, each made for the largest step, of ``max_rows`` rows, when it is first taken.

    The engine's first step is one of profiling, so that none is made in service.
    """

    def __init__(self, max_rows: int, device: torch.device | str = "cpu") -> None:
        self.max_rows, self.device = max_rows, torch.device(device)
        self._buffers: dict[Key, torch.Tensor] = {}
        self._last: dict[Key, tuple[int, torch.Tensor]] = {}

    def take(self, key: Key, rows: int) -> torch.Tensor:
        """[rows, columns] of the key's dtype, contents undefined; the last one handed out for ``key`` is dead."""
        last = self._last.get(key)
        if last is not None and last[0] == rows:
            return last[1]
        assert rows <= self.max_rows, f"{rows} rows in a step of at most {self.max_rows}"
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = torch.empty(self.max_rows, key[1], dtype=key[2], device=self.device)
        view = buffer[:rows]
        self._last[key] = rows, view
        return view

    def renew(self) -> None:
        """Put memory that was never written in the place of each; a CPU gives it pages when it is."""
        self._last.clear()
        for key, buffer in self._buffers.items():
            self._buffers[key] = torch.empty_like(buffer)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())


def buffer_key(name: str, columns: int, dtype: torch.dtype) -> Key:
    """For layer ``name``: what stands before ``layers.N.`` and N itself make no difference."""
    return re.sub(r"^.*layers\.\d+\.", "", name), columns, dtype


def step_buffer(key: Key, rows: int) -> torch.Tensor | None:
    """The running step's buffer; None outside an engine's step, where the caller allocates."""
    buffers = get_forward_context().step_buffers if is_forward_context_available() else None
    return None if buffers is None else buffers.take(key, rows)
