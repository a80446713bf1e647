# SPDX-License-Identifier: Apache-2.0
"""The kind of fault: what one request left in a row, or in a buffer's pad rows, is read for another."""

from __future__ import annotations

import numpy as np
import torch

from vllm.v1.worker.block_table import NULL_BLOCK, BlockTable
from vllm.v1.worker.input_buffers import InputBuffers


def test_a_freed_row_holds_null_blocks_only() -> None:
    table = BlockTable(max_num_reqs=2, max_model_len=64, block_size=16)
    table.append(1, [5, 6])
    table.append(1, [7])
    table.clear(1)
    assert (table.table == NULL_BLOCK).all()
    table.append(1, [9])
    assert table.table[1].tolist() == [9, NULL_BLOCK, NULL_BLOCK, NULL_BLOCK]
    assert table.slots(np.array([1]), np.array([3])).tolist() == [9 * 16 + 3]


def test_pad_rows_of_every_buffer_are_written_each_step() -> None:
    """Case 17 and its siblings: after a full step, one of fewer rows must not show the first one's."""
    buffers = InputBuffers(max_num_tokens=8, max_num_reqs=4, max_blocks=3, device=torch.device("cpu"))
    full = np.arange(1, 13, dtype=np.int32).reshape(4, 3)
    buffers.block_table.fill_columns(full, np.arange(4), 3, 4)
    assert buffers.block_table.fill_columns(full, np.array([2]), 2, 4).tolist() == [[7, 8], [0, 0], [0, 0], [0, 0]]
    pads = {"input_ids": 0, "positions": 0, "slot_mapping": -1, "seq_lens": 0, "state_indices": 0}
    for name, pad in pads.items():
        buffer = getattr(buffers, name)
        rows = len(buffer.array)
        buffer.fill(np.full(rows, 77), rows)
        assert buffer.fill(np.array([5, 6]), rows).tolist() == [5, 6] + [pad] * (rows - 2), name
    assert buffers.fill_query_start_loc(np.array([3, 1, 2]), 3).tolist() == [0, 3, 4, 6]
    assert buffers.fill_query_start_loc(np.array([2]), 3).tolist() == [0, 2, 2, 2]
