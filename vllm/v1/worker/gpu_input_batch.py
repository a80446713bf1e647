# SPDX-License-Identifier: Apache-2.0
"""The requests that the runner holds, one row each, for as long as they run.

A row belongs to one request from its first step to its last and is never moved, so nothing about another request can
be left in it by a move; a step picks the rows of its requests by index.
"""

from __future__ import annotations

import numpy as np

from vllm.v1.request import Request
from vllm.v1.sample.state import SamplingState
from vllm.v1.worker.block_table import BlockTable


class InputBatch:
    """Token ids [max_num_reqs, max_model_len], block table, and sampling state by row. The first ``num_given`` tokens
    of a row are there, those that its request had when it came; the device has what it sampled since."""

    def __init__(self, max_num_reqs: int, max_model_len: int, block_size: int, sampling_state: SamplingState) -> None:
        self.token_ids = np.zeros((max_num_reqs, max_model_len), dtype=np.int64)
        self.num_given = np.zeros(max_num_reqs, dtype=np.int64)
        self.block_table = BlockTable(max_num_reqs, max_model_len, block_size)
        self.state_slots = np.zeros(max_num_reqs, dtype=np.int32)
        self.sampling = sampling_state
        self.row_of: dict[str, int] = {}
        self._free = list(range(max_num_reqs - 1, -1, -1))

    @property
    def nbytes(self) -> int:
        return self.token_ids.nbytes + self.block_table.table.nbytes

    def add(self, request: Request, block_ids: list[int]) -> None:
        assert request.request_id not in self.row_of, f"request {request.request_id} has row {self.row_of}"
        assert self._free, f"no row left for request {request.request_id}: {len(self.row_of)} are in use"
        row = self._free.pop()
        self.row_of[request.request_id] = row
        self.token_ids[row, : request.num_tokens] = request.all_token_ids
        self.num_given[row] = request.num_tokens
        self.block_table.append(row, block_ids)
        self.state_slots[row] = max(request.state_slot, 0)
        self.sampling.add_row(row, request)

    def remove(self, request_id: str) -> None:
        row = self.row_of.pop(request_id)
        self.block_table.clear(row)
        self.state_slots[row] = 0
        self.sampling.remove_row(row)
        self._free.append(row)

    def append_blocks(self, request_id: str, block_ids: list[int]) -> None:
        self.block_table.append(self.row_of[request_id], block_ids)
