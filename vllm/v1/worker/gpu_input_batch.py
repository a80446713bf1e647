# SPDX-License-Identifier: Apache-2.0
"""The requests that the runner holds, one row each, for as long as they run.

A row belongs to one request from its first step to its last and is never moved, so nothing about another request can
be left in it by a move; a step picks the rows of its requests by index.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request
from vllm.v1.sample.state import SamplingState
from vllm.v1.worker.block_table import BlockTable


@dataclass(frozen=True, eq=False)
class BatchLayout:
    """What of a step's inputs follows from which requests run how many tokens each, wherever they are in their text:
    the same in one decode step after the other. R requests, T tokens, S of the requests sample one.

    Attributes:
        of: the requests, their scheduled tokens and whether they sample, as the scheduler lists them.
        rows, scheduled, starts, state_slots: [R], the batch row, the number of tokens, the first token's place.
        request_of_token, rows_of_tokens, offsets: [T]; ``offsets`` counts in each request from 0.
        sampling, rows_sampled: [S], which of the requests, and the batch row of each.
        logits_rows, sampled_rows: [S], the token and the batch row of each, to be copied to the device.
            ``logits_are_first``: 0, 1, .. S - 1.
    """

    of: tuple[list[Request], list[int], list[bool]]
    rows: np.ndarray
    scheduled: np.ndarray
    starts: np.ndarray
    state_slots: np.ndarray
    request_of_token: np.ndarray
    rows_of_tokens: np.ndarray
    offsets: np.ndarray
    sampling: list[int]
    rows_sampled: tuple[int, ...]
    logits_rows: np.ndarray
    sampled_rows: np.ndarray
    logits_are_first: bool


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
        self._layout: BatchLayout | None = None

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
        self._layout = None  # the request may come again, in another row
        self.block_table.clear(row)
        self.state_slots[row] = 0
        self.sampling.remove_row(row)
        self._free.append(row)

    def append_blocks(self, request_id: str, block_ids: list[int]) -> None:
        self.block_table.append(self.row_of[request_id], block_ids)

    def layout(self, step: SchedulerOutput) -> BatchLayout:
        """That of ``step``; the last one again where the same requests run as many tokens from the same rows."""
        of = step.requests, step.num_scheduled_tokens, step.samples
        if self._layout is None or self._layout.of != of:
            self._layout = self._make_layout(of)
        return self._layout

    def _make_layout(self, of: tuple[list[Request], list[int], list[bool]]) -> BatchLayout:
        requests, counts, samples = of
        rows = np.array([self.row_of[request.request_id] for request in requests], dtype=np.int64)
        scheduled, sampling = np.array(counts, dtype=np.int64), np.array(samples, dtype=bool).nonzero()[0]
        starts = np.cumsum(scheduled) - scheduled
        request_of_token = np.repeat(np.arange(len(rows)), scheduled)
        logits_rows = (starts + scheduled - 1)[sampling]
        return BatchLayout(
            of=of,
            rows=rows,
            scheduled=scheduled,
            starts=starts,
            state_slots=self.state_slots[rows],
            request_of_token=request_of_token,
            rows_of_tokens=rows[request_of_token],
            offsets=np.arange(len(request_of_token)) - starts[request_of_token],
            sampling=sampling.tolist(),
            rows_sampled=tuple(rows[sampling].tolist()),
            logits_rows=logits_rows,
            sampled_rows=rows[sampling],
            logits_are_first=np.array_equal(logits_rows, np.arange(len(sampling))),
        )
