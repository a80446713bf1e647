# SPDX-License-Identifier: Apache-2.0
"""What an attention backend is, and the metadata that every backend is built from."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from vllm.v1.kv_cache_interface import KVCacheConfig


class AttentionCGSupport(enum.IntEnum):
    """Which steps a backend's layers do alike whatever the host knows of them, so that one captured step serves all of
    its size."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1  # steps in which each request runs one token
    ALWAYS = 3


@dataclass(frozen=True)
class CommonAttentionMetadata:
    """One step's batch, R requests and T token rows, of which ``num_actual_tokens`` are real.

    query_start_loc [R + 1] int32: first row of each request; ``query_start_loc[-1] == num_actual_tokens`` always.
    seq_lens [R] int32: tokens of each request after this step; 0 for a pad request.
    block_table [R, max_blocks] int32: cache blocks of each request, null block (0) past its end.
    slot_mapping [T] int64: cache slot of each row's key and value, -1 for a pad row.
    state_indices [R] int32: recurrent-state slot of each request, the pad slot (0) for a pad request.

    ``is_captured``: what is made of it must hold for every step of as many rows and requests; then the table has all
    of its columns, of which those past a request's end hold anything.
    """

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    state_indices: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    num_padded_tokens: int
    max_query_len: int
    max_seq_len: int
    is_captured: bool = False

    def __post_init__(self) -> None:
        end = self.query_start_loc_cpu.tolist()[-1]
        assert end == self.num_actual_tokens, (
            f"query_start_loc ends at {end} but num_actual_tokens={self.num_actual_tokens}: rows from {end} on belong "
            "to no request"
        )
        rows = self.slot_mapping.shape[0]
        assert rows == self.num_padded_tokens, f"{rows} slots for {self.num_padded_tokens} padded rows"


class AttentionMetadataBuilder:
    """Turns the common metadata into a backend's own, once a step for all its layers; here they are the same."""

    cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_config: KVCacheConfig) -> None:
        self.kv_cache_config = kv_cache_config

    def build(self, common: CommonAttentionMetadata) -> Any:
        return common


class AttentionImpl(ABC):
    """Computes attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        sliding_window: int,
        soft_cap: float = 0.0,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads, self.sliding_window, self.soft_cap = num_kv_heads, sliding_window, soft_cap

    @abstractmethod
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        metadata: Any,
        output: torch.Tensor,
        sinks: torch.Tensor | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """query [T, H, D], key and value [T, J, D] → rows [0, num_actual_tokens) of output [T, H, D].

        sinks [H]: logits of one more column of each head's softmax, without a value. The scales are those of a float8
        cache, see ``ops.reshape_and_cache``.

        Writes key and value of the rows whose slot is not -1 into kv_cache first. Rows of output whose
        slot is -1 may hold anything: the layer sets them to 0.
        """

    def workspace_bytes(self, num_tokens: int, max_model_len: int, dtype: torch.dtype) -> int:
        """What ``forward`` allocates for a time, at most, in a step of ``num_tokens``. Profiling on CPU asks, as it
        runs short contexts only."""
        return 0


class AttentionBackend(ABC):
    """A named pair of implementation and metadata builder, and the shape of its cache."""

    name: ClassVar[str]
    impl_cls: ClassVar[type[AttentionImpl]]
    builder_cls: ClassVar[type[AttentionMetadataBuilder]] = AttentionMetadataBuilder

    @staticmethod
    @abstractmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """Shape of the key cache, which is also that of the value cache."""
