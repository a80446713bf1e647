# SPDX-License-Identifier: Apache-2.0
"""Ranks compare what they are about to do before they do it.

They meet on a board, the key-value store of the launcher's rendezvous, and in no collective: so a rank that never comes
is named by those that wait, with the place where it was last, and no backend is left half-way through an operation.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from vllm import envs
from vllm.distributed.observer import CollectiveError, CollectiveRecord
from vllm.v1.debug.ledger import agreed_fields, describe, disagreements, name_ranks, record_fields

_LONGEST_NAP_S = 0.02


class ConsensusError(CollectiveError):
    """The ranks of a group are not about to run the same collective."""


class Board:
    """Short messages between ranks; each user needs a client of its own, because one waits for the other's call."""

    def __init__(self, run: str, rank: int) -> None:
        if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
            raise ValueError("MASTER_ADDR and MASTER_PORT are not set; start the ranks with torchrun, which sets them")
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        timeout = timedelta(seconds=envs.VLLM_COLLECTIVE_TIMEOUT_S)
        client = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
        self.store = dist.PrefixStore(f"vllm-diagnosis-{run}", client)
        self.rank = rank

    def raise_alarm(self, reason: str) -> None:
        """Tell every rank that the run is lost, and why; the first reason stays."""
        self.store.compare_set("alarm", "", f"rank {self.rank} reports: {reason}")

    def alarm(self) -> str:
        """The reason, empty without alarm."""
        return self.store.get("alarm").decode() if self.store.check(["alarm"]) else ""

    def show_life(self) -> None:
        self.store.set(f"alive/{self.rank}", str(time.time()))


class ConsensusGuard:
    """Compares operation, order, sizes, shapes, dtypes, step and layer over the group before each collective."""

    def __init__(self, board: Board) -> None:
        self.board = board

    def check(self, record: CollectiveRecord) -> None:
        """Return once every rank of the group is about to run this collective.

        Raises:
            ConsensusError: the ranks differ, one did not come within ``VLLM_COLLECTIVE_TIMEOUT_S`` (while loading,
                ``VLLM_LOAD_TIMEOUT_S``), or one has reported a failure; the message says who and how.
        """
        try:
            self._check(record)
        except dist.DistError as error:
            raise ConsensusError(
                f"rank {record.rank}: before {describe(record_fields(record))} the board of the ranks was gone: the "
                f"launcher, or without one rank 0, serves it and has ended ({str(error).splitlines()[0]})",
                record,
            ) from error

    def _check(self, record: CollectiveRecord) -> None:
        store, fields = self.board.store, record_fields(record)
        store.set(f"at/{record.rank}", f"waits since {time.time():.3f} in {describe(fields)}")
        keys = {rank: f"{record.group}/{record.seq}/{rank}" for rank in record.ranks}
        own = json.dumps(agreed_fields(fields))
        store.set(keys[record.rank], own)
        self._wait_for(keys, record)
        texts = [text.decode() for text in store.multi_get(list(keys.values()))]
        if any(text != own for text in texts):
            how = disagreements({rank: json.loads(text) for rank, text in zip(record.ranks, texts, strict=True)})
            raise ConsensusError(
                f"rank {record.rank}: the ranks of {record.group} disagree on collective #{record.seq}: {how}", record
            )
        # Every rank has come here, so every rank has read the messages before this one.
        if record.seq:
            store.delete_key(f"{record.group}/{record.seq - 1}/{record.rank}")

    def done(self, record: CollectiveRecord) -> None:
        """The collective has ended; without a board the next check says so."""
        with contextlib.suppress(dist.DistError):
            self.board.store.set(f"at/{record.rank}", f"left {describe(record_fields(record))} at {time.time():.3f}")

    def _wait_for(self, keys: dict[int, str], record: CollectiveRecord) -> None:
        store, start = self.board.store, time.monotonic()
        limit = envs.VLLM_COLLECTIVE_TIMEOUT_S if record.step >= 0 else envs.VLLM_LOAD_TIMEOUT_S
        wanted, waited = list(keys.values()), 0.0
        while not store.check(wanted):
            missing = [rank for rank, key in keys.items() if not store.check([key])]
            what = f"rank {record.rank} waits in {describe(record_fields(record))} for {name_ranks(missing)}"
            if waited > limit:
                raise ConsensusError(f"{what}, not there after {limit:g} s. {self._whereabouts(missing)}", record)
            # A rank that fails has told the board first; the others need not wait for it until the limit.
            if missing and waited > _LONGEST_NAP_S and (alarm := self.board.alarm()):
                raise ConsensusError(f"{what}, but {alarm}", record)
            time.sleep(min(waited / 4, _LONGEST_NAP_S))
            waited = time.monotonic() - start

    def _whereabouts(self, ranks: Sequence[int]) -> str:
        store, parts = self.board.store, []
        for rank in ranks:
            at = store.get(f"at/{rank}").decode() if store.check([f"at/{rank}"]) else "was in no collective yet"
            silent = time.time() - float(store.get(f"alive/{rank}")) if store.check([f"alive/{rank}"]) else 0.0
            life = f"silent for {silent:.1f} s, so dead or stopped" if silent > 2 else "alive"
            parts.append(f"Rank {rank} {at}; it is {life}")
        return ". ".join(parts)
