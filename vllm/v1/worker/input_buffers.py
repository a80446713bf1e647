# SPDX-License-Identifier: Apache-2.0
"""The persistent tensors that a step's inputs live in.

``fill`` writes every row that the step will read, real ones from the batch and the rest with that buffer's pad value,
so no row of an earlier step can be read again. All of it happens inside ``InputBuffers.filling``, which keeps what is
written apart from what a copy to the device may still read.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np
import torch

from vllm.v1.transfers import Staging, is_host


class PersistentBuffer:
    """Host arrays, one for each of the sets of ``staging``, and their device tensor of ``rows`` rows; on CPU they are
    the same memory."""

    def __init__(
        self, rows: int, dtype: torch.dtype, pad_value: int, staging: Staging, device: torch.device, width: int = 0
    ) -> None:
        shape = (rows, width) if width else (rows,)
        self.pad_value, self.staging = pad_value, staging
        self._hosts = [
            torch.full(shape, pad_value, dtype=dtype, device="cpu", pin_memory=not is_host(device))
            for _ in range(staging.num_sets)
        ]
        self._arrays = [host.numpy() for host in self._hosts]
        self._is_shared = is_host(device)
        self.device = self._hosts[0] if self._is_shared else self._hosts[0].to(device)

    @property
    def host(self) -> torch.Tensor:
        """What this step wrote (by ``fill_columns``: side by side); it stays so until the second step after it."""
        return self._hosts[self.staging.current]

    @property
    def array(self) -> np.ndarray:
        """``host`` for writing, which only a step that is being prepared may do."""
        assert self.staging.is_open, "a buffer is written outside InputBuffers.filling: a copy may be reading it"
        return self._arrays[self.staging.current]

    def fill(self, values: np.ndarray, num_padded: int) -> torch.Tensor:
        """Rows [0, len(values)) from ``values``, rows up to ``num_padded`` padding; returns the device's view."""
        num_unpadded, array = len(values), self.array
        assert num_unpadded <= num_padded <= len(array), (
            f"{num_unpadded} values, {num_padded} padded rows, {len(array)} rows in the buffer"
        )
        array[:num_unpadded] = values
        array[num_unpadded:num_padded] = self.pad_value
        return self.upload(num_padded)

    def fill_columns(self, table: np.ndarray, rows: np.ndarray, num_columns: int, num_padded: int) -> torch.Tensor:
        """As ``fill``, for ``table[rows, :num_columns]``; returns [num_padded, num_columns].

        Nothing else crosses to the device, and its row stays where it is: columns further on hold what they held, so a
        kernel that is given whole rows reads none past the blocks of a row's request.
        """
        num_unpadded, array = len(rows), self.array
        assert num_unpadded <= num_padded <= len(array), (
            f"{num_unpadded} rows, {num_padded} padded rows, {len(array)} rows in the buffer"
        )
        target = self.device[:num_padded, :num_columns]
        if self._is_shared:
            written = array[:num_padded, :num_columns]
        else:  # side by side: a copy of pieces would go through memory that is not pinned, and the host wait for it
            written = array.reshape(-1)[: num_padded * num_columns].reshape(num_padded, num_columns)
        written[:num_unpadded] = table[rows, :num_columns]
        written[num_unpadded:] = self.pad_value
        if not self._is_shared:
            packed = self.host.view(-1)[: num_padded * num_columns].view(num_padded, num_columns)
            target.copy_(packed.to(target.device, non_blocking=True))
        return target

    def upload(self, num_rows: int) -> torch.Tensor:
        """The device's view of rows [0, num_rows), as ``array`` has them."""
        if not self._is_shared:
            self.device[:num_rows].copy_(self.host[:num_rows], non_blocking=True)
        return self.device[:num_rows]


class InputBuffers:
    """All per-step inputs. Pad values are those of law 2: token 0, position 0, slot -1, seq_len 0, null block,
    pad state slot; the tail of query_start_loc repeats its last value."""

    def __init__(self, max_num_tokens: int, max_num_reqs: int, max_blocks: int, device: torch.device) -> None:
        self._staging = staging = Staging(device)

        def buffer(rows: int, dtype: torch.dtype, pad_value: int = 0, width: int = 0) -> PersistentBuffer:
            return PersistentBuffer(rows, dtype, pad_value, staging, device, width)

        self.input_ids = buffer(max_num_tokens, torch.int64)
        self.positions = buffer(max_num_tokens, torch.int64)
        self.slot_mapping = buffer(max_num_tokens, torch.int64, pad_value=-1)
        self.query_start_loc = buffer(max_num_reqs + 1, torch.int32)
        self.seq_lens = buffer(max_num_reqs, torch.int32)
        self.state_indices = buffer(max_num_reqs, torch.int32)
        self.block_table = buffer(max_num_reqs, torch.int32, width=max_blocks)
        self.logits_rows = buffer(max_num_reqs, torch.int64)

    def filling(self) -> AbstractContextManager[None]:
        """Around all fills of one step."""
        return self._staging.filling()

    def fill_query_start_loc(self, num_scheduled_tokens: np.ndarray, num_reqs_padded: int) -> torch.Tensor:
        """[num_reqs_padded + 1]: cumulative counts, the last one repeated over the pad requests."""
        starts = np.zeros(num_reqs_padded + 1, dtype=np.int32)
        np.cumsum(num_scheduled_tokens, out=starts[1 : len(num_scheduled_tokens) + 1])
        starts[len(num_scheduled_tokens) + 1 :] = starts[len(num_scheduled_tokens)]
        return self.query_start_loc.fill(starts, num_reqs_padded + 1)
