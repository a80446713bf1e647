# SPDX-License-Identifier: Apache-2.0
"""One memory budget, cut into state slots and blocks. Numbers by hand."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from vllm.config import CacheConfig, SchedulerConfig
from vllm.v1.core.kv_cache_utils import get_kv_cache_config, useful_cache_bytes
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, MambaSpec

ATTENTION = AttentionSpec(num_kv_heads=2, head_size=16, dtype=torch.bfloat16)  # 128 bytes a token, 2048 a block
MAMBA = MambaSpec(shapes=((3, 10), (2, 4, 4)), dtypes=(torch.bfloat16, torch.float32))  # 60 + 128 = 188 bytes
LAYERS = {"0": ATTENTION, "1": ATTENTION}


def config(max_model_len: int = 100, max_num_seqs: int = 4, **cache: Any) -> Any:
    return types.SimpleNamespace(
        model_config=types.SimpleNamespace(max_model_len=max_model_len),
        scheduler_config=SchedulerConfig(max_num_seqs=max_num_seqs),
        cache_config=CacheConfig(**cache),
    )


def test_sizes():
    assert ATTENTION.bytes_per_token == 2 * 2 * 16 * 2
    assert MAMBA.page_size_bytes == 188


def test_blocks_fill_the_budget():
    got = get_kv_cache_config(LAYERS, 10 * 4096 + 4095, config())
    assert got == KVCacheConfig(10, 16, 0, 4096, 0)
    assert got.total_bytes == 40960


def test_without_prefix_caching_never_more_than_can_be_used():
    assert get_kv_cache_config(LAYERS, 10**9, config(enable_prefix_caching=False)).num_blocks == 4 * 7 + 1
    assert get_kv_cache_config(LAYERS, 10**8, config()).num_blocks == 10**8 // 4096
    assert get_kv_cache_config(LAYERS, 10**9, config()).num_blocks == 131072


def test_state_slots_come_first():
    layers = {**LAYERS, "2": MAMBA, "3": MAMBA}
    got = get_kv_cache_config(layers, 5 * 376 + 20 * 4096, config(enable_prefix_caching=False))
    assert got == KVCacheConfig(20, 16, 5, 4096, 376)


def test_a_model_of_recurrent_layers_only():
    got = get_kv_cache_config({"0": MAMBA}, 10**4, config(enable_prefix_caching=False))
    assert got == KVCacheConfig(4 * 7 + 1, 16, 5, 0, 188)


def test_too_little_for_one_request():
    with pytest.raises(
        ValueError, match=r"max_model_len=100 .* 8 cache blocks .*32768 bytes.* 5 .*lower max_model_len to 64 or"
    ):
        get_kv_cache_config(LAYERS, 5 * 4096, config())
    assert get_kv_cache_config(LAYERS, 5 * 4096, config(max_model_len=64)).num_blocks == 5


def test_too_little_for_the_state():
    with pytest.raises(ValueError, match=r"max_num_seqs=4 .* 5 x 188 bytes, but 900 .* lower max_num_seqs to 3"):
        get_kv_cache_config({**LAYERS, "2": MAMBA}, 900, config(enable_prefix_caching=False))


def test_override_wins_but_must_hold_a_request():
    assert get_kv_cache_config(LAYERS, 0, config(num_gpu_blocks_override=9)).num_blocks == 9
    with pytest.raises(ValueError, match="there are 7"):
        get_kv_cache_config(LAYERS, 10**9, config(num_gpu_blocks_override=7))


def test_a_cache_that_nobody_named_holds_all_requests_and_as_much_again_for_prefixes():
    mixed = {**LAYERS, "2": MAMBA}
    assert useful_cache_bytes(LAYERS, config(enable_prefix_caching=False)) == (4 * 7 + 1) * 4096
    assert useful_cache_bytes(LAYERS, config()) == (2 * 4 * 7 + 1) * 4096
    assert useful_cache_bytes(mixed, config(enable_prefix_caching=False)) == (4 * 7 + 1) * 4096 + 5 * 188
    # Not past 131072 blocks for prefixes, but never less than the requests hold.
    assert useful_cache_bytes(LAYERS, config(max_model_len=16 * 30000)) == 131072 * 4096
    assert useful_cache_bytes(LAYERS, config(max_model_len=16 * 50000)) == 200001 * 4096
    fits = get_kv_cache_config(LAYERS, useful_cache_bytes(LAYERS, config()), config())
    assert fits.num_blocks == 2 * 4 * 7 + 1
