# SPDX-License-Identifier: Apache-2.0
"""Collectives of one group over one torch backend.

Every operation leaves its input bit-unchanged, takes any strides, and is one collective whatever it is given: a
list of tensors travels as bytes in one gather, ragged sizes included. Where a backend has no sound uneven form the
rows are padded with zeros on the way and dropped after. Over Gloo what is on a device goes by way of the host, so that
ranks can share one. With ``ordered_sums`` every sum is taken in rank order, in
fp32 for 16-bit floats, so a row's result does not depend on where in the batch it stands; otherwise order and
intermediate precision are the backend's.

A captured step is cut where one of them is: they are called in its replays (``_collective``).

Shape suffixes: W ranks of the group, N own rows, R rows of all ranks, M largest own rows, B bytes of a row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from vllm.compilation.recording import outside
from vllm.distributed.observer import UNIFORM, VARIABLE, mark_queued, record_collective, wait_for
from vllm.v1.transfers import is_host

_F = TypeVar("_F", bound=Callable[..., Any])
# The into-tensor collectives carry new names from torch 2.13 on; the old ones warn there.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# From this many bytes on, an ordered all-reduce costs less as reduce-scatter + gather than as gather + sum (measured on
# 4 Gloo ranks).
_TWO_PHASE_BYTES = 384 * 1024


def _rows_as_bytes(x: torch.Tensor) -> torch.Tensor:
    """``[N, ...]`` of any dtype and strides → uint8 ``[N, B]``; B is the width of one row, also when N is 0."""
    width = math.prod(x.shape[1:]) * x.element_size()
    return x.contiguous().view(-1).view(torch.uint8).view(x.shape[0], width)


def _bytes_as_rows(x_RB: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse: uint8 ``[R, B]`` → ``[R, *like.shape[1:]]`` of ``like``'s dtype."""
    # A fresh buffer starts at an address that suits every dtype; a column slice of a wider one need not.
    flat = x_RB.clone(memory_format=torch.contiguous_format) if x_RB.storage_offset() else x_RB.contiguous()
    return flat.view(-1).view(like.dtype).view(x_RB.shape[0], *like.shape[1:])


def _collective(method: _F) -> _F:
    """Marks the methods that cut a captured step in two, unless the group has one rank."""
    between = outside(method)

    @functools.wraps(method)
    def call(self: DeviceCommunicatorBase, *args: Any, **kwargs: Any) -> Any:
        return (method if self.world_size == 1 else between)(self, *args, **kwargs)

    return cast(_F, call)


