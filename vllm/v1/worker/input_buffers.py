# SPDX-License-Identifier: Apache-2.0
"""The persistent tensors that a step's inputs live in.

``fill`` writes every row that the step will read, real ones from the batch and the rest with that buffer's pad value,
so no row of an earlier step can be read again.
"""

from __future__ import annotations

import numpy as np
import torch


class PersistentBuffer:
    """A host array and its device tensor of ``rows`` rows; on CPU they are the same memory."""

    def __init__(self, rows: int, dtype: torch.dtype, pad_value: int, device: torch.device, width: int = 0) -> None:
        shape = (rows, width) if width else (rows,)
        self.pad_value = pad_value
        self.host = torch.full(shape, pad_value, dtype=dtype, device="cpu", pin_memory=device.type != "cpu")
        self.device = self.host if device.type == "cpu" else self.host.to(device)
        self.array = self.host.numpy()

    def fill(self, values: np.ndarray, num_padded: int) -> torch.Tensor:
        """Rows [0, len(values)) from ``values``, rows up to ``num_padded`` padding; returns the device's view."""
        num_unpadded = len(values)
        assert num_unpadded <= num_padded <= len(self.array), (
            f"{num_unpadded} values, {num_padded} padded rows, {len(self.array)} rows in the buffer"
        )
        self.array[:num_unpadded] = values
        self.array[num_unpadded:num_padded] = self.pad_value
        return self._upload(num_padded)

    def fill_columns(self, table: np.ndarray, rows: np.ndarray, num_columns: int, num_padded: int) -> torch.Tensor:
        """As ``fill``, for ``table[rows, :num_columns]``; returns [num_padded, num_columns]."""
        num_unpadded = len(rows)
        assert num_unpadded <= num_padded <= len(self.array), (
            f"{num_unpadded} rows, {num_padded} padded rows, {len(self.array)} rows in the buffer"
        )
        self.array[:num_unpadded, :num_columns] = table[rows, :num_columns]
        self.array[num_unpadded:num_padded, :num_columns] = self.pad_value
        return self._upload(num_padded)[:, :num_columns]

    def _upload(self, num_rows: int) -> torch.Tensor:
        if self.device is not self.host:
            self.device[:num_rows].copy_(self.host[:num_rows], non_blocking=True)
        return self.device[:num_rows]


class InputBuffers:
    """All per-step inputs. Pad values are those of law 2: token 0, position 0, slot -1, seq_len 0, null block,
    pad state slot; the tail of query_start_loc repeats its last value."""

    def __init__(self, max_num_tokens: int, max_num_reqs: int, max_blocks: int, device: torch.device) -> None:
        self.input_ids = PersistentBuffer(max_num_tokens, torch.int64, 0, device)
        self.positions = PersistentBuffer(max_num_tokens, torch.int64, 0, device)
        self.slot_mapping = PersistentBuffer(max_num_tokens, torch.int64, -1, device)
        self.query_start_loc = PersistentBuffer(max_num_reqs + 1, torch.int32, 0, device)
        self.seq_lens = PersistentBuffer(max_num_reqs, torch.int32, 0, device)
        self.state_indices = PersistentBuffer(max_num_reqs, torch.int32, 0, device)
        self.block_table = PersistentBuffer(max_num_reqs, torch.int32, 0, device, width=max_blocks)

    def fill_query_start_loc(self, num_scheduled_tokens: np.ndarray, num_reqs_padded: int) -> torch.Tensor:
        """[num_reqs_padded + 1]: cumulative counts, the last one repeated over the pad requests."""
        starts = np.zeros(num_reqs_padded + 1, dtype=np.int32)
        np.cumsum(num_scheduled_tokens, out=starts[1 : len(num_scheduled_tokens) + 1])
        starts[len(num_scheduled_tokens) + 1 :] = starts[len(num_scheduled_tokens)]
        return self.query_start_loc.fill(starts, num_reqs_padded + 1)
