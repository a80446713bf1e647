# SPDX-License-Identifier: Apache-2.0
"""Paged attention in plain torch operations, for any device: slow, and the naive twin of the fast ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, CommonAttentionMetadata

# Scores of all heads at a time: a long prompt in a long context would take more memory than the cache.
_MOST_SCORES = 1 << 24


class TorchPagedImpl(AttentionImpl):
    def workspace_bytes(self, num_tokens: int, max_model_len: int, dtype: torch.dtype) -> int:
        rows = min(self._rows(max_model_len), num_tokens)
        # Gathered from the blocks, put in order, and repeated for all heads; then mask, scores and weights.
        copies = 2 * self.head_size * (2 * self.num_kv_heads + self.num_heads) * dtype.itemsize
        return max_model_len * (copies + 16 + rows * (2 + 8 * self.num_heads))

    def _rows(self, length: int) -> int:
        return max(_MOST_SCORES // (self.num_heads * length), 1)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        metadata: CommonAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        key_cache, value_cache = kv_cache
        block_size = key_cache.shape[2]
        real = metadata.num_actual_tokens
        slots = metadata.slot_mapping[:real]
        key_cache[slots // block_size, :, slots % block_size] = key[:real]
        value_cache[slots // block_size, :, slots % block_size] = value[:real]
        starts, lengths = metadata.query_start_loc_cpu.tolist(), metadata.seq_lens_cpu.tolist()
        for request, length in enumerate(lengths):
            first, last = starts[request], starts[request + 1]
            if first == last:
                continue
            blocks = metadata.block_table[request, : -(-length // block_size)].long()
            # [J, length, D]: the blocks of the request in order, cut at its end so that no unwritten slot is read.
            keys = key_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length]
            values = value_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length]
            group = self.num_heads // self.num_kv_heads
            keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
            seen = torch.arange(length, device=query.device)[None, :]
            for begin in range(first, last, self._rows(length)):
                end = min(begin + self._rows(length), last)
                at = torch.arange(length - (last - begin), length - (last - end), device=query.device)[:, None]
                mask = seen <= at
                if self.sliding_window:
                    mask &= seen > at - self.sliding_window
                output[begin:end] = F.scaled_dot_product_attention(
                    query[begin:end].transpose(0, 1), keys, values, attn_mask=mask, scale=self.scale
                ).transpose(0, 1)


class TorchPagedBackend(AttentionBackend):
    name = "TORCH_PAGED"
    impl_cls = TorchPagedImpl

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        return (num_blocks, num_kv_heads, block_size, head_size)
