# SPDX-License-Identifier: Apache-2.0
"""Latent attention (DeepSeek-AI 2024, arXiv:2405.04434): a token's cache is one latent and one rotated key.

Shapes: T token rows, H heads of this rank, N and P channels of a query head without and with rotation, V of a value
head, R of the latent, C = R + P of a cached token.

A head's keys and values are rows of the latent: key = [W_UK latent, k_pe], value = W_UV latent. There are two forms of
one sum. *Expanded*: keys and values are made for every token of the context, then heads of N + P and V attend.
*Absorbed*: W_UK goes to the query's side and W_UV to the output's, and all heads attend to the one cached vector, C
wide, whose first R channels are its value. The latter costs (2 R + P) a query and key, the former N + P + V and, once a
key, R (N + V): so a request with many rows in a step is expanded, one with few is absorbed.
"""

from __future__ import annotations

import torch

from vllm.forward_context import get_forward_context, set_current_layer
from vllm.kernels import ops
from vllm.kernels.ops import zero_padding_rows
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.model_executor.layers.step_buffers import buffer_key, step_buffer
from vllm.model_executor.parameter import WeightSpec
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backends.mla import MLABackend, MLAMetadata, Part
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig

_HEADS_AT_ONCE = 16  # whose keys and values are made at a time


