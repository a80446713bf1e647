# SPDX-License-Identifier: Apache-2.0
"""The groups of ranks: world, TP, DP and EP, each with a CPU (Gloo) twin.

RANK → dp_rank = RANK // tp_size, tp_rank = RANK % tp_size, ep_rank = RANK: with TP 2 and DP 2 the TP groups are
{0, 1}, {2, 3}, the DP groups {0, 2}, {1, 3} and the EP group is all four. A single process needs neither torchrun nor
a process group: every group has one rank and every collective is the identity.

A launcher may start several replicas of TP x DP ranks each. Then all of the above is within a replica, the world group
included: replicas meet once, when they make their first engine, and after that only share the host.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from vllm import envs, launchers, platforms
from vllm.distributed import observer
from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager, DispatchedTokens
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator
from vllm.distributed.device_communicators.xpu_communicator import XpuCommunicator
from vllm.distributed.launch_round import enter_round, is_kept_over_rounds
from vllm.distributed.observer import record_collective, wait_for
from vllm.logger import init_logger
from vllm.platforms import Platform

logger = init_logger(__name__)


# Ranks may come to the rendezvous this far apart: they import and look for devices before it.
_RENDEZVOUS_S = 120.0
# A rank that leaves has sent all that its peers still need, so this is only for what lies in the network's queues.
_FAREWELL_S = 5.0


def collective_timeout() -> timedelta:
    """The backends' own deadline of every collective of every group (``VLLM_COLLECTIVE_TIMEOUT_S``).

    Waiting for a slow peer is no failure, so this is only for runs that nothing watches: the watchdog ends a dead run
    within seconds and a silent one after ``VLLM_STALL_TIMEOUT_S``. Gloo counts from the call, NCCL and XCCL from the
    moment of queueing, which may be much earlier.
    """
    return timedelta(seconds=envs.VLLM_COLLECTIVE_TIMEOUT_S)


class GroupCoordinator:
    """One group as this process sees it.

    Attributes:
        unique_name: ``kind:index``, e.g. ``dp:1`` for the second DP group.
        ranks: global ranks in group order.
        rank, rank_in_group, world_size: this process's global rank, its place in the group, the group's size.
        device: where this process's tensors live.
        device_group, cpu_group: process groups of the device backend and of Gloo; None in a group of one.
        device_communicator: the collectives.
    """

    def __init__(
        self,
        unique_name: str,
        ranks: Sequence[int],
        rank: int,
        device: torch.device,
        device_group: ProcessGroup | None,
        cpu_group: ProcessGroup | None,
        device_communicator: DeviceCommunicatorBase,
    ) -> None:
        self.unique_name = unique_name
        self.ranks = list(ranks)
        self.rank = rank
        self.rank_in_group = self.ranks.index(rank)
        self.world_size = len(self.ranks)
        self.device = device
        self.device_group = device_group
        self.cpu_group = cpu_group
        self.device_communicator = device_communicator
        self.cpu_name = unique_name  # of the twin, where it is in collectives while the device group is
        self.all2all_manager: AgRsAll2AllManager | None = None

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        return self.device_communicator.all_reduce(input_)

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return self.device_communicator.all_gather(input_, dim)

    def all_gatherv(
        self, input_: torch.Tensor | Sequence[torch.Tensor], dim: int = 0, sizes: Sequence[int] | None = None
    ) -> Any:
        """A tensor for a tensor, a list for a list; see the communicator."""
        return self.device_communicator.all_gatherv(input_, dim, sizes)

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return self.device_communicator.reduce_scatter(input_, dim)

    def reduce_scatterv(self, input_: torch.Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> torch.Tensor:
        return self.device_communicator.reduce_scatterv(input_, dim, sizes)

    def broadcast(self, input_: torch.Tensor, src: int = 0) -> torch.Tensor:
        """From group rank ``src``."""
        return self.device_communicator.broadcast(input_, src)

    def barrier(self) -> None:
        """On the device group."""
        self.device_communicator.barrier()

    def queue_barrier(self) -> None:
        """On the device group, without a wait of the host for the device."""
        self.device_communicator.queue_barrier()

    def cpu_all_reduce(self, input_: torch.Tensor, op: str = "cpu_all_reduce") -> torch.Tensor:
        """Sum a host tensor over the CPU twin, in place; returns it. ``op`` names it in the ledger."""
        if self.world_size > 1:
            with record_collective(op, self.cpu_name, self.ranks, self.rank, [input_]):
                wait_for(dist.all_reduce(input_, group=self.cpu_group, async_op=True), self.cpu_group)
        return input_

    def cpu_broadcast(self, input_: torch.Tensor, op: str = "cpu_broadcast") -> torch.Tensor:
        """A host tensor of the group's first rank over the CPU twin, in place; returns it."""
        if self.world_size > 1:
            with record_collective(op, self.cpu_name, self.ranks, self.rank, [input_]):
                work = dist.broadcast(input_, src=self.ranks[0], group=self.cpu_group, async_op=True)
                wait_for(work, self.cpu_group)
        return input_

    def cpu_barrier(self) -> None:
        if self.world_size > 1:
            with record_collective("cpu_barrier", self.unique_name, self.ranks, self.rank):
                wait_for(dist.barrier(group=self.cpu_group, async_op=True), self.cpu_group)

    def wait_for_all(self, what: str, timeout_s: float) -> None:
        """Wait until every rank has come here, for phases that take ranks very different times (``what``: loading).

        Gives up after ``timeout_s``, naming who is missing.
        """
        if self.world_size > 1:
            with record_collective(what, self.unique_name, self.ranks, self.rank):
                dist.monitored_barrier(self.cpu_group, timedelta(seconds=timeout_s), wait_all_ranks=True)

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        """A picklable object from group rank ``src``, over the CPU twin."""
        if self.world_size == 1:
            return obj
        box = [obj]
        with record_collective("broadcast_object", self.unique_name, self.ranks, self.rank):
            dist.broadcast_object_list(box, src=self.ranks[src], group=self.cpu_group)
        return box[0]

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every rank's picklable object in rank order, over the CPU twin."""
        if self.world_size == 1:
            return [obj]
        box: list[Any] = [None] * self.world_size
        with record_collective("all_gather_object", self.unique_name, self.ranks, self.rank):
            dist.all_gather_object(box, obj, group=self.cpu_group)
        return box

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_tokens_across_dp: Sequence[int] | None = None,
    ) -> DispatchedTokens:
        """EP group only: see :class:`AgRsAll2AllManager`."""
        return self._manager().dispatch(hidden_states, topk_weights, topk_ids, num_tokens_across_dp)

    def combine(
        self, expert_output: torch.Tensor, dispatched: DispatchedTokens, tp_partial: torch.Tensor | None = None
    ) -> torch.Tensor:
        """EP group only: see :class:`AgRsAll2AllManager`."""
        return self._manager().combine(expert_output, dispatched, tp_partial)

    def _manager(self) -> AgRsAll2AllManager:
        assert self.all2all_manager is not None, (
            f"group {self.unique_name} does not exchange tokens; use get_ep_group()"
        )
        return self.all2all_manager

    def separate_twin(self, cpu_group: ProcessGroup | None) -> None:
        """From here on collectives of host tensors run on ``cpu_group`` and none of the device's does, so that a thread
        may be in one of each."""
        self.cpu_group, self.cpu_name = cpu_group, f"{self.unique_name}:cpu"

    def destroy(self) -> None:
        for group in (self.device_group, self.cpu_group):
            if _exists(group):
                dist.destroy_process_group(group)
        self.device_group = self.cpu_group = None


