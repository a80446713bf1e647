# SPDX-License-Identifier: Apache-2.0
"""Paged attention on CPU, by the C++ kernels or their torch twins."""

from __future__ import annotations

import torch

from vllm import _cpu_ops
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, CommonAttentionMetadata


class CPUAttentionImpl(AttentionImpl):
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
        _cpu_ops.reshape_and_cache(key, value, key_cache, value_cache, metadata.slot_mapping)
        _cpu_ops.paged_attention(
            query,
            key_cache,
            value_cache,
            metadata.block_table,
            metadata.query_start_loc,
            metadata.seq_lens,
            self.scale,
            output,
            self.sliding_window,
        )


class CPUAttentionBackend(AttentionBackend):
    name = "CPU_ATTN"
    impl_cls = CPUAttentionImpl

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        return (num_blocks, num_kv_heads, block_size, head_size)
