# SPDX-License-Identifier: Apache-2.0
"""The kind of fault: what one request left in a row, or in a buffer's pad rows, is read for another."""

from __future__ import annotations

import numpy as np
import torch

from vllm import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request
from vllm.v1.sample.state import SamplingState
from vllm.v1.worker.block_table import NULL_BLOCK, BlockTable
from vllm.v1.worker.gpu_input_batch import BatchLayout, InputBatch
from vllm.v1.worker.input_buffers import InputBuffers, LastSampled


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


def test_a_layout_is_kept_while_it_holds() -> None:
    """The kind of fault: what was worked out for one batch is used for another."""
    batch = InputBatch(4, 64, 16, SamplingState(4, 100))
    a, b = (Request(name, [1, 2, 3], SamplingParams(max_tokens=8)) for name in "ab")
    for request in (a, b):
        batch.add(request, [1])

    def layout(counts: list[int], samples: list[bool], requests: tuple[Request, ...] = (a, b)) -> BatchLayout:
        return batch.layout(SchedulerOutput(list(requests), counts, [[] for _ in counts], [0] * len(counts), samples))

    first = layout([1, 1], [True, True])
    assert layout([1, 1], [True, True]) is first
    assert (first.rows.tolist(), first.logits_are_first) == ([0, 1], True)
    chunk = layout([3, 1], [True, True])
    assert chunk.rows_of_tokens.tolist() == [0, 0, 0, 1]
    assert chunk.offsets.tolist() == [0, 1, 2, 0]
    assert (chunk.logits_rows.tolist(), chunk.logits_are_first) == ([2, 3], False)
    assert layout([3, 1], [False, True]).sampled_rows.tolist() == [1]
    assert layout([1, 1], [True, True], (b, a)).rows.tolist() == [1, 0]
    batch.remove("a")
    batch.remove("b")
    for request in (a, b):  # in each other's rows now
        batch.add(request, [1])
    assert layout([1, 1], [True, True], (b, a)).rows.tolist() == [0, 1]


def test_the_last_tokens_on_the_host_are_those_of_a_device() -> None:
    host, device = LastSampled(4, torch.device("cpu")), LastSampled(4, torch.device("cpu"))
    device._on_host = None
    for rows, tokens in (([2, 0], [7, 5]), ([3, 2], [9, 8])):
        for last in (host, device):
            last.put(torch.tensor(rows), rows, torch.tensor(tokens))
    for last in (host, device):
        ids = torch.tensor([-1, 6, -3, -4, 0, -2])
        last.fill_in(ids)
        assert ids.tolist() == [5, 6, 8, 9, 0, 0]
