# SPDX-License-Identifier: Apache-2.0
"""Tokens to experts and back: ``dispatch`` → experts → ``combine``, right for every TP × DP × EP layout.

A MoE layer calls both in every layout and has no branch of its own. After attention all TP ranks of a DP group hold
the same rows; EP rank ``dp_rank * tp_size + tp_rank`` computes its own experts (or, without expert parallelism, its
slice of every expert) for the rows it receives, and partial outputs are summed over the ranks:

| layout | dispatch | combine |
|---|---|---|
| one rank, or EP off and TP 1 | nothing | nothing |
| EP off, or DP 1 | nothing | all-reduce over TP |
| EP and DP, TP 1 | gather over EP | reduce-scatter over EP |
| EP and DP, TP > 1, few bytes | gather over DP | reduce-scatter over EP, each row to all its TP ranks |
| EP and DP, TP > 1, many bytes | gather over EP, ``1/tp`` of the rows each | reduce-scatter over EP, gather over TP |

The gather carries hidden states, ids and weights as bytes in one collective, and no rank receives a row twice. Few
bytes cost what a collective costs at all, so there are only two; many bytes (sequence parallel) move each partial sum
to one rank only and then share the finished rows. The choice follows from the agreed counts, so all ranks make it
alike, and with ``ordered_sums`` it changes no bit of the result.

Sums run in the dtype of the experts' output; with ``ordered_sums`` 16-bit outputs are added in fp32 in EP rank order
and rounded once.

Shape suffixes: N rows of this DP rank, S rows of this rank's slice, R rows received, H hidden, K experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm import forward_context

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator

# Bytes of all DP ranks' hidden states from which the sequence-parallel exchange is the faster one: TP 2 x DP 2 on Gloo
# breaks even at about this size, and the other one saves a third of the time at a few rows.
SEQUENCE_PARALLEL_BYTES = 1 << 20


@dataclass(frozen=True)
class DispatchRoute:
    """How the rows travelled, for the way back.

    Attributes:
        sizes: rows from each rank of the gather's group, in rank order; None where nothing was gathered.
        is_sequence_parallel: gathered in slices over EP, not in wholes over DP.
        num_tokens_padded: N, the rows that ``combine`` returns.
        first_row: where this DP rank's rows begin among the R.
    """

    sizes: tuple[int, ...] | None
    is_sequence_parallel: bool
    num_tokens_padded: int
    first_row: int


@dataclass(frozen=True)
class DispatchedTokens:
    """What the experts of this rank compute on, and the route by which ``combine`` sends results back.

    Attributes:
        hidden_states: ``[R, H]``.
        topk_weights, topk_ids: ``[R, K]``; padding rows have id -1 and weight 0.
    """

    hidden_states: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    route: DispatchRoute


class AgRsAll2AllManager:
    """All-gather dispatch and reduce-scatter combine over the EP group.

    Args:
        ep, dp, tp: this rank's groups; ``ep`` of one rank means that expert parallelism is off.
        barrier: a barrier on the device group before each of the two collectives, so that a rank that is late at
            routing is waited for in it and not inside the collective (the XPU policy). The devices wait, not the hosts.
        sequence_parallel_bytes: see the module's text.
    """

    def __init__(
        self,
        ep: GroupCoordinator,
        dp: GroupCoordinator,
        tp: GroupCoordinator,
        *,
        barrier: bool = False,
        sequence_parallel_bytes: int = SEQUENCE_PARALLEL_BYTES,
    ) -> None:
        self.ep, self.dp, self.tp = ep, dp, tp
        self.barrier = barrier
        self.sequence_parallel_bytes = sequence_parallel_bytes
        self.exchanges_tokens = ep.world_size > 1 and dp.world_size > 1
        if self.exchanges_tokens:
            assert ep.world_size == dp.world_size * tp.world_size, (
                f"EP size {ep.world_size} is not DP {dp.world_size} x TP {tp.world_size}"
            )
            assert ep.rank_in_group == dp.rank_in_group * tp.world_size + tp.rank_in_group, (
                f"EP rank {ep.rank_in_group} is not DP rank {dp.rank_in_group} x TP size {tp.world_size} + TP rank "
                f"{tp.rank_in_group}"
            )

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_tokens_across_dp: Sequence[int] | None = None,
    ) -> DispatchedTokens:
        """Send each row to all ranks, with its routing.

        Args:
            hidden_states: ``[N, H]``, any dtype; the same on all TP ranks of the DP group.
            topk_weights: ``[N, K]``.
            topk_ids: ``[N, K]`` global expert ids, int32 or int64; -1 on padding rows, weight 0 there.
            num_tokens_across_dp: N of every DP rank, agreed for this step; None reads the forward context's.
        """
        (hidden, weights, ids), route = self._gather(
            (hidden_states, topk_weights, topk_ids), (0, 0, -1), num_tokens_across_dp
        )
        return DispatchedTokens(hidden, weights, ids, route)

    def combine(
        self, expert_output: torch.Tensor, dispatched: DispatchedTokens, tp_partial: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sum the ranks' partial outputs and return this DP rank's rows.

        Args:
            expert_output: ``[R, H]``, this rank's experts' share; exactly 0 in padding rows. Takes in ``tp_partial``.
            dispatched: the record of the dispatch.
            tp_partial: ``[N, H]``, a term that is itself partial over the TP ranks (a shared expert cut over TP); it
                rides in the same sum and costs no collective.

        Returns:
            ``[N, H]``, the same on all TP ranks of the DP group.
        """
        assert expert_output.shape[0] == dispatched.hidden_states.shape[0], (
            f"{expert_output.shape[0]} output rows for {dispatched.hidden_states.shape[0]} dispatched rows"
        )
        route = dispatched.route
        if tp_partial is not None:
            expert_output[route.first_row : route.first_row + route.num_tokens_padded].add_(tp_partial)
        if route.sizes is None:
            return self.tp.all_reduce(expert_output)
        if self.barrier:
            self.ep.queue_barrier()
        if route.is_sequence_parallel:
            own_S = self.ep.reduce_scatterv(expert_output, 0, route.sizes)
            return self.tp.all_gather(own_S, 0)[: route.num_tokens_padded]
        copies = self.tp.world_size
        to_each_tp_rank = [rows for rows in expert_output.split(list(route.sizes)) for _ in range(copies)]
        sizes = [size for size in route.sizes for _ in range(copies)]
        return self.ep.reduce_scatterv(torch.cat(to_each_tp_rank), 0, sizes)

    def _gather(
        self,
        tensors: tuple[torch.Tensor, ...],
        pad_values: tuple[int | bool, ...],
        num_tokens_across_dp: Sequence[int] | None,
    ) -> tuple[Sequence[torch.Tensor], DispatchRoute]:
        """The rows of all DP ranks in one collective; a slice that is short of rows is padded with ``pad_values``."""
        rows = tensors[0].shape[0]
        if not self.exchanges_tokens:
            return tensors, DispatchRoute(None, False, rows, 0)
        if num_tokens_across_dp is None:
            metadata = forward_context.get_forward_context().dp_metadata
            assert metadata is not None, "DP with expert parallelism needs dp_metadata in the forward context"
            num_tokens_across_dp = metadata.num_tokens_across_dp
        assert num_tokens_across_dp[self.dp.rank_in_group] == rows, (
            f"DP rank {self.dp.rank_in_group} dispatches {rows} rows but agreed on {list(num_tokens_across_dp)}"
        )
        hidden_bytes = tensors[0].shape[1] * tensors[0].element_size()
        sequence_parallel = (
            self.tp.world_size == 1 or sum(num_tokens_across_dp) * hidden_bytes >= self.sequence_parallel_bytes
        )
        group = self.ep if sequence_parallel else self.dp
        if sequence_parallel:
            sizes = forward_context.sp_local_sizes(num_tokens_across_dp, self.tp.world_size)
            chunk = sizes[self.ep.rank_in_group]
            begin = min(self.tp.rank_in_group * chunk, rows)
            end = min(begin + chunk, rows)
            tensors = tuple(
                _padded_slice(x, begin, end, chunk, value) for x, value in zip(tensors, pad_values, strict=True)
            )
            first_row = sum(sizes[: self.dp.rank_in_group * self.tp.world_size])
        else:
            sizes = tuple(num_tokens_across_dp)
            first_row = sum(sizes[: self.dp.rank_in_group])
        if self.barrier:
            group.queue_barrier()
        gathered = group.all_gatherv(list(tensors), 0, sizes)
        return gathered, DispatchRoute(sizes, sequence_parallel, rows, first_row)


def _padded_slice(x: torch.Tensor, begin: int, end: int, rows: int, value: int | bool) -> torch.Tensor:
    """``x[begin:end]``, extended to ``rows`` rows of ``value``."""
    if end - begin == rows:
        return x[begin:end]
    out = x.new_full((rows, *x.shape[1:]), value)
    out[: end - begin] = x[begin:end]
    return out