_COMMUNICATORS: dict[str, type[DeviceCommunicatorBase]] = {
    "cpu": CpuCommunicator,
    "xpu": XpuCommunicator,
    "cuda": CudaCommunicator,
}

_groups: dict[str, GroupCoordinator] = {}
_own_default_group: ProcessGroup | None = None
_gloo_devices: list[Any] = []
_platform: Platform | None = None
_local: tuple[int, int] | None = None
_store: dist.Store | None = None
_launched: tuple[dist.Store, int, int, timedelta] | None = None
_replicas: list[list[int]] = []
# Kept for as long as the process lives: a store that rank 0 serves must not go and come back between two engines.
_meeting_points: dict[tuple[str, int, int], dist.Store] = {}
_holders: set[GroupLease] = set()
_made_for_engines = False
_on_leaving: list[Callable[[], None]] = []
_process = 0


def _exists(group: ProcessGroup | None) -> bool:
    """Whether torch.distributed still has the group: a caller who destroys the default group destroys them all."""
    return group in dist.distributed_c10d._world.pg_map


def _drop_stale_groups() -> None:
    if "world" in _groups and get_world_group().world_size > 1 and not _exists(get_world_group().cpu_group):
        destroy_distributed_environment()


def _get(kind: str) -> GroupCoordinator:
    assert kind in _groups, (
        f"the {kind} group does not exist yet: call init_distributed_environment() and initialize_model_parallel()"
    )
    return _groups[kind]


