# SPDX-License-Identifier: Apache-2.0
"""What each layer keeps between steps, and how the cache that holds it is cut."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionSpec:
    """What an attention layer keeps of a token on one rank: key and value, each [num_kv_heads, head_size] of ``dtype``.

    ``sliding_window``: tokens that a query sees, itself included; None: all before it.
    ``value_size``: so many leading channels of the key are the value, and no other is kept (latent attention).
    """

    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    sliding_window: int | None = None
    value_size: int | None = None

    @property
    def bytes_per_token(self) -> int:
        tensors = 2 if self.value_size is None else 1
        return tensors * self.num_kv_heads * self.head_size * self.dtype.itemsize


@dataclass(frozen=True)
class MambaSpec:
    """Recurrent state of one layer on one rank: for each request one tensor of each of ``shapes``."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    def __post_init__(self) -> None:
        assert len(self.shapes) == len(self.dtypes), f"{len(self.shapes)} shapes and {len(self.dtypes)} dtypes"

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one request's state in this layer."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True))


KVCacheSpec = AttentionSpec | MambaSpec


@dataclass(frozen=True)
class KVCacheConfig:
    """The cache of one rank.

    ``num_blocks`` blocks of ``block_size`` tokens, block 0 among them: the null block, which no request gets and
    which padded block tables point at. ``num_state_slots`` recurrent-state slots (0: the model has none), slot 0 among
    them: the pad slot, which no request gets and which pad rows carry. Bytes count all layers together.
    """

    num_blocks: int
    block_size: int
    num_state_slots: int = 0
    bytes_per_block: int = 0
    bytes_per_state_slot: int = 0

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block + self.num_state_slots * self.bytes_per_state_slot
