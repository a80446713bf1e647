# SPDX-License-Identifier: Apache-2.0
"""How much KV cache there is and how it is cut into blocks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheConfig:
    """``kv_cache_memory_bytes`` (per rank) wins over ``gpu_memory_utilization`` (share of the device's memory);
    ``num_gpu_blocks_override`` wins over both and counts blocks, the null block included.

    ``cache_dtype``: "auto", the model's; "fp8" or "fp8_e4m3", keys and values as e4m3 with one scale each a layer."""

    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    cache_dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size={self.block_size}: a block holds at least 1 token; use 16")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization={self.gpu_memory_utilization}: give a share of the memory in (0, 1]"
            )
        if self.cache_dtype not in ("auto", "fp8", "fp8_e4m3"):
            raise NotImplementedError(
                f"kv_cache_dtype={self.cache_dtype!r} is not supported; use 'auto' (the model's dtype) or 'fp8' (e4m3)"
            )
        if self.kv_cache_memory_bytes is not None and self.kv_cache_memory_bytes <= 0:
            raise ValueError(f"kv_cache_memory_bytes={self.kv_cache_memory_bytes}: give a positive number of bytes")

    @property
    def is_fp8(self) -> bool:
        return self.cache_dtype != "auto"