class DeviceCommunicatorBase:
    """One group's collectives; a group of one rank is served without any process group.

    Args:
        cpu_group: Gloo twin of the group; None in a group of one.
        device: where tensors live.
        device_group: the device backend's process group; None in a group of one.
        unique_name: ``kind:index``, as the ledger names the group.
        ranks, rank: global ranks of the group in group order, and this process's.
        ordered_sums: sums in rank order (see the module's text); None takes the class's default.
    """

    ordered_sums: bool = False
    barrier_takes_device: bool = True
    ragged_by_exchange: bool = False
    """Ragged gathers by ``all_to_all_single`` instead of zero padding."""

    def __init__(
        self,
        cpu_group: ProcessGroup | None,
        device: torch.device | None = None,
        device_group: ProcessGroup | None = None,
        unique_name: str = "",
        ranks: Sequence[int] | None = None,
        rank: int | None = None,
        *,
        ordered_sums: bool | None = None,
    ) -> None:
        self.device = device or torch.device("cpu")
        self.cpu_group = cpu_group
        self.device_group = device_group
        self.unique_name = unique_name
        if cpu_group is None:
            self.global_rank = rank or 0
            self.ranks: tuple[int, ...] = (self.global_rank,)
        else:
            self.global_rank = dist.get_rank() if rank is None else rank
            self.ranks = tuple(dist.get_process_group_ranks(cpu_group) if ranks is None else ranks)
        self.world_size = len(self.ranks)
        self.rank_in_group = self.ranks.index(self.global_rank)
        if ordered_sums is not None:
            self.ordered_sums = ordered_sums
        self.by_way_of_host = (
            not is_host(self.device) and device_group is not None and dist.get_backend(device_group) == "gloo"
        )
        if self.by_way_of_host:
            self.barrier_takes_device = False

    # -- helpers

    def _recorded(
        self,
        op: str,
        tensors: Sequence[torch.Tensor],
        sizes: Sequence[int] | None = None,
        path: str = UNIFORM,
    ) -> record_collective:
        return record_collective(op, self.unique_name, self.ranks, self.global_rank, tensors, path=path, sizes=sizes)

    def _run(self, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Run a collective of torch.distributed on the device group, its first tensor taking the result; a wait of the
        host can be given up."""
        if self.by_way_of_host:
            self._run_on_host(collective, *args, **kwargs)
        elif is_host(self.device):
            wait_for(collective(*args, **kwargs, group=self.device_group, async_op=True), self.device_group)
        else:
            collective(*args, **kwargs, group=self.device_group)
            mark_queued(self.device)

    def _run_on_host(self, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """With host copies in the tensors' places: copies to and from pageable memory wait for the device."""
        host = [x.to("cpu", copy=True) if isinstance(x, torch.Tensor) else x for x in args]
        wait_for(collective(*host, **kwargs, group=self.device_group, async_op=True), self.device_group)
        if host:
            args[0].copy_(host[0])

    def _check_sizes(self, sizes: Sequence[int] | None, rows: int, *, is_total: bool) -> tuple[list[int], bool]:
        """The rows of each rank, and whether all are equal. ``rows``: own rows, or (``is_total``) of all ranks."""
        if sizes is None:
            assert not is_total or rows % self.world_size == 0, (
                f"{rows} rows do not split over {self.world_size} ranks of {self.unique_name}; pass sizes"
            )
            return [rows // self.world_size if is_total else rows] * self.world_size, True
        where = f"{self.unique_name}, rank {self.rank_in_group} of {self.world_size}"
        assert len(sizes) == self.world_size, f"{where}: {len(sizes)} sizes {list(sizes)}"
        own = sum(sizes) if is_total else sizes[self.rank_in_group]
        assert rows == own, f"{where}: {rows} rows, but sizes {list(sizes)} say {own}"
        return list(sizes), all(size == sizes[0] for size in sizes)

    def _gather_bytes(self, x_NB: torch.Tensor, sizes: list[int], uniform: bool) -> torch.Tensor:
        """uint8 ``[N, B]`` → ``[R, B]`` in rank order, with one backend collective."""
        width = x_NB.shape[1]
        if uniform:
            out_RB = x_NB.new_empty((sum(sizes), width))
            self._run(_all_gather_single, out_RB.view(-1), x_NB.reshape(-1))
            return out_RB
        if self.ragged_by_exchange:
            out_RB = x_NB.new_empty((sum(sizes), width))
            own = x_NB.shape[0]
            self._run(dist.all_to_all_single, out_RB, x_NB.repeat(self.world_size, 1), sizes, [own] * self.world_size)
            return out_RB
        largest = max(sizes)
        padded_MB = x_NB.new_zeros((largest, width))
        padded_MB[: x_NB.shape[0]] = x_NB
        out_WMB = x_NB.new_empty((self.world_size, largest, width))
        self._run(_all_gather_single, out_WMB.view(-1), padded_MB.view(-1))
        return torch.cat([out_MB[:size] for out_MB, size in zip(out_WMB, sizes, strict=True)])

    def _exchange_and_sum(self, x_R: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """``[R, ...]`` contiguous → the own ``[N, ...]``, summed in rank order."""
        own = sizes[self.rank_in_group]
        parts = x_R.new_empty((self.world_size * own, *x_R.shape[1:]))
        self._run(dist.all_to_all_single, _rows_as_bytes(parts), _rows_as_bytes(x_R), [own] * self.world_size, sizes)
        return self._ordered_sum(parts.view(self.world_size, own, *x_R.shape[1:]))

    @staticmethod
    def _ordered_sum(parts_W: torch.Tensor) -> torch.Tensor:
        """``[W, ...]`` → ``[...]``: ((p0 + p1) + p2) + …, 16-bit floats in fp32 and rounded once."""
        half = parts_W.dtype in (torch.bfloat16, torch.float16)
        total = parts_W[0].to(torch.float32) if half else parts_W[0].clone()
        for part in parts_W[1:]:
            total += part
        return total.to(parts_W.dtype)

    # -- collectives

    @_collective
    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Sum over the group, same shape and dtype; a new tensor (the input itself in a group of one)."""
        if self.world_size == 1 or input_.numel() == 0:
            return input_
        with self._recorded("all_reduce", [input_]):
            # Of two terms there is one order and one rounding, so the backend's own sum is the ordered one.
            if not self.ordered_sums or self.world_size == 2:
                output = input_.clone(memory_format=torch.contiguous_format)
                self._run(dist.all_reduce, output)
                return output
            flat = input_.contiguous().view(-1)
            if flat.numel() * flat.element_size() < _TWO_PHASE_BYTES:
                gathered = self._gather_bytes(_rows_as_bytes(flat), [flat.numel()] * self.world_size, True)
                parts_W = gathered.view(-1).view(flat.dtype).view(self.world_size, -1)
                return self._ordered_sum(parts_W).view(input_.shape)
            base, extra = divmod(flat.numel(), self.world_size)
            sizes = [base + (rank < extra) for rank in range(self.world_size)]
            own = self._exchange_and_sum(flat, sizes)
            summed = self._gather_bytes(_rows_as_bytes(own), sizes, extra == 0)
            return summed.view(-1).view(flat.dtype).view(input_.shape)

    @_collective
    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Equal shapes on all ranks, concatenated along ``dim`` in rank order."""
        return self._gather("all_gather", [input_], dim, None)[0]

    @_collective
    def all_gatherv(
        self, input_: torch.Tensor | Sequence[torch.Tensor], dim: int = 0, sizes: Sequence[int] | None = None
    ) -> torch.Tensor | list[torch.Tensor]:
        """Concatenate all ranks' rows along ``dim`` in rank order.

        Args:
            input_: a tensor, or several of any dtypes that share their extent along ``dim``; a list costs one
                collective and gives a list.
            sizes: extent of each rank along ``dim``, the same list on all ranks; None when all are equal.
        """
        if isinstance(input_, torch.Tensor):
            return self._gather("all_gatherv", [input_], dim, sizes)[0]
        return self._gather("all_gatherv", list(input_), dim, sizes)

    def _gather(self, op: str, inputs: list[torch.Tensor], dim: int, sizes: Sequence[int] | None) -> list[torch.Tensor]:
        rows_first = [x.movedim(dim, 0) for x in inputs]
        rows = rows_first[0].shape[0]
        assert all(x.shape[0] == rows for x in rows_first), (
            f"{op} of {self.unique_name}: tensors must agree along dim {dim}: {[tuple(x.shape) for x in inputs]}"
        )
        size_list, uniform = self._check_sizes(sizes, rows, is_total=False)
        if self.world_size == 1:
            return inputs
        columns = [_rows_as_bytes(x) for x in rows_first]
        widths = [column.shape[1] for column in columns]
        x_NB = columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)
        if sum(size_list) * sum(widths) == 0:
            out_RB = x_NB.new_empty((sum(size_list), sum(widths)))
        else:
            with self._recorded(op, inputs, size_list, UNIFORM if uniform else VARIABLE):
                out_RB = self._gather_bytes(x_NB, size_list, uniform)
        return [
            _bytes_as_rows(part, x).movedim(0, dim)
            for part, x in zip(out_RB.split(widths, dim=1), rows_first, strict=True)
        ]

    @_collective
    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Sum over the group; rank r keeps the r-th of W equal parts along ``dim``."""
        return self._reduce_scatter("reduce_scatter", input_, dim, None)

    @_collective
    def reduce_scatterv(self, input_: torch.Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Sum over the group; rank r keeps its ``sizes[r]`` rows along ``dim`` (equal parts without ``sizes``).

        Args:
            input_: ``sum(sizes)`` rows along ``dim`` in rank order.
        """
        return self._reduce_scatter("reduce_scatterv", input_, dim, sizes)

    def _reduce_scatter(self, op: str, input_: torch.Tensor, dim: int, sizes: Sequence[int] | None) -> torch.Tensor:
        x_R = input_.movedim(dim, 0)
        size_list, uniform = self._check_sizes(sizes, x_R.shape[0], is_total=True)
        if self.world_size == 1:
            return input_
        own = size_list[self.rank_in_group]
        if x_R.numel() == 0:
            return x_R[:own].movedim(0, dim)
        x_R = x_R.contiguous()
        with self._recorded(op, [input_], size_list, UNIFORM if uniform else VARIABLE):
            if self.ordered_sums:
                return self._exchange_and_sum(x_R, size_list).movedim(0, dim)
            if not uniform:
                largest = max(size_list)
                padded = x_R.new_zeros((self.world_size, largest, *x_R.shape[1:]))
                for to, part in zip(padded, x_R.split(size_list), strict=True):
                    to[: part.shape[0]] = part
                x_R = padded.flatten(0, 1)
            output = x_R.new_empty((x_R.shape[0] // self.world_size, *x_R.shape[1:]))
            self._run(_reduce_scatter_single, output, x_R)
            return output[:own].movedim(0, dim)

    @_collective
    def broadcast(self, input_: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrite ``input_`` on every rank with that of group rank ``src``; returns it."""
        if self.world_size == 1 or input_.numel() == 0:
            return input_
        flat = input_.contiguous().view(-1)
        with self._recorded("broadcast", [input_]):
            self._run(dist.broadcast, flat.view(torch.uint8), src=self.ranks[src])
        if flat.data_ptr() != input_.data_ptr():
            input_.copy_(flat.view(input_.shape))
        return input_

    @functools.cached_property
    def _nothing(self) -> torch.Tensor:
        with torch.inference_mode(False):  # written in and out of it
            return torch.zeros(1, device=self.device)

    @_collective
    def queue_barrier(self) -> None:
        """What this rank queues on its device after this begins once all ranks' devices have come this far.

        A sum of one zero, of which no rank has its result before each has given its own: what a barrier is to XCCL and
        NCCL as well, without the host's wait for it. Where host and device are one, the host waits.
        """
        if self.world_size > 1:
            with self._recorded("barrier", ()):
                self._run(dist.all_reduce, self._nothing)

    @_collective
    def barrier(self) -> None:
        """Wait until every rank of the group is here, device work included where the backend runs on the device."""
        if self.world_size == 1:
            return
        # Without device_ids the accelerators' backends guess an index from the global rank, which can hang.
        device_ids = [self.device.index or 0] if self.barrier_takes_device else None
        with self._recorded("barrier", ()):
            self._run(dist.barrier, device_ids=device_ids)
