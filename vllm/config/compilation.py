# SPDX-License-Identifier: Apache-2.0
"""Captured steps: which sizes batches are padded to, and whether steps are replayed."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class CUDAGraphMode(enum.IntEnum):
    """How steps are replayed; the first three are also what one step runs in, where the minimum of what the DP ranks
    could run is what all of them run.

    PIECEWISE: the pieces between collectives; FULL: all of the forward pass, where it has none; FULL_DECODE_ONLY: only
    steps in which each request runs one token; FULL_AND_PIECEWISE: these whole, the others in pieces.
    """

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = 3
    FULL_AND_PIECEWISE = 4


@dataclass(frozen=True)
class CompilationConfig:
    """``cudagraph_mode``: None is what the platform takes (``Platform.choose_graph_mode``).
    ``cudagraph_capture_sizes``: token counts, ascending; a batch that fits one is padded up to it."""

    cudagraph_mode: CUDAGraphMode | None = None
    cudagraph_capture_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = self.cudagraph_capture_sizes
        if any(size < 1 for size in sizes) or list(sizes) != sorted(set(sizes)):
            raise ValueError(
                f"cudagraph_capture_sizes={list(sizes)}: give distinct ascending numbers of rows from 1 up, such as "
                "[1, 2, 4]; enforce_eager=True switches captured steps off"
            )

    def padded_size(self, num_tokens: int) -> int:
        """The smallest capture size that holds ``num_tokens``; ``num_tokens`` itself where none does."""
        return next((size for size in self.cudagraph_capture_sizes if size >= num_tokens), num_tokens)
