# SPDX-License-Identifier: Apache-2.0
"""The cache blocks of a rank: who holds them, which are free, and which hold a known prefix."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

from vllm.kernels.padding import NULL_BLOCK


def block_key(prefix_id: int, token_ids: Sequence[int]) -> Hashable:
    """What a full block is found by: the prefix before it and its own tokens.

    The whole key is kept and a dictionary compares it on every hit, so tokens whose hashes collide never meet.
    """
    return prefix_id, tuple(token_ids)


class BlockPool:
    """Reference-counted blocks 1..num_blocks-1 with a prefix cache; block 0 is the null block, never handed out.

    A *prefix id* names one token sequence of whole blocks, and is never used twice: ``root_id`` is the empty
    sequence, and caching a block after prefix p makes (or finds) the id of p + block. Once a block is evicted or
    dropped, the id of its prefix cannot be reached any more, so nothing computed on top of it can be either.

    A block with no holder is free: blank ones are taken first, then cached ones, least recently used first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.blank = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self.evictable: OrderedDict[int, None] = OrderedDict()
        self.cached: dict[Hashable, int] = {}
        self.keys: dict[int, Hashable] = {}
        self.prefix_ids: dict[int, int] = {}
        self.root_id = 0
        self._last_prefix_id = 0

    @property
    def num_free(self) -> int:
        return len(self.blank) + len(self.evictable)

    def _new_prefix_id(self) -> int:
        self._last_prefix_id += 1
        return self._last_prefix_id

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks for one new holder, whatever they held forgotten."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        blocks = []
        for _ in range(count):
            if self.blank:
                block = self.blank.pop()
            else:
                block, _ = self.evictable.popitem(last=False)
                self._forget(block)
            assert self.ref_counts[block] == 0, f"free block {block} has {self.ref_counts[block]} holders"
            self.ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """One more holder for each of ``blocks``, which are cached."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self.evictable[block]
            self.ref_counts[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """One holder fewer for each of ``blocks``, given in the order of their tokens.

        The last go first into the queue of evictable ones, so a prefix outlives what was built on it.
        """
        for block in reversed(blocks):
            assert self.ref_counts[block] > 0, f"block {block} freed with {self.ref_counts[block]} holders"
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                if block in self.keys:
                    self.evictable[block] = None
                else:
                    self.blank.append(block)

    def count_unheld(self, blocks: Iterable[int]) -> int:
        return sum(self.ref_counts[block] == 0 for block in blocks)

    def find(self, prefix_id: int, token_ids: Sequence[int]) -> int | None:
        """The block that holds exactly ``token_ids`` after prefix ``prefix_id``; None: no such."""
        return self.cached.get(block_key(prefix_id, token_ids))

    def cache(self, block: int, prefix_id: int, token_ids: Sequence[int]) -> int:
        """Offer a full, computed block to later requests; returns the id of the prefix that it ends.

        Where another block holds the same already, that one stays and ``block`` is not cached.
        """
        assert self.ref_counts[block] > 0, f"block {block} cached with {self.ref_counts[block]} holders"
        assert block not in self.keys, f"block {block} is cached already, as {self.keys[block]}"
        key = block_key(prefix_id, token_ids)
        twin = self.cached.get(key)
        if twin is not None:
            return self.prefix_ids[twin]
        self.cached[key] = block
        self.keys[block] = key
        self.prefix_ids[block] = self._new_prefix_id()
        return self.prefix_ids[block]

    def _forget(self, block: int) -> None:
        del self.cached[self.keys.pop(block)]
        del self.prefix_ids[block]

    def drop(self, blocks: Iterable[int]) -> None:
        """Let no later request find ``blocks`` or what was computed on top of them; holders keep them."""
        for block in blocks:
            if block in self.keys:
                self._forget(block)
                if block in self.evictable:
                    del self.evictable[block]
                    self.blank.append(block)

    def reset(self) -> None:
        """Forget every cached block. Requests that run now can add nothing that a later one finds."""
        self.drop(list(self.keys))
        self.root_id = self._new_prefix_id()

    def check_integrity(self, holders: dict[str, list[int]]) -> None:
        """Raises AssertionError naming the blocks where the pool disagrees with ``holders``, by request id."""
        counts = [0] * self.num_blocks
        for request_id, blocks in holders.items():
            assert NULL_BLOCK not in blocks, f"request {request_id} holds the null block: {blocks}"
            assert len(set(blocks)) == len(blocks), f"request {request_id} holds a block twice: {blocks}"
            for block in blocks:
                counts[block] += 1
        if self.ref_counts != counts:
            wrong = {
                block: f"{recorded} recorded, held by {[r for r, held in holders.items() if block in held]}"
                for block, (recorded, count) in enumerate(zip(self.ref_counts, counts, strict=True))
                if recorded != count
            }
            raise AssertionError(f"blocks leaked or shared by mistake (reference counts): {wrong}")
        free, held = [*self.blank, *self.evictable], {block for blocks in holders.values() for block in blocks}
        free_once = set(free)
        wrong_free = free_once & (held | {NULL_BLOCK})
        assert not wrong_free, f"blocks free while held, or the null block: {sorted(wrong_free)}"
        assert len(free) == len(free_once), f"blocks free twice: {sorted({b for b in free if free.count(b) > 1})}"
        if len(free) + len(held) != self.num_blocks - 1:
            raise AssertionError(f"blocks leaked: {sorted(set(range(1, self.num_blocks)) - free_once - held)}")
        assert self.keys.keys() == self.prefix_ids.keys(), "a block is cached without a prefix id"
        assert {key: block for block, key in self.keys.items()} == self.cached, "a block is found under another's key"
        blank_cached, evictable_blank = self.keys.keys() & set(self.blank), self.evictable.keys() - self.keys.keys()
        assert not blank_cached, f"blocks cached but in the blank list: {sorted(blank_cached)}"
        assert not evictable_blank, f"blocks evictable but not cached: {sorted(evictable_blank)}"