def get_world_group() -> GroupCoordinator:
    return _get("world")


def get_tp_group() -> GroupCoordinator:
    return _get("tp")


def get_dp_group() -> GroupCoordinator:
    return _get("dp")


def get_ep_group() -> GroupCoordinator:
    """All ranks with expert parallelism, this rank alone without; dispatch and combine work on either."""
    return _get("ep")


def get_tensor_model_parallel_world_size() -> int:
    return get_tp_group().world_size


def get_tensor_model_parallel_rank() -> int:
    return get_tp_group().rank_in_group


def get_data_parallel_world_size() -> int:
    return get_dp_group().world_size


def get_data_parallel_rank() -> int:
    return get_dp_group().rank_in_group


def model_parallel_is_initialized() -> bool:
    return "tp" in _groups


def get_local_rank() -> int:
    """This rank among those of its host."""
    assert _local is not None, "call init_distributed_environment() first"
    return _local[0]


def get_local_world_size() -> int:
    """Ranks of this host, of all replicas: they share its memory and cores."""
    assert _local is not None, "call init_distributed_environment() first"
    return _local[1]


def get_launched_world_size() -> int:
    """Ranks of all replicas."""
    return sum(len(ranks) for ranks in _replicas)


def tell_all_launched(name: str, value: Any) -> list[Any]:
    """What each rank that the launcher started last told as ``name``, by rank; waits for those that never did.

    No rank waits for one that has: those of another replica may be at work, or gone. Ranks that never meet are taken to
    be like this one, as many as share its host. Raises ``RuntimeError`` for ranks that do not come.
    """
    if _launched is None:
        return [value] * get_local_world_size()
    store, rank, world_size, patience = _launched
    keys = [f"{name}/{other}" for other in range(world_size)]
    store.set(keys[rank], pickle.dumps(value).hex())
    try:
        store.wait(keys, patience)
    except dist.DistError as error:
        missing = [other for other, key in enumerate(keys) if not store.check([key])]
        raise RuntimeError(
            f"ranks {missing} of the {world_size} that were started did not come to make their engine within "
            f"{patience.total_seconds():g} s: see what they report, or start as many ranks as make one"
        ) from error
    return [pickle.loads(bytes.fromhex(store.get(key).decode())) for key in keys]


def get_store() -> dist.Store:
    """A client of the ranks' key-value store for the caller's thread alone, with the keys of these groups."""
    assert _store is not None, "a single process has no store"
    # Older releases of torch cannot clone: there threads take turns.
    return _store.clone() if hasattr(_store, "clone") else _store


def call_on_leaving(callback: Callable[[], None]) -> None:
    """Have ``callback`` called once, before the groups go."""
    if callback not in _on_leaving:
        _on_leaving.append(callback)


def init_distributed_environment(
    world_size: int = -1,
    rank: int = -1,
    distributed_init_method: str = "env://",
    local_rank: int = -1,
    backend: str | None = None,
    platform: Platform | None = None,
) -> None:
    """Join the ranks' rendezvous and make the world group; a single process joins nothing.

    Args:
        world_size, rank, local_rank: -1 takes those of ``torch.distributed`` where the caller has initialised it,
            else what the launcher says (:mod:`vllm.launchers`).
        distributed_init_method: ``env://`` is where the launcher says that the ranks meet.
        backend: of the device group; None takes the platform's.
        platform: None takes ``current_platform``.

    Raises:
        ValueError: fewer devices than ranks on this node, or numbers that contradict each other; on every rank,
            before any collective.
    """
    _drop_stale_groups()
    if "world" in _groups:
        return
    place = _find_place(rank, world_size)
    if local_rank != -1:
        place = replace(place, local_rank=local_rank)
    _join(place, distributed_init_method, backend, platform)


def _find_place(rank: int = -1, world_size: int = -1) -> launchers.Place:
    """The launcher's, or torch.distributed's where only that is there, unless given."""
    place = launchers.find_place()
    if dist.is_initialized() and place.launcher is None:
        place = launchers.find_place((dist.get_rank(), dist.get_world_size()))
    if (rank, world_size) == (-1, -1):
        return place
    known = (place.rank if rank == -1 else rank, place.world_size if world_size == -1 else world_size)
    return launchers.find_place(known)


