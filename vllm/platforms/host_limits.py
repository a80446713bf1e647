# SPDX-License-Identifier: Apache-2.0
"""What this process may use of its machine: the system's own figure, every control group above it, resource limits.

Control groups are read as the kernel shows them to the process: both versions, side by side too, each level from its
own group up to the topmost that is mounted here.
"""

from __future__ import annotations

import os
import platform
import re
import resource
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
# Version 1 writes "no limit" as the largest multiple of the page size that fits.
_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class Limit:
    """``free``: bytes or processors that are left under the limit ``label``. Processes whose limits have an equal
    ``pool`` share them; None is the process's own."""

    label: str
    free: float
    pool: Hashable = None


def tightest(mine: Sequence[Limit], everyones: Iterable[Sequence[Limit]]) -> tuple[Limit, int]:
    """Of this process's limits the one whose equal share is least, and how many processes share it.

    ``everyones``: the limits of all processes that work together, this one among them.
    """
    pools = [{limit.pool for limit in limits} for limits in everyones]
    shared = [(limit, sum(limit.pool in of for of in pools) if limit.pool is not None else 1) for limit in mine]
    return min(shared, key=lambda each: each[0].free / each[1])


def memory_limits(proc: Path = PROC) -> list[Limit]:
    """Bytes of host memory that this process can still get, under each limit that it has."""
    page, machine = os.sysconf("SC_PAGE_SIZE"), this_machine(proc)
    available = re.search(r"^MemAvailable:\s*(\d+) kB", (proc / "meminfo").read_text(), re.MULTILINE)
    free = int(available[1]) * 1024 if available else os.sysconf("SC_AVPHYS_PAGES") * page
    limits = [Limit("the machine's memory", free, (machine, "memory"))]
    for folder in control_groups("memory", proc):
        left = _memory_left(folder)
        if left is not None:
            limits.append(Limit(f"the memory limit of control group {folder}", left, _pool(machine, folder)))
    pages = [int(number) for number in (proc / "self/statm").read_text().split()]
    for name, used in (("RLIMIT_AS", pages[0]), ("RLIMIT_DATA", pages[5])):
        most = resource.getrlimit(getattr(resource, name))[0]
        if most != resource.RLIM_INFINITY:
            limits.append(Limit(f"{name} of this process (ulimit)", max(most - used * page, 0)))
    return limits


def processor_limits(proc: Path = PROC) -> list[Limit]:
    """Processors that this process can keep busy, under each limit that it has."""
    machine = this_machine(proc)
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    limits = [Limit("the processors that this process may run on", len(usable), (machine, *usable))]
    for folder in control_groups("cpu", proc):
        quota = _processor_quota(folder)
        if quota is not None:
            limits.append(Limit(f"the processor quota of control group {folder}", quota, _pool(machine, folder)))
    return limits


def usable_processors(everyones: Sequence[Sequence[Limit]] = (), mine: Sequence[Limit] | None = None) -> int:
    """Threads that never wait for a processor: whole ones of this process's share, at least 1."""
    mine = processor_limits() if mine is None else mine
    limit, sharers = tightest(mine, everyones or [mine])
    return max(int(limit.free / sharers), 1)


def control_groups(controller: str, proc: Path = PROC) -> list[Path]:
    """The folders of this process's groups under ``controller``, innermost first, of both versions."""
    paths: dict[str, str] = {}
    for line in _lines(proc / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    folders = []
    for line in _lines(proc / "self/mountinfo"):
        where, _, what = line.partition(" - ")
        root, mount = where.split()[3:5]
        kind, *_, options = what.split()
        group = paths.get("" if kind == "cgroup2" else controller)
        if group is None or not (kind == "cgroup2" or (kind == "cgroup" and controller in options.split(","))):
            continue
        top = Path(re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), mount))
        # A path outside of what is mounted here belongs to a group that this process cannot see.
        inner = Path(os.path.relpath(group, root))
        levels = [] if ".." in inner.parts else [top / inner, *(top / above for above in inner.parents)]
        folders += [folder for folder in dict.fromkeys([*levels, top]) if folder.is_dir()]
    return folders


def this_machine(proc: Path = PROC) -> str:
    """The same for all processes on one running kernel, whatever container they are in."""
    return next(iter(_lines(proc / "sys/kernel/random/boot_id")), platform.node())


def _pool(machine: str, folder: Path) -> Hashable:
    """A group is the same one under whatever path a container shows it."""
    found = folder.stat()
    return machine, found.st_dev, found.st_ino


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # not there in this version, or at this level
        return []


def _number(path: Path) -> int | None:
    """The file's number; None where there is no file, or where it holds "max"."""
    text = next(iter(_lines(path)), "max")
    return None if text == "max" else int(text)


def _memory_left(folder: Path) -> int | None:
    stat = dict(words for line in _lines(folder / "memory.stat") if len(words := line.split()) == 2)
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")
    found = [number for name in names if (number := _number(folder / name)) is not None]
    limit = min([*found, int(stat.get("hierarchical_memory_limit", _UNLIMITED))])
    if limit >= _UNLIMITED:
        return None
    used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
    # The kernel drops cached file pages before it refuses memory.
    reclaimable = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    return max(limit - max(used - reclaimable, 0), 0)


def _processor_quota(folder: Path) -> float | None:
    both = next(iter(_lines(folder / "cpu.max")), "").split()
    if len(both) == 2 and both[0] != "max":
        return int(both[0]) / int(both[1])
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota is not None and quota > 0 and period else None
