# SPDX-License-Identifier: Apache-2.0
"""The attention layer of the models: binds a backend, a KV cache and this step's metadata together."""

from __future__ import annotations

import torch

from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context, set_current_layer
from vllm.kernels import ops
from vllm.kernels.ops import zero_padding_rows
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.step_buffers import buffer_key, step_buffer
from vllm.model_executor.parameter import WeightSpec
from vllm.v1.attention.backends.paged import PagedAttentionBackend
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig


class Attention(Layer):
    """Causal self-attention over the paged cache: query [T, H·D], key and value [T, J·D] → [T, H·D].

    Rows of the result past the real tokens are exactly 0, whatever memory held (law 2). Without attention metadata
    (profiling) the result is all zeros and no cache is touched.

    ``sinks_name``: the checkpoint's [heads of all ranks], each the logit of one more column of its head's softmax,
    which has no value (gpt-oss).

    The cache holds ``cache_dtype``: the model's, or float8_e4m3fn with one scale for keys and one for values.
    """

    weight_attributes = ("sinks",)

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        dtype: torch.dtype,
        prefix: str,
        sliding_window: int | None = None,
        soft_cap: float = 0.0,
        sinks_name: str | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.dtype, self.cache_dtype, self.layer_name = dtype, dtype, prefix
        self.k_scale = self.v_scale = 1.0
        self.sliding_window = sliding_window or 0
        self.backend = PagedAttentionBackend
        self.impl = self.backend.impl_cls(num_heads, head_size, scale, num_kv_heads, self.sliding_window, soft_cap)
        self.output_key = buffer_key(prefix, num_heads * head_size, dtype)
        self.kv_cache: tuple[torch.Tensor, torch.Tensor] | None = None
        self.sinks_name = sinks_name
        self.sinks: torch.Tensor | None = None

    def weight_specs(self) -> list[WeightSpec]:
        if self.sinks_name is None:
            return []
        size, rank, H = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank(), self.num_heads
        own = slice(rank * H, (rank + 1) * H)
        return [WeightSpec(self.sinks_name, (size * H,), self._take_sinks, torch.float32, rows=own)]

    def _take_sinks(self, loaded: torch.Tensor) -> None:
        self.sinks = torch.empty(self.num_heads, dtype=torch.float32)
        self.sinks.copy_(loaded)

    def get_kv_cache_spec(self) -> AttentionSpec:
        return AttentionSpec(self.num_kv_heads, self.head_size, self.cache_dtype, self.sliding_window or None)

    def bind_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate this layer's cache. Blocks are zeroed so that no kernel that reads a whole block meets NaN."""
        shape = self.backend.get_kv_cache_shape(config.num_blocks, config.block_size, self.num_kv_heads, self.head_size)
        self.kv_cache = (ops.zeroed_cache(shape, self.cache_dtype), ops.zeroed_cache(shape, self.cache_dtype))

    def workspace_bytes(self, num_tokens: int, max_model_len: int) -> int:
        """What the layer allocates for a time beside its buffers; see ``AttentionImpl.workspace_bytes``."""
        return self.impl.workspace_bytes(num_tokens, max_model_len, self.dtype)

    def unbind_kv_cache(self) -> None:
        self.kv_cache = None

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        num_tokens_padded = query.shape[0]
        set_current_layer(self.layer_name)
        context = get_forward_context()
        output = step_buffer(self.output_key, num_tokens_padded)
        if output is None:
            output = query.new_empty(num_tokens_padded, self.num_heads * self.head_size)
        if context.attn_metadata is None:
            # Not in the buffer, which is only made here: its rows stay unwritten until a step writes them.
            return query.new_zeros(num_tokens_padded, self.num_heads * self.head_size)
        assert self.kv_cache is not None, f"{self.layer_name}: the KV cache was never bound"
        assert self.sinks_name is None or self.sinks is not None, f"{self.sinks_name}: no weight was loaded"
        metadata = context.attn_metadata[self.layer_name]
        self.impl.forward(
            query.view(num_tokens_padded, self.num_heads, self.head_size),
            key.view(num_tokens_padded, self.num_kv_heads, self.head_size),
            value.view(num_tokens_padded, self.num_kv_heads, self.head_size),
            self.kv_cache,
            metadata,
            output.view(num_tokens_padded, self.num_heads, self.head_size),
            self.sinks,
            self.k_scale,
            self.v_scale,
        )
        zero_padding_rows(output, metadata.slot_mapping)
        return output