def _join(
    place: launchers.Place,
    init_method: str = "env://",
    backend: str | None = None,
    platform: Platform | None = None,
    replica_size: int | None = None,
) -> None:
    global _own_default_group, _platform, _local, _store, _launched, _replicas, _process
    rank, world_size = place.rank, place.world_size
    size = replica_size or world_size
    platform = platform or platforms.current_platform
    store = None
    _launched = None
    if world_size > 1:
        if dist.is_initialized() and (dist.get_world_size(), dist.get_rank()) != (world_size, rank):
            raise ValueError(
                f"torch.distributed runs rank {dist.get_rank()} of {dist.get_world_size()}, but rank {rank} of "
                f"{world_size} is asked for: destroy the old process group or correct RANK and WORLD_SIZE"
            )
        if place.local_world_size is not None:
            platform.check_device_count(place.local_world_size)
        shared = find_store(place, init_method)
        # Whoever made the default group may be far from the others in what it does: it reads its data, say.
        patience = timedelta(seconds=_RENDEZVOUS_S) if not dist.is_initialized() else collective_timeout()
        _launched = dist.PrefixStore("vllm/told", shared), rank, world_size, patience
        # Addresses of an engine that has ended are still in the launcher's store.
        times = shared.add(f"vllm/met/{rank}", 1)
        store = dist.PrefixStore(f"vllm/{times}", shared)
        sizes = tell_all_launched("replica size", size) if times == 1 else [size]
        if len(set(sizes)) > 1:
            raise ValueError(
                f"tensor_parallel_size x data_parallel_size differs between the ranks: {sizes} by rank; start all of "
                "them alike"
            )
    local_rank, local_world_size = _locate(place)
    platform.check_device_count(local_world_size)
    device = platform.get_device(local_rank)
    platform.set_device(device)
    platform.report_environment()
    _platform, _process = platform, os.getpid()
    _local = local_rank, local_world_size
    _replicas = [list(range(first, first + size)) for first in range(0, world_size, size)]
    if world_size > 1:
        platform.import_dist_backend()
        if not dist.is_initialized():
            # Of all that were launched, whatever a replica is: a trainer that asks later must not find less.
            with _sharing_a_gloo_thread():
                dist.init_process_group(
                    backend or platform.group_backend,
                    store=store,
                    world_size=world_size,
                    rank=rank,
                    timeout=timedelta(seconds=_RENDEZVOUS_S),  # no collective runs on this group
                )
            _own_default_group = dist.group.WORLD
    if size < world_size:
        logger.info("replica %d of %d, each of %d rank(s)", rank // size, len(_replicas), size)
    _store = None if store is None or size == 1 else dist.PrefixStore(f"replica/{rank // size}", store)
    _groups["world"] = _make_group("world", _replicas, rank, device, backend)


def find_store(place: launchers.Place, init_method: str = "env://") -> dist.Store:
    """The store of all ranks that were launched, without what those before them left in it."""
    if dist.is_initialized() and not _owns_default_group():
        return dist.distributed_c10d._get_default_store()
    where = place.init_method() if init_method == "env://" else init_method
    key = (where, place.rank, place.world_size)
    if key not in _meeting_points:
        patience = timedelta(seconds=_RENDEZVOUS_S)
        store = next(iter(dist.rendezvous(where, place.rank, place.world_size, timeout=patience)))[0]
        if init_method == "env://" and is_kept_over_rounds():
            store = enter_round(store, place.rank, place.world_size, patience)
        _meeting_points[key] = store
    return _meeting_points[key]


def _locate(place: launchers.Place) -> tuple[int, int]:
    """(local rank, local world size); where no variable tells, the ranks that share this host are counted."""
    if _launched is None:
        return place.local_rank or 0, place.local_world_size or 1
    boot = Path("/proc/sys/kernel/random/boot_id")
    hosts = tell_all_launched("host", f"{socket.gethostname()} {boot.read_text() if boot.exists() else ''}")
    if place.local_rank is not None and place.local_world_size is not None:
        return place.local_rank, place.local_world_size
    here = [rank for rank, host in enumerate(hosts) if host == hosts[place.rank]]
    return here.index(place.rank) if place.local_rank is None else place.local_rank, len(here)


@contextlib.contextmanager
def _sharing_a_gloo_thread() -> Iterator[None]:
    """Have the Gloo groups that are made within use one network device: each device has a thread that looks around a
    hundred times a second, which is most of what an idle rank does."""
    owner: Any = dist.distributed_c10d
    kind: Any = owner.ProcessGroupGloo

    class SharingGloo(kind):  # type: ignore[misc]
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
            if not _gloo_devices:
                names = filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
                found = [kind.create_device(interface=name) for name in names]
                _gloo_devices.extend(found or [kind.create_default_device()])
            options = kind._Options()
            options._devices, options._threads, options._timeout = _gloo_devices, 2 * len(_gloo_devices), timeout
            super().__init__(store, rank, size, options)

    owner.ProcessGroupGloo = SharingGloo
    try:
        yield
    finally:
        owner.ProcessGroupGloo = kind


def _make_group(
    kind: str, rank_lists: list[list[int]], rank: int, device: torch.device, backend: str | None
) -> GroupCoordinator:
    """All ranks make all groups of a kind in one order; the one that holds ``rank`` is returned."""
    assert _platform is not None
    backend = backend or _platform.group_backend
    for index, ranks in enumerate(rank_lists):
        device_group = cpu_group = None
        if len(ranks) > 1:
            with _sharing_a_gloo_thread():
                device_group = cpu_group = dist.new_group(ranks, timeout=collective_timeout(), backend=backend)
                if backend != "gloo":
                    cpu_group = dist.new_group(ranks, timeout=collective_timeout(), backend="gloo")
        if rank in ranks:
            mine = (f"{kind}:{index}", ranks, device_group, cpu_group)
    name, ranks, device_group, cpu_group = mine
    policies = _platform.policies
    communicator = _COMMUNICATORS[policies.communicator](
        cpu_group, device, device_group, name, ranks, rank, ordered_sums=policies.ordered_sums
    )
    return GroupCoordinator(name, ranks, rank, device, device_group, cpu_group, communicator)


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    data_parallel_size: int = 1,
    enable_expert_parallel: bool = False,
    backend: str | None = None,
) -> None:
    """Make the TP, DP and EP groups (see the module's text).

    Raises:
        ValueError: the world is not TP x DP ranks (on every rank, before any communication), or the ranks were started
            with different sizes, policies or checks (on every rank, before any group is made).
    """
    world = get_world_group()
    tp, dp = tensor_model_parallel_size, data_parallel_size
    check_world_size(world.world_size, tp, dp)
    if model_parallel_is_initialized():
        raise ValueError("the model parallel groups exist already: call destroy_model_parallel() first")
    _check_same_layout(world, tp, dp, enable_expert_parallel)
    for kind, rank_lists in _layouts(tp, dp, enable_expert_parallel).items():
        _groups[kind] = _make_group(kind, rank_lists, world.rank, world.device, backend)
    assert _platform is not None
    ep = _groups["ep"]
    ep.all2all_manager = AgRsAll2AllManager(ep, _groups["dp"], _groups["tp"], barrier=_platform.policies.moe_barrier)


