# SPDX-License-Identifier: Apache-2.0
"""What the engine asks of a device type, and the parallel policies that come with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm import envs
from vllm.logger import init_logger
from vllm.platforms.host_limits import Limit, this_machine

logger = init_logger(__name__)


@dataclass(frozen=True)
class ParallelPolicies:
    """How ranks stay in lockstep; defaults by platform, each field set from outside by its variable.

    Attributes:
        communicator: ``cpu``, ``xpu`` or ``cuda``: whose communicator class serves the groups.
        pad_dp_to_max: with expert parallelism every DP rank runs the largest count (``VLLM_DP_PAD_TO_MAX``).
        moe_barrier: device barrier before each MoE collective (``VLLM_MOE_BARRIER``).
        ordered_sums: sums over ranks in rank order, so that a row's result does not depend on its place in the batch
            (``VLLM_ORDERED_SUMS``).
        async_scheduling: steps are scheduled ahead where the argument of that name does not say.
        async_over_dp_ep: and where DP ranks exchange tokens, too.
    """

    communicator: str
    pad_dp_to_max: bool
    moe_barrier: bool
    ordered_sums: bool
    async_scheduling: bool
    async_over_dp_ep: bool


_VARIABLES = {
    "pad_dp_to_max": "VLLM_DP_PAD_TO_MAX",
    "moe_barrier": "VLLM_MOE_BARRIER",
    "ordered_sums": "VLLM_ORDERED_SUMS",
}

POLICIES: dict[str, ParallelPolicies] = {
    "cpu": ParallelPolicies("cpu", False, False, True, False, False),
    "cuda": ParallelPolicies("cuda", False, False, False, True, True),
    "xpu": ParallelPolicies("xpu", True, True, False, True, False),
}


def policies_of(device_type: str) -> ParallelPolicies:
    """The policies of ``VLLM_POLICIES`` or else of ``device_type``, with the variables that are set laid over them."""
    name = envs.VLLM_POLICIES or device_type
    if name not in POLICIES:
        raise ValueError(f"VLLM_POLICIES={name!r}: choose one of {sorted(POLICIES)}")
    values = {field: getattr(envs, variable) for field, variable in _VARIABLES.items()}
    overrides: dict[str, Any] = {field: value for field, value in values.items() if value is not None}
    return replace(POLICIES[name], **overrides)


@dataclass
class PeakMemory:
    """``bytes``: the most that tensors made in the measured block held at one time; known after the block."""

    bytes: int = 0


class Platform:
    """A device type. Subclasses name it and fill in what differs.

    Attributes:
        device_type: torch's name of it.
        visible_devices_variable: the environment variable by which users mask devices; the runtime reads it before
            indices are given out, so it is read here for messages only and never set.
        environment_prefixes: variables that change how the backend communicates, printed once and never set.
    """

    device_type: str = ""
    visible_devices_variable: str = ""
    environment_prefixes: tuple[str, ...] = ()

    @property
    def dist_backend(self) -> str:
        """Name of torch.distributed's backend for this device type."""
        raise NotImplementedError

    @property
    def group_backend(self) -> str:
        """The backend of the device groups: ``VLLM_DIST_BACKEND``, or ``dist_backend`` where that is not set.

        Over Gloo, which takes what is on a device by way of the host, ranks may share a device.
        """
        wanted, known = envs.VLLM_DIST_BACKEND or self.dist_backend, dict.fromkeys((self.dist_backend, "gloo"))
        if wanted not in known:
            raise ValueError(f"VLLM_DIST_BACKEND={wanted!r}: on {self.device_type} choose one of {[*known]}")
        return wanted

    def import_dist_backend(self) -> None:
        """Import what registers the backend, where torch does not bring it."""

    def is_available(self) -> bool:
        raise NotImplementedError

    def device_count(self) -> int | None:
        """Devices that this process sees; None where ranks share one."""
        raise NotImplementedError

    def device_name(self, device: torch.device) -> str:
        raise NotImplementedError

    def memory_info(self, device: torch.device) -> tuple[int, int]:
        """(free, total) bytes."""
        raise NotImplementedError

    def memory_limits(self, device: torch.device, utilization: float) -> list[Limit]:
        """Bytes that this process may still take, by each limit that there is.

        ``utilization``: the share of a device's memory that the process may hold in all, what it holds already
        included; on CPU, where others' memory is in sight as well, the share of what is free.
        """
        free, total = self.memory_info(device)
        label = f"{utilization:.0%} of the memory of {device}"
        return [Limit(label, int(total * utilization) - (total - free), (this_machine(), device.type, device.index))]

    def processor_limits(self) -> list[Limit]:
        """Processors that this process may compute on, by each limit; empty where it computes on a device."""
        return []

    @contextmanager
    def measure_peak(self, device: torch.device) -> Iterator[PeakMemory]:
        """Measure what the block takes for a time, beside what is there before it."""
        memory, measured = getattr(torch, self.device_type), PeakMemory()
        self.synchronize()
        self.empty_cache()
        before = memory.memory_reserved(device)
        memory.reset_peak_memory_stats(device)
        yield measured
        self.synchronize()
        measured.bytes = memory.max_memory_reserved(device) - before
        self.empty_cache()

    def synchronize(self) -> None:
        """Wait for the device's queued work."""

    def empty_cache(self) -> None:
        """Return cached blocks to the device."""

    def set_device(self, device: torch.device) -> None:
        """Make it this process's current device."""

    def warnings(self) -> list[str]:
        """What is known to go wrong with the installed software on this platform."""
        return []

    def choose_graph_mode(self, asked: str | None, world_size: int) -> str:
        """The name of the ``CUDAGraphMode`` of steps: what is asked for where this torch has graphs of the device, else
        what is known to be sound and to pay. The log says which, and why."""
        mode, reason = self.default_graph_mode(world_size)
        if asked is not None:
            missing = self.why_no_graphs()
            if asked != "NONE" and missing:
                logger.warning("cudagraph_mode %s is asked for, but %s: steps run eagerly", asked, missing)
                return "NONE"
            mode, reason = asked, "asked for"
            if asked != "NONE" and world_size > 1:
                reason += f"; the collectives of {world_size} ranks split each step"
                if faults := self.graph_faults():
                    logger.warning("cudagraph_mode %s over %d devices: known faults: %s", asked, world_size, faults)
        logger.info("cudagraph_mode %s: %s", mode, reason)
        return mode

    def default_graph_mode(self, world_size: int) -> tuple[str, str]:
        if missing := self.why_no_graphs():
            return "NONE", missing
        if world_size > 1:
            return "NONE", f"not by default over {world_size} devices, whose collectives split each step"
        return "FULL_DECODE_ONLY", "one device, whose decodes would wait for Python"

    def why_no_graphs(self) -> str | None:
        """None where this torch captures graphs of the device."""
        name = f"{self.device_type.upper()}Graph"
        if hasattr(getattr(torch, self.device_type, None), name):
            return None
        return f"torch {torch.__version__} has no torch.{self.device_type}.{name}"

    def graph_faults(self) -> str:
        """What is known to go wrong where several devices replay graphs."""
        return ""

    def is_cpu(self) -> bool:
        return self.device_type == "cpu"

    def is_cuda(self) -> bool:
        return self.device_type == "cuda" and torch.version.hip is None

    def is_rocm(self) -> bool:
        return self.device_type == "cuda" and torch.version.hip is not None

    def is_cuda_alike(self) -> bool:
        return self.device_type == "cuda"

    def is_xpu(self) -> bool:
        return self.device_type == "xpu"

    def is_tpu(self) -> bool:
        return False

    @property
    def policies(self) -> ParallelPolicies:
        return policies_of(self.device_type)

    def get_device(self, local_rank: int) -> torch.device:
        """The device of a node's ``local_rank``: that index among the visible ones, over Gloo modulo their number."""
        count = self.device_count() if self.group_backend == "gloo" else None
        return torch.device(self.device_type, local_rank % count if count else local_rank)

    def check_device_count(self, local_world_size: int) -> None:
        """Raise ``ValueError``, on every rank alike, when this node has too few visible devices for its ranks."""
        count = self.device_count()
        if count is None or count >= (1 if self.group_backend == "gloo" else local_world_size):
            return
        variable = self.visible_devices_variable
        mask = os.environ.get(variable)
        raise ValueError(
            f"{local_world_size} ranks on this node need a {self.device_type} device each, but {count} are visible"
            + (f" ({variable}={mask})" if mask is not None else "")
            + f": start {count} ranks, or let every rank see all devices of its node (unset {variable} or list "
            f"{local_world_size} devices in it); each rank takes the device of its LOCAL_RANK. For a trial ranks can "
            "share a device with VLLM_DIST_BACKEND=gloo, by way of the host's memory"
        )

    def report_environment(self) -> None:
        """Log, once in this process, the backend's variables as they are in force, and the warnings."""
        if self.device_type in _reported:
            return
        _reported.add(self.device_type)
        if self.environment_prefixes:
            names = sorted(name for name in os.environ if name.startswith(self.environment_prefixes))
            if names:
                effective = " ".join(f"{name}={os.environ[name]}" for name in names)
                logger.info("communication variables in force: %s", effective)
        for text in self.warnings():
            logger.warning("%s", text)


_reported: set[str] = set()
