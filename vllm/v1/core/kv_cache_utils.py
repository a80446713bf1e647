# SPDX-License-Identifier: Apache-2.0
"""One memory budget, shared by attention blocks and recurrent-state slots."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheSpec, MambaSpec

# Bookkeeping costs memory and start-up time by block: a tiny model's cache would have millions.
_MOST_CACHED_BLOCKS = 1 << 17


def cdiv(a: int, b: int) -> int:
    """ceil(a / b)."""
    return -(-a // b)


def sizes(specs: Mapping[str, KVCacheSpec], vllm_config: VllmConfig) -> tuple[int, int, int, int]:
    """(bytes of a block, of a state slot, state slots, blocks that ``max_num_seqs`` full requests hold and one more)"""
    block_size, max_num_seqs = vllm_config.cache_config.block_size, vllm_config.scheduler_config.max_num_seqs
    bytes_per_block = block_size * sum(s.bytes_per_token for s in specs.values() if isinstance(s, AttentionSpec))
    bytes_per_slot = sum(s.page_size_bytes for s in specs.values() if isinstance(s, MambaSpec))
    most_blocks = max_num_seqs * cdiv(vllm_config.model_config.max_model_len, block_size) + 1
    return bytes_per_block, bytes_per_slot, max_num_seqs + 1 if bytes_per_slot else 0, most_blocks


def useful_cache_bytes(specs: Mapping[str, KVCacheSpec], vllm_config: VllmConfig) -> int:
    """The size of a cache that nobody named: all that ``max_num_seqs`` requests of ``max_model_len`` tokens hold.

    With prefix caching as many blocks again, for what requests that ended leave to later ones, up to 131072 in all.
    """
    bytes_per_block, bytes_per_slot, num_slots, most_blocks = sizes(specs, vllm_config)
    if vllm_config.cache_config.enable_prefix_caching:
        most_blocks = max(most_blocks, min(2 * most_blocks - 1, _MOST_CACHED_BLOCKS))
    return most_blocks * bytes_per_block + num_slots * bytes_per_slot


def get_kv_cache_config(
    specs: Mapping[str, KVCacheSpec], available_bytes: int, vllm_config: VllmConfig, fit: bool = False
) -> KVCacheConfig:
    """Cut ``available_bytes`` of this rank into state slots for ``max_num_seqs`` requests, then attention blocks.

    The blocks hold at least one request of ``max_model_len`` tokens (with ``fit`` at least one block), and never more
    than ``max_num_seqs`` such requests can fill; with prefix caching up to 131072 blocks all the same.
    ``num_gpu_blocks_override`` sets their number whatever the budget.

    Raises:
        ValueError: the budget is too small, with its numbers and what would fit.
    """
    cache, max_model_len = vllm_config.cache_config, vllm_config.model_config.max_model_len
    block_size, max_num_seqs = cache.block_size, vllm_config.scheduler_config.max_num_seqs
    bytes_per_block, bytes_per_slot, num_slots, most_blocks = sizes(specs, vllm_config)
    needed_blocks = cdiv(max_model_len, block_size) + 1
    bytes_for_blocks = available_bytes - num_slots * bytes_per_slot
    if cache.num_gpu_blocks_override is not None:
        num_blocks = cache.num_gpu_blocks_override
    elif bytes_for_blocks < 0:
        raise ValueError(
            f"recurrent state of max_num_seqs={max_num_seqs} requests and one pad slot takes {num_slots} x "
            f"{bytes_per_slot} bytes, but {available_bytes} bytes are available for the cache; lower max_num_seqs to "
            f"{max(available_bytes // bytes_per_slot - 1, 0)} or less, or raise kv_cache_memory_bytes / "
            "gpu_memory_utilization or the memory limit that the log names"
        )
    elif bytes_per_block == 0:
        num_blocks = most_blocks
    else:
        num_blocks = max(bytes_for_blocks, 0) // bytes_per_block
        cached = _MOST_CACHED_BLOCKS if cache.enable_prefix_caching else 0
        num_blocks = min(num_blocks, max(most_blocks, cached))
    if num_blocks < (2 if fit else needed_blocks):
        fits = max(num_blocks - 1, 0) * block_size
        raise ValueError(
            f"one request of max_model_len={max_model_len} tokens needs {needed_blocks} cache blocks of {block_size} "
            f"tokens, the null block included ({needed_blocks * bytes_per_block} bytes), but there are {num_blocks} "
            f"({available_bytes} bytes available, {num_slots * bytes_per_slot} of them for recurrent state); lower "
            f"max_model_len to {fits} or less, or raise kv_cache_memory_bytes / gpu_memory_utilization or the memory "
            "limit that the log names"
        )
    return KVCacheConfig(num_blocks, block_size, num_slots, bytes_per_block, bytes_per_slot)
