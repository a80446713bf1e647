# SPDX-License-Identifier: Apache-2.0
"""Ranks compare what they are about to do before they do it.

They meet on a board, the key-value store of the launcher's rendezvous, and in no collective: so a rank that never comes
is named by those that wait, with the place where it was last, and no backend is left half-way through an operation.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from vllm import envs
from vllm.distributed import observer
from vllm.distributed.observer import CollectiveError, CollectiveRecord
from vllm.distributed.parallel_state import get_store
from vllm.v1.debug.ledger import agreed_fields, clock, describe, disagreements, name_ranks

_LONGEST_NAP_S = 0.02
# The launcher's store answers in milliseconds; one that takes this long is gone.
_ANSWER_S = 20.0


class ConsensusError(CollectiveError):
    """The ranks of a group are not about to run the same collective."""


class Board:
    """Short messages between ranks; one client serves one thread at a time, so each thread takes a board of its own."""

    def __init__(self, run: str, rank: int) -> None:
        store = get_store()
        store.set_timeout(timedelta(seconds=_ANSWER_S))
        self.store, self.rank = dist.PrefixStore(f"diagnosis-{run}", store), rank

    def read(self, key: str) -> str:
        """Empty where nobody has written."""
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def raise_alarm(self, reason: str) -> None:
        """Tell every rank that the run is lost, and why; the first reason stays."""
        self.store.compare_set("alarm", "", f"rank {self.rank} reports: {reason}")

    def show_life(self, place: Mapping[str, Any]) -> None:
        """Tell the others that this rank lives and what it does (see ``watchdog.Diagnosis``)."""
        self.store.set(f"alive/{self.rank}", json.dumps({"time": time.time(), **place}))

    def places(self, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
        """What each of ``ranks`` last told; empty until all have told something."""
        keys = [f"alive/{rank}" for rank in ranks]
        texts = self.store.multi_get(keys) if keys and self.store.check(keys) else []
        return {rank: json.loads(text) for rank, text in zip(ranks, texts, strict=False)}


class ConsensusGuard:
    """Compares operation, order, sizes, shapes, dtypes, step and layer over the group before each collective."""

    def __init__(self, board: Board) -> None:
        self.board = board

    def check(self, record: CollectiveRecord) -> None:
        """Return once every rank of the group is about to run this collective.

        Raises:
            ConsensusError: the ranks differ, one has died or reported a failure, or one did not come within
                ``VLLM_COLLECTIVE_TIMEOUT_S``; the message says who and how.
        """
        try:
            self._check(record)
        except dist.DistError as error:
            what = f"rank {record.rank}: the board of the ranks was gone before {describe(record)}"
            raise ConsensusError(f"{what}: the launcher, or rank 0 that serves it, has ended", record) from error

    def done(self, record: CollectiveRecord, how: str = "left") -> None:
        """The collective has ended or is ``queued`` on a device; without a board the next check says so."""
        with contextlib.suppress(dist.DistError):
            self.board.store.set(f"at/{record.rank}", f"{how} {describe(record)} at {clock(time.time())}")

    def _check(self, record: CollectiveRecord) -> None:
        store = self.board.store
        store.set(f"at/{record.rank}", f"waits in {describe(record)} since {clock(time.time())}")
        keys = [f"{record.group}/{record.seq}/{rank}" for rank in record.ranks]
        own = json.dumps(agreed_fields(record._asdict()))
        store.set(keys[record.ranks.index(record.rank)], own)
        self._wait_for(keys, record)
        texts = [text.decode() for text in store.multi_get(keys)]
        if any(text != own for text in texts):
            how = disagreements({rank: json.loads(text) for rank, text in zip(record.ranks, texts, strict=True)})
            what = f"rank {record.rank}: the ranks of {record.group} disagree on collective #{record.seq}"
            raise ConsensusError(f"{what}: {how}", record)
        # Every rank has come here, so every rank has read the messages before this one.
        if record.seq:
            store.delete_key(f"{record.group}/{record.seq - 1}/{record.rank}")

    def _wait_for(self, keys: list[str], record: CollectiveRecord) -> None:
        store, start, waited = self.board.store, time.monotonic(), 0.0
        limit = envs.VLLM_COLLECTIVE_TIMEOUT_S
        while not store.check(keys):
            waited = time.monotonic() - start
            lost = observer.lost()
            if lost or waited > limit:
                missing = [rank for rank, key in zip(record.ranks, keys, strict=True) if not store.check([key])]
                why = f"but {lost}" if lost else f"not there after {limit:g} s. {self._whereabouts(missing)}"
                what = f"rank {record.rank} waits in {describe(record)} for {name_ranks(missing)}"
                raise ConsensusError(f"{what}, {why}", record)
            time.sleep(min(waited / 4, _LONGEST_NAP_S))

    def _whereabouts(self, ranks: list[int]) -> str:
        parts, places = [], self.board.places(ranks)
        for rank in ranks:
            silent = time.time() - places[rank]["time"] if rank in places else 0.0
            life = f"silent for {silent:.1f} s, so dead or stopped" if silent > 2.5 else "alive"
            parts.append(f"Rank {rank} {self.board.read(f'at/{rank}') or 'was in no collective yet'}; it is {life}")
        return ". ".join(parts)