class KVUpProjection(ColumnParallelLinear):
    """W_UK [H, N, R] and W_UV [H, V, R], head after head in one checkpoint matrix, held as a plain matrix.

    Both forms multiply with a part of it for each head, so that it is not packed, and comes dequantised from a
    checkpoint that holds it quantised.
    """

    def __init__(self, rank: int, num_heads: int, nope: int, v: int, dtype: torch.dtype, prefix: str) -> None:
        super().__init__(rank, num_heads * (nope + v), False, dtype, prefix)
        self.nope, self.v = nope, v

    def weight_specs(self) -> list[WeightSpec]:
        (shard,) = self.shards
        return [WeightSpec(shard.name, shard.full, self._weight_taker(shard), rows=shard.rows)]

    def process_weights_after_loading(self) -> None:
        assert self.weight is not None, f"{self.shards[0].name}: no weight was loaded"

    def split(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(W_UK [H, N, R], W_UV [H, V, R]), views."""
        assert self.weight is not None, f"{self.shards[0].name}: no weight was loaded"
        w_uk, w_uv = self.weight.unflatten(0, (-1, self.nope + self.v)).split((self.nope, self.v), dim=1)
        return w_uk, w_uv


class LatentAttention(Layer):
    """query [T, H, N + P] and latents [T, C], both rotated, the latent normalised → [T, H·V].

    All TP ranks keep the same cache: heads are split, the one vector of a token cannot be. Rows of the result that no
    request has are exactly 0 (law 2). Without attention metadata (profiling) it is all zeros and no cache is touched.

    ``longest``: tokens that a context may have; ``max_rows``: token rows of the largest step. Beside the result, all
    layers share three buffers: absorbed queries, what these attend to, and the keys and values of some heads.

    The cache holds ``cache_dtype``: the model's, or float8_e4m3fn with one scale, ``k_scale``, for the whole vector.
    """

    def __init__(
        self,
        up: KVUpProjection,
        num_heads: int,
        rope: int,
        scale: float,
        dtype: torch.dtype,
        prefix: str,
        longest: int,
        max_rows: int,
        block_size: int,
    ) -> None:
        super().__init__()
        self.up, self.num_heads, self.scale, self.dtype, self.layer_name = up, num_heads, scale, dtype, prefix
        self.cache_dtype, self.k_scale, self.v_scale = dtype, 1.0, None
        self.rank, self.nope, self.rope, self.v = up.input_size_per_partition, up.nope, rope, up.v
        self.width, self.head = self.rank + rope, up.nope + rope
        self.backend, self.max_rows = MLABackend, max_rows
        # Rows from which expanding a context costs less; at least 2, as decoding never does.
        saved = 2 * self.rank - self.nope - self.v
        self.expand_from = max(self.rank * (self.nope + self.v) // saved + 1, 2) if saved > 0 else 2
        self.heads_at_once = min(num_heads, _HEADS_AT_ONCE)
        self.context = cdiv(longest, block_size) * block_size
        each = self.head + self.v
        columns = max(self.width + self.heads_at_once * each, cdiv(self.context * (self.width + each), max_rows))
        self.output_key = buffer_key(prefix, num_heads * self.v, dtype)
        self.query_key = buffer_key(f"{prefix}.absorbed_queries", num_heads * self.width, dtype)
        self.attended_key = buffer_key(f"{prefix}.attended_latents", num_heads * self.rank, dtype)
        self.expanded_key = buffer_key(f"{prefix}.expanded", columns, dtype)
        self.buffer_keys = self.output_key, self.query_key, self.attended_key, self.expanded_key
        self.kv_cache: tuple[torch.Tensor, torch.Tensor] | None = None

    def get_kv_cache_spec(self) -> AttentionSpec:
        return AttentionSpec(1, self.width, self.cache_dtype, value_size=self.rank)

    def bind_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate this layer's cache, zeroed as ``Attention``'s; the values are a view of the keys."""
        cache = ops.zeroed_cache((config.num_blocks, 1, config.block_size, self.width), self.cache_dtype)
        self.kv_cache = cache, cache[..., : self.rank]

    def unbind_kv_cache(self) -> None:
        self.kv_cache = None

    def workspace_bytes(self, num_tokens: int, max_model_len: int) -> int:
        device, some = torch.get_default_device(), self.heads_at_once
        codes = 0 if self.cache_dtype is self.dtype else self.context * self.width
        return codes + max(
            ops.paged_attention_workspace(device, num_tokens, max_model_len, heads, kv_heads, size, self.dtype)
            for heads, kv_heads, size in ((self.num_heads, 1, self.width), (some, some, self.head))
        )

    def forward(self, query: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        set_current_layer(self.layer_name)
        context, rows = get_forward_context(), query.shape[0]
        most = self.max_rows if context.step_buffers is None else context.step_buffers.max_rows
        output, absorbed, attended, expanded = (
            query.new_empty(n, key[1]) if (buffer := step_buffer(key, n)) is None else buffer
            for key, n in zip(self.buffer_keys, (rows, rows, rows, most), strict=True)
        )
        if context.attn_metadata is None:
            return query.new_zeros(output.shape)
        assert self.kv_cache is not None, f"{self.layer_name}: the KV cache was never bound"
        metadata: MLAMetadata = context.attn_metadata[self.layer_name]
        ops.reshape_and_cache(latents[:, None], None, self.kv_cache[0], None, metadata.slot_mapping, self.k_scale)
        for part in metadata.parts(self.expand_from):
            some = slice(part.first, part.last)
            q, out = query[some], output[some].unflatten(1, (-1, self.v))
            if part.expanded:
                self._attend_expanded(part, q, out, expanded.view(-1))
            else:
                self._attend_absorbed(part, q, out, absorbed[: len(q)], attended[: len(q)])
        zero_padding_rows(output, metadata.slot_mapping)
        return output

    def _attend_absorbed(
        self, part: Part, q: torch.Tensor, out: torch.Tensor, absorbed: torch.Tensor, attended: torch.Tensor
    ) -> None:
        assert self.kv_cache is not None
        (w_uk, w_uv), (keys, values) = self.up.split(), self.kv_cache
        absorbed, attended = (x.unflatten(1, (self.num_heads, -1)) for x in (absorbed, attended))
        torch.bmm(q[..., : self.nope].transpose(0, 1), w_uk, out=absorbed[..., : self.rank].transpose(0, 1))
        absorbed[..., self.rank :] = q[..., self.nope :]
        self._attend(part, absorbed, keys, values, part.block_table, attended, self.k_scale)
        torch.bmm(attended.transpose(0, 1), w_uv.mT, out=out.transpose(0, 1))

    def _attend_expanded(self, part: Part, q: torch.Tensor, out: torch.Tensor, memory: torch.Tensor) -> None:
        """Some heads after the others, so that the memory suffices for any context; each head's sum is one sum."""
        assert self.kv_cache is not None
        assert part.blocks is not None
        assert part.own_table is not None
        (w_uk, w_uv), blocks = self.up.split(), len(part.blocks)
        tokens = (
            blocks * self.kv_cache[0].shape[2]
        )  # those past the context's end are unwritten memory, and stay unread
        latents, memory = memory[: tokens * self.width].view(blocks, -1, self.width), memory[tokens * self.width :]
        cache = self.kv_cache[0][:, 0]
        if self.cache_dtype is self.dtype:
            torch.index_select(cache, 0, part.blocks, out=latents)
        else:
            codes = torch.index_select(cache.view(torch.uint8), 0, part.blocks).view(self.cache_dtype)
            latents.copy_(codes).mul_(self.k_scale)
        latents = latents.view(tokens, self.width)
        at_once = min(self.heads_at_once, memory.numel() // (tokens * (self.head + self.v)))
        assert at_once, f"{memory.numel()} elements for {tokens} tokens of {self.head + self.v}"
        for first in range(0, self.num_heads, at_once):
            uk, uv = w_uk[first : first + at_once], w_uv[first : first + at_once]
            keys, values = memory[: tokens * len(uk) * self.head], memory[tokens * len(uk) * self.head :]
            keys = keys.view(tokens, len(uk), self.head)
            values = values[: tokens * len(uk) * self.v].view(tokens, len(uk), self.v)
            shared = latents[:, : self.rank].expand(len(uk), -1, -1)
            torch.bmm(shared, uk.mT, out=keys[..., : self.nope].transpose(0, 1))
            torch.bmm(shared, uv.mT, out=values.transpose(0, 1))
            keys[..., self.nope :] = latents[:, None, self.rank :]
            keys, values = (x.unflatten(0, (blocks, -1)).transpose(1, 2) for x in (keys, values))
            heads = slice(first, first + at_once)
            self._attend(part, q[:, heads], keys, values, part.own_table, out[:, heads])

    def _attend(
        self,
        part: Part,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        table: torch.Tensor,
        out: torch.Tensor,
        scale: float = 1.0,
    ) -> None:
        ops.paged_attention(
            q,
            keys,
            values,
            table,
            part.query_start_loc,
            part.seq_lens,
            self.scale,
            out,
            0,
            query_start_loc_cpu=part.query_start_loc_cpu,
            seq_lens_cpu=part.seq_lens_cpu,
            k_scale=scale,
            v_scale=scale,
        )
