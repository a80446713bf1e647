# SPDX-License-Identifier: Apache-2.0
"""Which cache blocks each batch row holds, and the cache slot of each token."""

from __future__ import annotations

import numpy as np

from vllm.kernels.padding import NULL_BLOCK


class BlockTable:
    """[max_num_reqs, max_blocks] block ids; entries past a row's blocks are the null block."""

    def __init__(self, max_num_reqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.max_blocks = -(-max_model_len // block_size)
        self.table = np.zeros((max_num_reqs, self.max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(max_num_reqs, dtype=np.int64)

    def append(self, row: int, block_ids: list[int]) -> None:
        start = int(self.num_blocks[row])
        end = start + len(block_ids)
        assert end <= self.max_blocks, f"row {row}: {end} blocks for at most {self.max_blocks}"
        self.table[row, start:end] = block_ids
        self.num_blocks[row] = end

    def clear(self, row: int) -> None:
        self.table[row, : self.num_blocks[row]] = NULL_BLOCK
        self.num_blocks[row] = 0

    def slots(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Cache slot of each token: rows [T] batch rows, positions [T] in their requests → [T] int64."""
        columns, offsets = np.divmod(positions, self.block_size)
        return np.multiply(self.table[rows, columns], self.block_size, dtype=np.int64) + offsets