def _layouts(tp: int, dp: int, enable_expert_parallel: bool) -> dict[str, list[list[int]]]:
    """Kind of group → the ranks of each group of all replicas."""
    layouts = {
        "tp": [[d * tp + t for t in range(tp)] for d in range(dp)],
        "dp": [[d * tp + t for d in range(dp)] for t in range(tp)],
        "ep": [list(range(tp * dp))] if enable_expert_parallel else [[r] for r in range(tp * dp)],
    }
    return {
        kind: [[ranks[place] for place in group] for ranks in _replicas for group in places]
        for kind, places in layouts.items()
    }


def _separate_twins(tp: int, dp: int) -> None:
    """Give the groups that agree on steps a Gloo twin of their own; every rank calls it."""
    for kind, rank_lists in _layouts(tp, dp, False).items():
        group = _get(kind)
        if kind != "ep" and group.world_size > 1 and group.cpu_group is group.device_group:
            for ranks in rank_lists:  # all ranks make all groups
                with _sharing_a_gloo_thread():
                    made = dist.new_group(ranks, timeout=collective_timeout(), backend="gloo")
                if ranks == group.ranks:
                    group.separate_twin(made)


@contextlib.contextmanager
def as_rank(
    rank: int, tensor_parallel_size: int, data_parallel_size: int, enable_expert_parallel: bool, device: torch.device
) -> Iterator[None]:
    """Within it this process has the groups of ``rank`` in a run that nobody started: to ask what the rank would hold.
    No collective works.

    Raises:
        ValueError: the process has groups of its own.
    """
    if _groups:
        raise ValueError("this process runs an engine: ask in another one")
    tp, dp = tensor_parallel_size, data_parallel_size
    first = rank // tp * tp
    everyone = list(range(tp * dp))
    lists = {"world": everyone, "tp": everyone[first : first + tp], "dp": everyone[rank % tp :: tp]}
    lists["ep"] = everyone if enable_expert_parallel else [rank]
    for kind, ranks in lists.items():
        communicator = CpuCommunicator(None, device, None, kind, ranks, rank)
        _groups[kind] = GroupCoordinator(kind, ranks, rank, device, None, None, communicator)
    try:
        yield
    finally:
        _groups.clear()


