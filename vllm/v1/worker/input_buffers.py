# SPDX-License-Identifier: Apache-2.0
"""The persistent tensors that a step's inputs live in.

``fill`` writes every row that the step will read, real ones from the batch and the rest with that buffer's pad value,
so no row of an earlier step can be read again. All of it happens inside ``InputBuffers.filling``, which keeps what is
written apart from what a copy to the device may still read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate

import numpy as np
import torch

from vllm.v1.transfers import PersistentBuffer, Staging, Stream, is_host

_NO_VALUE = -(2**31) + 7


class InputBuffers:
    """All per-step inputs. Pad values are those of law 2: token 0, position 0, slot -1, seq_len 0, null block,
    pad state slot; the tail of query_start_loc repeats its last value; ``stream`` copies them."""

    def __init__(
        self,
        max_num_tokens: int,
        max_num_reqs: int,
        max_blocks: int,
        device: torch.device,
        stream: Stream | None = None,
    ) -> None:
        self._staging = staging = Staging(stream or Stream(device))

        def buffer(rows: int, dtype: torch.dtype, pad_value: int = 0, width: int = 0) -> PersistentBuffer:
            return PersistentBuffer(rows, dtype, pad_value, staging, width)

        self.input_ids = buffer(max_num_tokens, torch.int64)
        self.positions = buffer(max_num_tokens, torch.int64)
        self.slot_mapping = buffer(max_num_tokens, torch.int64, pad_value=-1)
        self.query_start_loc = buffer(max_num_reqs + 1, torch.int32)
        self.seq_lens = buffer(max_num_reqs, torch.int32)
        self.state_indices = buffer(max_num_reqs, torch.int32)
        self.block_table = buffer(max_num_reqs, torch.int32, width=max_blocks)
        self.logits_rows = buffer(max_num_reqs, torch.int64)
        self.sampled_rows = buffer(max_num_reqs, torch.int64)

    def _buffers(self) -> Iterator[PersistentBuffer]:
        return (x for x in vars(self).values() if isinstance(x, PersistentBuffer))

    def overwrite(self) -> None:
        """Put a value into every row that no batch has; see ``not_filled``."""
        for buffer in self._buffers():
            buffer.device.fill_(_NO_VALUE)

    @staticmethod
    def not_filled(tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Which of ``tensors`` hold in some row what ``overwrite`` put there."""
        return [name for name, x in tensors.items() if (x == _NO_VALUE).any()]

    def filling(self) -> AbstractContextManager[None]:
        """Around all fills of one step."""
        return self._staging.filling()

    def fill_query_start_loc(self, num_scheduled_tokens: np.ndarray, num_reqs_padded: int) -> torch.Tensor:
        """[num_reqs_padded + 1]: cumulative counts, the last one repeated over the pad requests."""
        starts, end = self.query_start_loc.array, len(num_scheduled_tokens)
        starts[0] = 0
        starts[1 : end + 1] = list(accumulate(num_scheduled_tokens.tolist()))
        starts[end + 1 : num_reqs_padded + 1] = starts[end]
        return self.query_start_loc.upload(num_reqs_padded + 1)


class LastSampled:
    """The token that each row of the batch sampled last, where the device finds it. Only work of the stream touches it:
    of the steps before, all have written theirs by then.

    On the host it is filled and read in loops: with a few tokens a call of torch or numpy takes several times as long.
    """

    def __init__(self, max_num_reqs: int, device: torch.device) -> None:
        self._on_device = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)
        self._on_host = self._on_device.numpy().data if is_host(device) else None

    @property
    def on_host(self) -> np.ndarray:
        return self._on_device.numpy()

    def put(self, rows: torch.Tensor, rows_on_host: Sequence[int], token_ids: torch.Tensor) -> None:
        """Rows [S], which are given twice, sampled ``token_ids`` [S]; int64 on the device."""
        if self._on_host is None:
            self._on_device.index_copy_(0, rows, token_ids)
            return
        for row, token_id in zip(rows_on_host, token_ids.tolist(), strict=True):
            self._on_host[row] = token_id

    def fill_in(self, input_ids: torch.Tensor) -> None:
        """In ``input_ids`` [T] int64 put what row r sampled in the place of -1 - r."""
        if self._on_host is None:
            last = self._on_device.index_select(0, (-1 - input_ids).clamp_min_(0))
            input_ids.copy_(torch.where(input_ids < 0, last, input_ids))
            return
        array = input_ids.numpy()
        for place, token_id in enumerate(input_ids.tolist()):
            if token_id < 0:
                array[place] = self._on_host[-1 - token_id]
