# SPDX-License-Identifier: Apache-2.0
"""Attention over the paged cache by the operators that ``kernels.table`` chose for the device."""

from __future__ import annotations

import torch

from vllm.kernels import ops
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, CommonAttentionMetadata


class PagedAttentionImpl(AttentionImpl):
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        metadata: CommonAttentionMetadata,
        output: torch.Tensor,
        sinks: torch.Tensor | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        key_cache, value_cache = kv_cache
        ops.reshape_and_cache(key, value, key_cache, value_cache, metadata.slot_mapping, k_scale, v_scale)
        ops.paged_attention(
            query,
            key_cache,
            value_cache,
            metadata.block_table,
            metadata.query_start_loc,
            metadata.seq_lens,
            self.scale,
            output,
            self.sliding_window,
            sinks=sinks,
            soft_cap=self.soft_cap,
            query_start_loc_cpu=metadata.on_host[0],
            seq_lens_cpu=metadata.on_host[1],
            k_scale=k_scale,
            v_scale=v_scale,
        )

    def workspace_bytes(self, num_tokens: int, max_model_len: int, dtype: torch.dtype) -> int:
        return ops.paged_attention_workspace(
            torch.get_default_device(),
            num_tokens,
            max_model_len,
            self.num_heads,
            self.num_kv_heads,
            self.head_size,
            dtype,
        )


class PagedAttentionBackend(AttentionBackend):
    name = "PAGED"
    impl_cls = PagedAttentionImpl

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        return (num_blocks, num_kv_heads, block_size, head_size)
