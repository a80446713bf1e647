# SPDX-License-Identifier: Apache-2.0
"""Where ranks meet once more after their launcher has started them again.

torch's elastic agent serves one store for as long as it lives. What ranks of an earlier round left there (addresses,
counts, answers) would be taken for words of this one, and the agents' counts of restarts need not agree: an agent that
joins again for another's sake counts none, a new one begins at 0. So ranks find out who is here now: each leaves a
number that nobody had before, rank 0 answers each number, and once all have heard its answer its own is the round's
name. All ranks of a round are dead before one of the next is started, so only a living rank 0 can have read a number
that is new.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

_LOOK_S = 0.02


def is_kept_over_rounds() -> bool:
    """Whether the store that ``env://`` finds outlives the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def enter_round(store: dist.Store, rank: int, world_size: int, patience: timedelta) -> dist.Store:
    """The part of ``store`` that only this round's ranks see; every rank calls it once.

    Raises ``RuntimeError`` for ranks that do not come within ``patience``.
    """
    shared, own = dist.PrefixStore("vllm/round", store), uuid.uuid4().hex
    shared.set(f"here/{rank}", own)
    try:
        if rank == 0:
            name = own
            _answer_all(shared, own, world_size, patience)
        else:
            shared.wait([f"answer/{own}"], patience)
            name = shared.get(f"answer/{own}").decode()
            shared.set(f"heard/{name}/{rank}", "")
    except dist.DistError as error:
        raise RuntimeError(f"rank 0 did not answer rank {rank} within {patience.total_seconds():g} s") from error
    return dist.PrefixStore(f"vllm/round/{name}", store)


def _answer_all(shared: dist.Store, own: str, world_size: int, patience: timedelta) -> None:
    missing, until = list(range(1, world_size)), time.monotonic() + patience.total_seconds()
    while missing:
        for rank in missing:
            if shared.check([f"here/{rank}"]):  # its number, or that of its forerunner
                shared.set(f"answer/{shared.get(f'here/{rank}').decode()}", own)
        missing = [rank for rank in missing if not shared.check([f"heard/{own}/{rank}"])]
        if missing and time.monotonic() > until:
            raise RuntimeError(
                f"ranks {missing} of the {world_size} that were started did not come within "
                f"{patience.total_seconds():g} s: see what they report, or start as many ranks as make one engine"
            )
        time.sleep(_LOOK_S * bool(missing))