def _check_same_layout(world: GroupCoordinator, tp: int, dp: int, enable_expert_parallel: bool) -> None:
    """Sizes, policies and checks decide which collectives run, so a rank that differs would hang the others."""
    assert _platform is not None
    settings = {
        "tensor_parallel_size": tp,
        "data_parallel_size": dp,
        "enable_expert_parallel": enable_expert_parallel,
        **asdict(_platform.policies),
        "VLLM_DIST_BACKEND": envs.VLLM_DIST_BACKEND,
        "VLLM_CHECK_COLLECTIVES": envs.VLLM_CHECK_COLLECTIVES,
        "VLLM_DEBUG_NAN": envs.VLLM_DEBUG_NAN or "0",
    }
    check_same_on_all_ranks(world, settings)


def check_same_on_all_ranks(world: GroupCoordinator, settings: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` on every rank unless all have the same ``settings``, naming each that differs."""
    everyones = world.all_gather_object(dict(settings))
    names = dict.fromkeys(name for of in everyones for name in of)
    values_of = {name: [of.get(name, "not set") for of in everyones] for name in names}
    differing = [
        f"{name} differs between the ranks: {values} by rank"
        for name, values in values_of.items()
        if any(value != values[0] for value in values)
    ]
    if differing:
        raise ValueError(f"{'; '.join(differing)}; start all of them alike")


def check_world_size(
    world_size: int, tensor_parallel_size: int, data_parallel_size: int, replicas: bool = False
) -> None:
    """Raise ``ValueError`` unless the world is exactly TP x DP ranks; with ``replicas``, so many or a multiple."""
    needed = tensor_parallel_size * data_parallel_size
    if world_size % needed if replicas else world_size != needed:
        remedy = f"run torchrun --nproc-per-node={needed} or change the sizes"
        if world_size % needed == 0:
            remedy += (
                f', or pass distributed_executor_backend="external_launcher" to LLM for {world_size // needed} '
                "replicas that share nothing but the host"
            )
        raise ValueError(
            f"world size {world_size} (WORLD_SIZE) is {'no multiple of' if replicas else 'not'} tensor_parallel_size "
            f"{tensor_parallel_size} x data_parallel_size {data_parallel_size} = {needed}: {remedy}"
        )


def ensure_model_parallel_initialized(
    tensor_model_parallel_size: int = 1,
    data_parallel_size: int = 1,
    enable_expert_parallel: bool = False,
    backend: str | None = None,
) -> None:
    """:func:`initialize_model_parallel`, or the check that the existing groups have these sizes."""
    if not model_parallel_is_initialized():
        initialize_model_parallel(tensor_model_parallel_size, data_parallel_size, enable_expert_parallel, backend)
        return
    expected_ep = tensor_model_parallel_size * data_parallel_size if enable_expert_parallel else 1
    have = (get_tp_group().world_size, get_dp_group().world_size, get_ep_group().world_size)
    want = (tensor_model_parallel_size, data_parallel_size, expected_ep)
    if have != want:
        raise ValueError(
            f"this process already runs with (TP, DP, EP) sizes {have}, {want} is asked for: call "
            "destroy_model_parallel() first"
        )


class GroupLease:
    """One engine's hold on the groups. Engines of one process share them; the last to let go destroys them.

    Groups that the caller made before are the caller's to destroy.
    """

    def __init__(
        self,
        tensor_parallel_size: int,
        data_parallel_size: int,
        enable_expert_parallel: bool,
        replicas: bool = False,
        separate_twins: bool = False,
    ) -> None:
        """Make the groups, or check that those that exist have these sizes; see :func:`initialize_model_parallel`.

        ``replicas``: more ranks may have been launched; every so many consecutive ones are a replica.
        ``separate_twins``: host and device are in collectives of the DP and TP groups at one time, also where both
        are Gloo's.
        """
        global _made_for_engines
        _drop_stale_groups()
        fresh = "world" not in _groups
        size = tensor_parallel_size * data_parallel_size
        try:
            if not fresh and replicas and get_world_group().world_size > size:
                raise ValueError(
                    f"the world group was made for {get_world_group().world_size} ranks, a replica has {size}: call "
                    "destroy_distributed_environment() first, so that the engine makes groups of its own"
                )
            if fresh:
                place = _find_place().fit(size)
                check_world_size(place.world_size, tensor_parallel_size, data_parallel_size, replicas)
                _join(place, replica_size=size)
            ensure_model_parallel_initialized(tensor_parallel_size, data_parallel_size, enable_expert_parallel)
            if separate_twins:
                _separate_twins(tensor_parallel_size, data_parallel_size)
        except BaseException:
            if fresh:
                _drop_groups()
            raise
        _made_for_engines = _made_for_engines or fresh
        _holders.add(self)

    def release(self) -> None:
        """Let go; again, or after the groups were destroyed by others, it does nothing."""
        if self in _holders and os.getpid() == _process:
            _holders.discard(self)
            if not _holders and _made_for_engines:
                _drop_groups()


def destroy_model_parallel() -> None:
    """Drop the TP, DP and EP groups. Every rank calls it; see :func:`_take_leave`."""
    if model_parallel_is_initialized():
        _take_leave()
    for kind in ("ep", "dp", "tp"):
        if kind in _groups:
            _groups.pop(kind).destroy()


def destroy_distributed_environment() -> None:
    """Drop all groups, and the default process group where this module made it."""
    _drop_groups()
    _drop_default_group()


def _drop_groups() -> None:
    """Drop all groups but, where replicas share it, the default one: a replica that meant to make it anew would have to
    wait for the others."""
    global _platform, _local, _store, _launched, _made_for_engines
    if "world" in _groups and not model_parallel_is_initialized():
        _take_leave()
    destroy_model_parallel()
    if "world" in _groups:
        _groups.pop("world").destroy()
    _gloo_devices.clear()
    if len(_replicas) <= 1:
        _drop_default_group()
    _made_for_engines = False
    _platform = _local = _store = _launched = None
    _holders.clear()
    observer.reset_sequence_numbers()


def _owns_default_group() -> bool:
    return dist.is_initialized() and dist.group.WORLD is _own_default_group


def _drop_default_group() -> None:
    global _own_default_group
    if _owns_default_group():
        dist.destroy_process_group()
    _own_default_group = None


def _take_leave() -> None:
    """Wait until all ranks are about to leave, so that none hangs up on one that is still in its last collective.

    A rank that does not come soon (it works on by itself, it has died) is not waited for: what it was owed is sent.
    Nor is anybody in a run that is lost.
    """
    if _store is not None and not observer.lost():
        world = get_world_group()
        until = time.monotonic() + _FAREWELL_S
        with contextlib.suppress(dist.DistError):  # the store's host is gone, so nobody is left to wait for
            times = _store.add(f"leaving/{world.rank}", 1)
            keys = [f"left/{times}/{rank}" for rank in world.ranks]
            _store.set(keys[world.rank_in_group], "")
            while not _store.check(keys) and time.monotonic() < until:
                time.sleep(0.005)
    while _on_leaving:
        _on_leaving.pop()()


@atexit.register
def _leave_at_exit() -> None:
    """Leave before the interpreter goes: a thread that comes back from the store into an interpreter that has gone
    aborts the process. A rank that ends with an exception waits for nobody and keeps its groups: one may be in a
    collective that never ends. So does a rank of a lost run."""
    if (_groups or _owns_default_group()) and os.getpid() == _process:
        if getattr(sys, "last_value", None) is None and not observer.lost():
            destroy_distributed_environment()
        else:
            while _on_leaving:
                _on_leaving.pop()()
            for group in _groups.values():
                for kept in (group.device_group, group.cpu_group):
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    _meeting_points.clear()


def cleanup_dist_env_and_memory() -> None:
    """:func:`destroy_distributed_environment`, and return cached device memory."""
    platform = _platform or platforms.current_platform
    destroy_distributed_environment()
    platform.empty_cache()
