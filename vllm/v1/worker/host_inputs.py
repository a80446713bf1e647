# SPDX-License-Identifier: Apache-2.0
"""A step's inputs by one call, where the device is the host.

The weights of a step push all else out of the processor's caches. So each function, object and operation of numpy that
prepares the next one is fetched from memory again, and takes several times as long as where it is called in a row: one
kernel does what ``GPUModelRunner._fill_inputs`` does in some thirty of them, byte for byte.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from vllm.kernels.cpu import ops
from vllm.v1.worker.gpu_input_batch import BatchLayout, InputBatch
from vllm.v1.worker.input_buffers import InputBuffers, LastSampled


class HostInputs:
    """Writes the inputs of steps into ``buffers``, which the step itself reads; with the tokens that rows sampled last
    in their places, for on the host the step before is done."""

    def __init__(self, batch: InputBatch, buffers: InputBuffers, last_sampled: LastSampled) -> None:
        self.buffers, self.max_len = buffers, batch.token_ids.shape[1]
        table = batch.block_table
        assert buffers.block_table.array.shape[1] == table.max_blocks, (
            f"{table.max_blocks} blocks in the batch, {buffers.block_table.array.shape[1]} in the buffer"
        )
        targets = (
            buffers.input_ids, buffers.positions, buffers.slot_mapping, buffers.query_start_loc, buffers.seq_lens,
            buffers.state_indices, buffers.block_table, buffers.logits_rows, buffers.sampled_rows,
        )  # fmt: skip
        read = (batch.token_ids, batch.num_given, last_sampled.on_host, table.table)
        addresses = [_address(x) for x in (*read, *(buffer.array for buffer in targets))]
        self._fixed = struct.pack(
            f"{3 + len(addresses)}q", table.block_size, self.max_len, table.max_blocks, *addresses
        )
        self._run = ops._library().vc_step_inputs
        self._of: tuple[BatchLayout, int, int] | None = None

    def write(self, layout: BatchLayout, num_reqs: int, num_tokens: int, computed: Sequence[int]) -> None:
        """The inputs of requests that have ``computed`` [R] tokens behind them, padded to ``num_reqs`` and
        ``num_tokens``. Raises ``AssertionError`` for a request longer than ``max_len``."""
        of = layout, num_reqs, num_tokens
        if of != self._of:
            self._record, self._computed, self._of = self._record_of(*of), struct.Struct(f"{len(layout.rows)}q"), of
        if self._run(self._record + self._computed.pack(*computed)):
            raise AssertionError(f"requests of {computed} tokens run {layout.scheduled.tolist()}, past {self.max_len}")

    def _record_of(self, layout: BatchLayout, num_reqs: int, num_tokens: int) -> bytes:
        real_reqs, real_tokens, buffers = len(layout.rows), len(layout.rows_of_tokens), self.buffers
        for what, real, padded, buffer in (
            ("requests", real_reqs, num_reqs, buffers.seq_lens),
            ("tokens", real_tokens, num_tokens, buffers.input_ids),
        ):
            assert real <= padded <= len(buffer.array), (
                f"{real} {what}, padded to {padded}; the buffer has {len(buffer.array)} rows"
            )
        arrays = (layout.rows, layout.scheduled, layout.state_slots, layout.logits_rows, layout.sampled_rows)
        sizes = struct.pack("3q", num_reqs, num_tokens, buffers.slot_mapping.pad_value)
        return sizes + self._fixed + struct.pack("7q", real_reqs, len(layout.sampling), *map(_address, arrays))


def _address(array: np.ndarray) -> int:
    assert array.flags.c_contiguous, f"an array with strides {array.strides} for a kernel"
    return int(array.ctypes.data)
