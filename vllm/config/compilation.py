# SPDX-License-Identifier: Apache-2.0
"""Captured steps: which sizes batches are padded to, and whether steps are replayed."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class CUDAGraphMode(enum.IntEnum):
    """Ordered by what a rank may assume: the minimum over the DP ranks is what all of them run."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2


@dataclass(frozen=True)
class CompilationConfig:
    """``cudagraph_capture_sizes``: token counts, ascending; a batch that fits one is padded up to it."""

    cudagraph_mode: CUDAGraphMode = CUDAGraphMode.NONE
    cudagraph_capture_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = self.cudagraph_capture_sizes
        if any(size < 1 for size in sizes) or list(sizes) != sorted(set(sizes)):
            raise ValueError(f"cudagraph_capture_sizes={list(sizes)}: give distinct ascending counts from 1 up")

    def padded_size(self, num_tokens: int) -> int:
        """The smallest capture size that holds ``num_tokens``; ``num_tokens`` itself where none does."""
        return next((size for size in self.cudagraph_capture_sizes if size >= num_tokens), num_tokens)
