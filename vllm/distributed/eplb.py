# SPDX-License-Identifier: Apache-2.0
"""Expert-parallel load balancing: experts move between ranks by the load that was measured.

Each layer counts, on its device, the tokens that its router gives each expert. Every ``step_interval`` steps, before
the forward of a step that all ranks have agreed on, the counts are summed over the ranks; each rank computes the same
placement from the same sums, and the experts that change ranks are exchanged. So the collectives are alike on all
ranks, and no answer changes: an expert is the same matrices wherever it lies.

In such a step, and in no other, the host waits for the device to read the counts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from vllm.distributed.parallel_state import GroupCoordinator
from vllm.logger import init_logger

logger = init_logger(__name__)

# A placement is left alone until the fullest rank's load is this share above what another one would give.
_WORTH_MOVING = 1.05
# Bytes that a rank sends at a time: experts move in pieces, so that no memory is needed for whole ones.
_PIECE = 4 << 20


class BalancedLayer(Protocol):
    """What a layer of experts has for this. ``owners``: each rank's experts, in the order of their places in memory.
    ``expert_load``: int64 [E + 1], tokens an expert, where they are counted; the last counts what is no token."""

    layer_name: str
    owners: list[list[int]]
    expert_load: torch.Tensor | None

    def place(self, owners: list[list[int]]) -> None: ...

    def bytes_of(self, place: int) -> list[torch.Tensor]:
        """The memory of the expert in this rank's ``place``, as flat uint8 views, alike for every place and rank."""


def first_placement(num_experts: int, num_ranks: int) -> list[list[int]]:
    """Runs of neighbouring experts; the first ranks have one more where they cannot be divided evenly."""
    each, more = divmod(num_experts, num_ranks)
    starts = [rank * each + min(rank, more) for rank in range(num_ranks + 1)]
    return [list(range(starts[rank], starts[rank + 1])) for rank in range(num_ranks)]


def imbalance(load: Sequence[int], owners: Sequence[Sequence[int]]) -> float:
    """The fullest rank's load as a multiple of the mean; 1 where there is none."""
    loads = [sum(load[expert] for expert in of) for of in owners]
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def balance(load: Sequence[int], owners: Sequence[Sequence[int]]) -> list[list[int]]:
    """Another placement with as many experts a rank, or the same where it would not be worth it.

    The largest loads first, each to the least loaded rank that has room, to its present one among equals (Graham 1969,
    SIAM J. Appl. Math. 17, 416). Experts that stay keep their places.
    """
    home = {expert: rank for rank, of in enumerate(owners) for expert in of}
    room, carries = [len(of) for of in owners], [0] * len(owners)
    chosen: dict[int, int] = {}
    for expert in sorted(home, key=lambda expert: (-load[expert], expert)):
        free = [rank for rank in range(len(owners)) if room[rank]]
        rank = min(free, key=lambda rank: (carries[rank], rank != home[expert], rank))
        chosen[expert], room[rank], carries[rank] = rank, room[rank] - 1, carries[rank] + load[expert]
    placed = []
    for rank, of in enumerate(owners):
        coming = iter(sorted(e for e, to in chosen.items() if to == rank and home[e] != rank))
        placed.append([expert if chosen[expert] == rank else next(coming) for expert in of])
    if imbalance(load, placed) * _WORTH_MOVING > imbalance(load, owners):
        return [list(of) for of in owners]
    return placed


def exchange(group: GroupCoordinator, layer: BalancedLayer, owners: list[list[int]]) -> int:
    """Move the experts of ``layer`` to their new ``owners``; how many moved. Every rank of ``group`` calls it."""
    before, me = layer.owners, group.rank_in_group
    changed = [
        [p for p, (a, b) in enumerate(zip(*of, strict=True)) if a != b] for of in zip(before, owners, strict=True)
    ]
    sizes = [len(places) for places in changed]
    sent_by = {before[rank][place]: (rank, i) for rank, places in enumerate(changed) for i, place in enumerate(places)}
    mine = [layer.bytes_of(place) for place in changed[me]]
    # Ranks that send nothing have the pieces of those that do: they are alike.
    pieces = [view.numel() for view in layer.bytes_of(0)] if before[me] else []
    everyones: list[list[int]] = group.all_gather_object(pieces)
    pieces = max(everyones, key=len)
    assert all(other in ([], pieces) for other in everyones), f"{layer.layer_name}: ranks hold experts as {everyones}"
    for part, size in enumerate(pieces):
        step = max(_PIECE // max(*sizes, 1), 1)
        for first in range(0, size, step):
            length = min(step, size - first)
            out = torch.empty(sizes[me], length, dtype=torch.uint8, device=group.device)
            for i, views in enumerate(mine):
                out[i] = views[part][first : first + length]
            got = group.all_gatherv(out, sizes=sizes)
            for i, place in enumerate(changed[me]):
                rank, index = sent_by[owners[me][place]]
                mine[i][part][first : first + length] = got[sum(sizes[:rank]) + index]
    layer.place(owners)
    return sum(sizes)


class ExpertLoadBalancer:
    """Balances ``layers``, all alike, over ``group`` every ``step_interval`` steps, by the loads since the last one."""

    def __init__(self, layers: Sequence[BalancedLayer], group: GroupCoordinator, step_interval: int) -> None:
        self.layers, self.group, self.step_interval = list(layers), group, step_interval
        for layer in self.layers:
            num_experts = sum(len(of) for of in layer.owners)
            layer.expert_load = torch.zeros(num_experts + 1, dtype=torch.int64, device=group.device)
        if self.layers:
            logger.info("experts at the start, of each layer: %s", describe(self.layers[0].owners))

    def before_step(self, step: int) -> bool:
        """Whether experts moved. ``step``: the number that all ranks agreed on; the first is 0."""
        if not self.layers or step == 0 or step % self.step_interval:
            return False
        moved_any = False
        counts = [layer.expert_load for layer in self.layers if layer.expert_load is not None]
        loads = self.group.cpu_all_reduce(torch.stack(counts).cpu(), "expert_load")
        for layer, count, load in zip(self.layers, counts, loads[:, :-1].tolist(), strict=True):
            count.zero_()
            owners = balance(load, layer.owners)
            if owners == layer.owners:
                continue
            was = imbalance(load, layer.owners)
            moved, moved_any = exchange(self.group, layer, owners), True
            level = logging.INFO if self.group.rank_in_group == 0 else logging.DEBUG
            logger.log(
                level,
                "step %d: %d experts of %s moved; the fullest rank had %.2f times the mean load, now %.2f: %s",
                step,
                moved,
                layer.layer_name,
                was,
                imbalance(load, owners),
                describe(owners),
            )
        return moved_any


def describe(owners: Sequence[Sequence[int]]) -> str:
    """``rank 0: 0-3 9; rank 1: none; …``."""
    return "; ".join(f"rank {rank}: {runs(of)}" for rank, of in enumerate(owners))


def runs(numbers: Sequence[int]) -> str:
    """``0-3 9``, or ``none``."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in found) or "none"
