# SPDX-License-Identifier: Apache-2.0
"""What the prefix cache may give, and the faults that would let it give something else."""

from __future__ import annotations

import sys

import pytest
from kv_simulator import Simulator, make_scheduler

from vllm.v1.core import block_pool
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler


def prompt(length: int, seed: int = 1) -> list[int]:
    return [(seed * 3 + i * i + i // 5) % 5 for i in range(length)]


@pytest.mark.parametrize("block_size", [4, 8, 16])
def test_hit_at_every_offset_of_a_block(block_size):
    """The longest prefix in whole blocks, and never the last token."""
    for length in range(1, 2 * block_size + 2):
        sim = Simulator(make_scheduler(block_size=block_size))
        sim.add("cold", prompt(2 * block_size + 2), max_tokens=3)
        sim.finish()
        warm = sim.add("warm", prompt(2 * block_size + 2)[:length], max_tokens=block_size + 1)
        sim.finish()
        assert warm.num_cached_tokens == (length - 1) // block_size * block_size


def test_generated_tokens_are_found_too():
    sim = Simulator(make_scheduler())
    first = sim.add("a", prompt(6), max_tokens=10)
    sim.finish()
    again = sim.add("b", [*first.all_token_ids, 2], max_tokens=4)
    sim.finish()
    assert again.num_cached_tokens == 12, "the KV of the last sampled token was never computed"


def test_equal_prompts_of_one_step_share_nothing_until_it_is_computed():
    sim = Simulator(make_scheduler())
    a, b = sim.add("a", prompt(12)), sim.add("b", prompt(12))
    sim.step()
    assert not set(a.block_ids) & set(b.block_ids)
    assert (a.num_cached_tokens, b.num_cached_tokens) == (0, 0)
    c = sim.add("c", prompt(12))
    sim.step()
    assert c.num_cached_tokens == 8
    assert c.block_ids[:2] == a.block_ids[:2]
    sim.finish()


def test_a_chunk_that_ends_inside_a_block_caches_only_whole_blocks():
    sim = Simulator(make_scheduler(budget=10))
    sim.add("a", prompt(20))
    sim.step()
    assert len(sim.scheduler.kv_cache_manager.pool.cached) == 2
    sim.finish()


def test_a_preempted_request_finds_its_own_blocks_again():
    sim = Simulator(make_scheduler(num_blocks=1 + 6, max_model_len=24))
    sim.add("a", prompt(8), max_tokens=12)
    b = sim.add("b", prompt(8, 2), max_tokens=12)
    sim.finish()
    assert b.num_preemptions > 0
    assert b.num_cached_tokens == 0, "what it reads of itself is no hit of its prompt"


def test_blank_blocks_go_first_then_the_least_recently_used_and_leaves_before_roots():
    pool = BlockPool(6)
    held = pool.allocate(4)
    prefix = pool.root_id
    for block, tokens in zip(held[:3], ([1, 1], [2, 2], [3, 3]), strict=True):
        prefix = pool.cache(block, prefix, tokens)
    pool.free(held)
    assert [pool.allocate(1)[0] for _ in range(5)] == [held[3], 5, held[2], held[1], held[0]]
    assert pool.num_free == 0
    assert not pool.cached


def test_touch_renews_a_block():
    pool = BlockPool(3)
    a, b = pool.allocate(2)
    pool.cache(a, pool.root_id, [1])
    pool.cache(b, pool.root_id, [2])
    pool.free([a])
    pool.free([b])
    pool.touch([a])
    assert pool.num_free == 1
    pool.free([a])
    assert pool.allocate(2) == [b, a]


def test_the_null_block_is_never_handed_out():
    pool = BlockPool(9)
    assert sorted(pool.allocate(8)) == list(range(1, 9))
    with pytest.raises(AssertionError, match="1 blocks wanted, 0 free"):
        pool.allocate(1)


def test_a_prefix_that_was_evicted_takes_all_that_stood_on_it():
    """The second block outlives the first; the first comes back with other content before it."""
    pool = BlockPool(4)
    a, b = pool.allocate(2)
    first = pool.cache(a, pool.root_id, [1, 1])
    pool.cache(b, first, [2, 2])
    pool.drop([a])
    assert pool.cache(a, pool.root_id, [1, 1]) != first
    assert pool.find(pool.prefix_ids[a], [2, 2]) is None
    pool.free([a, b])
    pool.check_integrity({})


def test_reset_lets_nothing_old_be_found():
    sim = Simulator(make_scheduler())
    sim.add("done", prompt(12), max_tokens=1)
    sim.finish()
    sim.add("live", prompt(14, 2), max_tokens=8)
    sim.step()
    sim.reset()
    sim.step()
    a, b = sim.add("a", prompt(12), max_tokens=1), sim.add("b", prompt(14, 2), max_tokens=1)
    sim.finish()
    assert (a.num_cached_tokens, b.num_cached_tokens) == (0, 0)
    c = sim.add("c", prompt(12), max_tokens=1)
    sim.finish()
    assert c.num_cached_tokens == 8


def test_reset_reaches_a_first_block_that_is_not_full_yet():
    sim = Simulator(make_scheduler())
    live = sim.add("live", prompt(2), max_tokens=12)
    sim.step()
    sim.reset()
    sim.finish()
    again = sim.add("again", live.all_token_ids, max_tokens=1)
    sim.finish()
    assert again.num_cached_tokens == 0


def test_drop_reaches_what_stands_on_a_twin_block():
    """Two requests of one step hold equal blocks, one of them cached; the other goes bad and then computes more."""
    sim = Simulator(make_scheduler())
    sim.add("good", prompt(8), max_tokens=1)
    bad = sim.add("bad", prompt(8), max_tokens=12)
    sim.step()
    sim.scheduler.drop_cached_blocks("bad")
    sim.finish()
    again = sim.add("again", bad.all_token_ids, max_tokens=1)
    sim.finish()
    assert again.num_cached_tokens == 8, "the good request's blocks and no more"


def test_drop_reaches_what_is_computed_later():
    sim = Simulator(make_scheduler())
    sim.add("a", prompt(6), max_tokens=12)
    sim.step()
    sim.scheduler.drop_cached_blocks("a")
    sim.finish()
    assert not sim.scheduler.kv_cache_manager.pool.cached


def test_caching_off_finds_nothing():
    sim = Simulator(make_scheduler(caching=False))
    sim.add("a", prompt(12), max_tokens=1)
    sim.finish()
    b = sim.add("b", prompt(12), max_tokens=1)
    sim.finish()
    assert b.num_cached_tokens == 0


COLLIDING = sys.hash_info.modulus  # hash(COLLIDING + 1) == hash(1)


def _two_prompts_of_one_hash() -> Simulator:
    sim = Simulator(make_scheduler())
    sim.add("a", [1, 1, 1, 1, 2], max_tokens=1)
    sim.finish()
    assert hash((1, 1, 1, 1)) == hash((1, 1, 1, COLLIDING + 1))
    sim.add("b", [1, 1, 1, COLLIDING + 1, 2], max_tokens=1)
    return sim


def test_a_hash_collision_is_no_hit():
    sim = _two_prompts_of_one_hash()
    b = sim.requests["b"]
    sim.finish()
    assert b.num_cached_tokens == 0


def test_fault_put_back_hash_without_comparing_tokens(monkeypatch):
    monkeypatch.setattr(block_pool, "block_key", lambda prefix_id, token_ids: hash((prefix_id, tuple(token_ids))))
    sim = _two_prompts_of_one_hash()
    with pytest.raises(AssertionError, match="b reads another's KV at position 3"):
        sim.step()


def test_fault_put_back_key_without_the_prefix(monkeypatch):
    monkeypatch.setattr(block_pool, "block_key", lambda prefix_id, token_ids: tuple(token_ids))
    sim = Simulator(make_scheduler())
    sim.add("a", [0, 0, 0, 0, 1, 1, 1, 1, 2], max_tokens=1)
    sim.finish()
    sim.add("b", [1, 1, 1, 1, 2], max_tokens=1)
    with pytest.raises(AssertionError, match="b reads another's KV at position 0"):
        sim.step()


def test_fault_put_back_caching_before_it_is_computed(monkeypatch):
    start = KVCacheManager.start

    def eager(self, request, max_num_new_tokens=None):
        started = start(self, request, max_num_new_tokens)
        if started:
            self.cache_computed(request, request.num_tokens)
        return started

    monkeypatch.setattr(KVCacheManager, "start", eager)
    sim = Simulator(make_scheduler())
    sim.add("a", prompt(12))
    sim.add("b", prompt(12))
    with pytest.raises(AssertionError, match="b reads another's KV at position 0"):
        sim.step()


def test_fault_put_back_nan_without_dropping(monkeypatch):
    monkeypatch.setattr(KVCacheManager, "drop_cached", lambda self, request: None)
    sim = Simulator(make_scheduler())
    sim.add("a", prompt(12))
    sim.step()
    sim.step(nan=frozenset(["a"]))
    sim.add("b", prompt(12))
    with pytest.raises(AssertionError, match="b reads another's KV at position 0"):
        sim.step()


def test_fault_put_back_evicting_a_block_in_use(monkeypatch):
    """A hit that is not counted as a holder: its block is given to another."""
    monkeypatch.setattr(BlockPool, "touch", lambda self, blocks: None)
    sim = Simulator(make_scheduler(num_blocks=1 + 5, max_model_len=20))
    sim.add("a", prompt(9), max_tokens=1)
    sim.finish()
    sim.add("b", prompt(9), max_tokens=4)
    with pytest.raises(AssertionError, match="reference counts"):
        sim.finish()


def test_fault_put_back_last_token_not_recomputed(monkeypatch):
    find = KVCacheManager._find_prefix

    def whole(self, request):
        request.all_token_ids.append(0)
        found = find(self, request)
        request.all_token_ids.pop()
        return found

    monkeypatch.setattr(KVCacheManager, "_find_prefix", whole)
    sim = Simulator(make_scheduler())
    sim.add("a", prompt(8), max_tokens=1)
    sim.finish()
    sim.add("b", prompt(8), max_tokens=1)
    with pytest.raises(AssertionError):
        sim.step()


def test_requests_keep_order_of_arrival_when_preempted_with_a_cache():
    sim = Simulator(make_scheduler(num_blocks=1 + 8, max_model_len=24, max_num_seqs=4))
    for i in range(6):
        sim.add(str(i), prompt(8, i % 2), max_tokens=14)
    while sim.requests:
        sim.step()
        scheduler: Scheduler = sim.scheduler
        assert [r.request_id for r in [*scheduler.running, *scheduler.waiting]] == list(scheduler.requests)
    sim.check_idle()
