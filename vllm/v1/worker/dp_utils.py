# SPDX-License-Identifier: Apache-2.0
"""One agreement a step over the DP ranks: who has work, how many rows each runs, in which graph mode.

It cannot meet a collective of the step before, which devices may still run: it is made by the hosts, on the groups' CPU
twins, and nothing of a device is ever on these. Each rank's one host thread agrees on steps in their order, and
launches the work of each, the devices' collectives in it, before it agrees on the next: so these, too, are in the order
of steps on every rank. A rank that waits for its device waits for launched steps only, which all ranks have agreed on,
and never inside an agreement; so an agreement waits for hosts, a device for devices, and neither for the other. That
the ranks are in one step is not taken for granted: votes carry its number.

``agree`` is pure; ``coordinate_batch_across_dp`` feeds it from one int32 reduction over the DP group's CPU twin. The
TP ranks of a DP group hold the same requests and so reach the same agreement through their own DP groups. That they
do is checked: they compare their votes first, in a reduction over the TP group, and each brings the result to its DP
group, so that all ranks of the world learn of it in the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from vllm.distributed.parallel_state import GroupCoordinator, get_dp_group, get_tp_group
from vllm.platforms import ParallelPolicies

# A vote, and an agreement, to capture steps anew before this one, which runs eagerly.
CAPTURE = -1


class LockstepError(RuntimeError):
    """The ranks are not in the same step, or TP ranks were given different work; raised on every rank."""


class DPVote(NamedTuple):
    """What one DP rank brings to the agreement, as int32 columns.

    Attributes:
        num_tokens_unpadded: tokens scheduled on this rank; 0 when it is idle or could schedule nothing.
        num_tokens_padded: rows that it needs at least, before graph sizes and DP padding.
        cudagraph_mode: the highest mode that it could run; an idle rank votes the highest that it has. ``CAPTURE``
            where its captured steps are stale, and no request of its has anything in the caches.
        has_unfinished: 1 while it holds requests that are not finished.
        step: the step that it is in.
        pad_to_max: 1 where its policy pads every rank to the largest count.
        stopping: 1 where it votes to leave for good.
        work: digest of what it runs, the same on all TP ranks of the DP group; below 2^31.
        tp_differs: 1 where the TP ranks of its DP group voted differently.
    """

    num_tokens_unpadded: int
    num_tokens_padded: int
    cudagraph_mode: int
    has_unfinished: int
    step: int
    pad_to_max: int
    stopping: int = 0
    work: int = 0
    tp_differs: int = 0


class DPAgreement(NamedTuple):
    """What all DP ranks decided for this step; identical on all of them but for ``dp_rank``.

    Attributes:
        num_tokens_unpadded_across_dp: real tokens of each rank.
        num_tokens_padded_across_dp: rows that each rank runs. At least 1 on every rank where any has tokens, so that
            idle ranks run a dummy; all 0 where none has, and then nobody runs.
        cudagraph_mode: the minimum over the ranks; ``CAPTURE`` where all of them vote so, and NONE where some do.
        any_unfinished: whether any rank still holds requests; all stop in the same step.
        all_stopping: whether all vote to leave.
    """

    num_tokens_unpadded_across_dp: tuple[int, ...]
    num_tokens_padded_across_dp: tuple[int, ...]
    cudagraph_mode: int
    any_unfinished: bool
    step: int
    dp_rank: int
    all_stopping: bool = False

    @property
    def should_run(self) -> bool:
        return self.num_tokens_padded > 0

    @property
    def num_tokens_unpadded(self) -> int:
        return self.num_tokens_unpadded_across_dp[self.dp_rank]

    @property
    def num_tokens_padded(self) -> int:
        return self.num_tokens_padded_across_dp[self.dp_rank]

    @property
    def is_dummy(self) -> bool:
        """This rank runs padding rows only."""
        return self.should_run and self.num_tokens_unpadded == 0


def pads_to_max(policies: ParallelPolicies, enable_expert_parallel: bool, dp_size: int) -> bool:
    """Whether every DP rank runs the largest count, graph mode or not: the policy, where ranks exchange tokens."""
    return policies.pad_dp_to_max and enable_expert_parallel and dp_size > 1


_SPLIT = (
    "the TP ranks of a DP group must get the same prompts and sampling parameters in the same order: split prompts by "
    "dp_rank (RANK // tensor_parallel_size), not by RANK"
)


def common_mode(votes: Iterable[int]) -> int:
    """What all run where each can run ``votes``; see ``DPAgreement.cudagraph_mode``."""
    modes = set(votes)
    return CAPTURE if modes == {CAPTURE} else max(min(modes), 0)


def agree(votes: Sequence[DPVote], dp_rank: int, bucket: Callable[[int], int] | None = None) -> DPAgreement:
    """The agreement that follows from all ranks' votes.

    Args:
        votes: of every DP rank, in rank order.
        dp_rank: this rank.
        bucket: rows → the captured size that holds them. Used when the agreed mode is a graph mode: then all ranks
            run ``bucket(largest)`` rows, so that all of them replay one graph.

    Raises:
        LockstepError: the votes come from different steps or policies, or from TP ranks that differ.
    """
    unpadded, wanted, modes, unfinished, steps, pads_to_max, stopping, _, tp_differs = zip(*votes, strict=True)
    if any(tp_differs):
        apart = [rank for rank, differs in enumerate(tp_differs) if differs]
        raise LockstepError(f"in step {steps[dp_rank]} the TP ranks of DP group {apart} do not agree; {_SPLIT}")
    if len(set(steps)) > 1:
        latest = max(steps)
        behind = {rank: step for rank, step in enumerate(steps) if step != latest}
        raise LockstepError(
            f"DP ranks are in different steps: {list(steps)} by DP rank; behind step {latest}: {behind} (DP rank: "
            "step). A rank skipped a step or ran one too many"
        )
    if len(set(pads_to_max)) > 1:
        raise LockstepError(
            f"DP ranks have different padding policies: {list(pads_to_max)} by DP rank; set VLLM_DP_PAD_TO_MAX and "
            "VLLM_POLICIES alike on all ranks"
        )
    mode, most = common_mode(modes), max(*wanted, 1)
    if not any(unpadded):
        padded = (0,) * len(votes)
    elif mode > 0 and bucket is not None:
        padded = (_captured_size(bucket, most),) * len(votes)
    elif mode > 0 or pads_to_max[0]:
        padded = (most,) * len(votes)
    else:
        padded = tuple(max(num_tokens, 1) for num_tokens in wanted)
    any_unfinished, all_stopping = any(unfinished), all(stopping)
    return DPAgreement(unpadded, padded, mode, any_unfinished, steps[0], dp_rank, all_stopping)


def agree_alone(
    num_tokens_unpadded: int,
    num_tokens_padded: int,
    cudagraph_mode: int,
    has_unfinished: bool,
    step: int,
    stopping: bool,
    bucket: Callable[[int], int] | None,
) -> DPAgreement:
    """``agree`` on the vote of the only rank; see there and :class:`DPVote`."""
    rows = num_tokens_padded
    if not num_tokens_unpadded:
        rows = 0
    elif cudagraph_mode > 0 and bucket is not None:
        rows = _captured_size(bucket, rows)
    return DPAgreement((num_tokens_unpadded,), (rows,), cudagraph_mode, has_unfinished, step, 0, stopping)


def _captured_size(bucket: Callable[[int], int], rows: int) -> int:
    size = bucket(rows)
    assert size >= rows, f"captured size {size} does not hold {rows} rows"
    return size


def coordinate_batch_across_dp(
    num_tokens_unpadded: int,
    *,
    step: int,
    has_unfinished: bool,
    num_tokens_padded: int | None = None,
    cudagraph_mode: int = 0,
    pad_to_max: bool = False,
    stopping: bool = False,
    bucket: Callable[[int], int] | None = None,
    work: int = 0,
    dp_group: GroupCoordinator | None = None,
    tp_group: GroupCoordinator | None = None,
) -> DPAgreement:
    """Agree on this step with the other ranks; every rank must call it in every step, whatever it holds.

    Args:
        num_tokens_unpadded: tokens that this rank scheduled, 0 when idle.
        step: number of the step, counted alike on all ranks.
        has_unfinished: this rank still holds requests.
        num_tokens_padded: rows that this rank needs at least; None means as many as it has tokens.
        cudagraph_mode: see :class:`DPVote`.
        pad_to_max: see :func:`pads_to_max`.
        stopping: this rank votes to leave.
        bucket: see :func:`agree`.
        work: see :class:`DPVote`.
        dp_group, tp_group: None takes the DP and the TP group. A group of one costs no collective.

    Raises :class:`LockstepError` on every rank.
    """
    group, tp = dp_group or get_dp_group(), tp_group or get_tp_group()
    if num_tokens_padded is None:
        num_tokens_padded = num_tokens_unpadded
    assert num_tokens_padded >= num_tokens_unpadded >= 0, f"{num_tokens_padded} rows for {num_tokens_unpadded} tokens"
    if group.world_size == tp.world_size == 1:
        return agree_alone(
            num_tokens_unpadded, num_tokens_padded, cudagraph_mode, has_unfinished, step, stopping, bucket
        )
    own = DPVote(
        num_tokens_unpadded,
        num_tokens_padded,
        int(cudagraph_mode),
        int(has_unfinished),
        step,
        int(pad_to_max),
        int(stopping),
        work,
    )
    if tp.world_size > 1:
        of_tp = _collect(own, tp, "compare_work_across_tp")
        # One of them may have to run eagerly, though the work is the same.
        common = common_mode(vote.cudagraph_mode for vote in of_tp)
        of_tp = [vote._replace(cudagraph_mode=common) for vote in of_tp]
        own = of_tp[tp.rank_in_group]._replace(tp_differs=int(len(set(of_tp)) > 1))
    of_dp = _collect(own, group, "coordinate_batch_across_dp")
    if own.tp_differs:
        shown = ", ".join(
            f"rank {rank} {vote.num_tokens_unpadded} tokens in step {vote.step} (work {vote.work:08x})"
            for rank, vote in zip(tp.ranks, of_tp, strict=True)
        )
        raise LockstepError(
            f"the TP ranks of DP group {group.rank_in_group} were given different work: {shown}; {_SPLIT}"
        )
    return agree(of_dp, group.rank_in_group, bucket)


def _collect(own: DPVote, group: GroupCoordinator, op: str) -> list[DPVote]:
    """The votes of the group's ranks, in rank order, by one reduction."""
    if group.world_size == 1:
        return [own]
    table = torch.zeros((group.world_size, len(own)), dtype=torch.int32)
    table[group.rank_in_group] = torch.tensor(own, dtype=torch.int32)
    group.cpu_all_reduce(table, op)
    return [DPVote(*row) for row in table.tolist()]
