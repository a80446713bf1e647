# SPDX-License-Identifier: Apache-2.0
"""Gives requests the blocks and the state slot that they need, and takes them back."""

from __future__ import annotations

from collections.abc import Iterable

from vllm.kernels.padding import PAD_STATE_SLOT
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import cdiv
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request


class KVCacheManager:
    """One request's view of the cache: blocks for its tokens in order and, for hybrid models, one state slot."""

    def __init__(self, config: KVCacheConfig, enable_prefix_caching: bool) -> None:
        assert not (config.num_state_slots and enable_prefix_caching), (
            f"{config.num_state_slots} state slots and prefix caching: a block hit brings no recurrent state"
        )
        self.config = config
        self.enable_prefix_caching = enable_prefix_caching
        self.block_size = config.block_size
        self.pool = BlockPool(config.num_blocks)
        self.free_state_slots = list(range(config.num_state_slots - 1, PAD_STATE_SLOT, -1))

    def start(self, request: Request, max_num_new_tokens: int | None = None) -> bool:
        """Blocks for all tokens that ``request`` has now, the leading ones from the prefix cache, and a state slot.

        Sets ``block_ids``, ``num_computed_tokens`` (those found in the cache, never its last token), ``state_slot``.
        Returns False, nothing changed, where too few blocks or slots are free, or where more than
        ``max_num_new_tokens`` (None: any number) would be left to compute.
        """
        assert not request.block_ids, f"{request.request_id} holds {request.block_ids} before it starts"
        assert request.state_slot == -1, f"{request.request_id} holds state slot {request.state_slot} before it starts"
        if self.config.num_state_slots and not self.free_state_slots:
            return False
        needed = cdiv(request.num_tokens, self.block_size)
        if needed > self.pool.num_free + (request.num_tokens - 1) // self.block_size * self.enable_prefix_caching:
            return False
        hits, prefix_id = self._find_prefix(request)
        if max_num_new_tokens is not None and request.num_tokens - len(hits) * self.block_size > max_num_new_tokens:
            return False
        if needed - len(hits) > self.pool.num_free - self.pool.count_unheld(hits):
            return False
        self.pool.touch(hits)
        request.block_ids = hits + self.pool.allocate(needed - len(hits))
        request.num_computed_tokens = len(hits) * self.block_size
        request.num_cached_blocks = len(hits)
        request.prefix_id = prefix_id
        if self.config.num_state_slots:
            request.state_slot = self.free_state_slots.pop()
        return True

    def _find_prefix(self, request: Request) -> tuple[list[int], int]:
        """The longest cached prefix in whole blocks that leaves a token to compute, and its prefix id."""
        pool, size, hits, prefix_id = self.pool, self.block_size, [], self.pool.root_id
        if self.enable_prefix_caching and request.sampling_params.prompt_logprobs is None:
            for start in range(0, request.num_tokens - size, size):
                block = pool.find(prefix_id, request.all_token_ids[start : start + size])
                if block is None:
                    break
                hits.append(block)
                prefix_id = pool.prefix_ids[block]
        return hits, prefix_id

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Make room for the first ``num_tokens`` tokens; returns the blocks added, None: too few are free."""
        missing = cdiv(num_tokens, self.block_size) - len(request.block_ids)
        if missing <= 0:
            return []
        if missing > self.pool.num_free:
            return None
        blocks = self.pool.allocate(missing)
        request.block_ids += blocks
        return blocks

    def cache_computed(self, request: Request, num_tokens: int) -> None:
        """Offer the full blocks of ``request`` below ``num_tokens``, all computed and known, to later requests."""
        size = self.block_size
        while request.prefix_id is not None and (request.num_cached_blocks + 1) * size <= num_tokens:
            i = request.num_cached_blocks
            tokens = request.all_token_ids[i * size : (i + 1) * size]
            request.prefix_id = self.pool.cache(request.block_ids[i], request.prefix_id, tokens)
            request.num_cached_blocks = i + 1

    def release(self, request: Request) -> None:
        """Take back everything that ``request`` holds; blocks that are cached stay findable until evicted."""
        self.pool.free(request.block_ids)
        request.block_ids = []
        request.prefix_id = None
        request.num_cached_blocks = 0
        if request.state_slot != -1:
            self.free_state_slots.append(request.state_slot)
            request.state_slot = -1

    def drop_cached(self, request: Request) -> None:
        """No later request finds a block of ``request``, nor what was or will be computed on top of one."""
        self.pool.drop(request.block_ids)
        request.prefix_id = None

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raises AssertionError naming blocks and slots that ``requests``, all alive, and the pool disagree about."""
        requests = list(requests)
        self.pool.check_integrity({r.request_id: r.block_ids for r in requests})
        held = {r.request_id: r.state_slot for r in requests if r.state_slot != -1}
        slots = sorted([*held.values(), *self.free_state_slots])
        assert slots == list(range(1, self.config.num_state_slots)), (
            f"state slots leaked or shared: held {held}, free {sorted(self.free_state_slots)}, of "
            f"1..{self.config.num_state_slots - 1}"
        )
