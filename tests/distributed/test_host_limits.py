# SPDX-License-Identifier: Apache-2.0
"""What a process may use of its machine: control groups of both versions in a made-up /proc, and resource limits."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch

from vllm.kernels.cpu import build
from vllm.platforms import CpuPlatform, Platform, host_limits
from vllm.platforms.host_limits import Limit, control_groups, memory_limits, processor_limits, tightest

GIB = 1 << 30
V1_UNLIMITED = 9223372036854771712


class Machine:
    """A made-up /proc with 16 GiB available, and the folders that it says control groups are mounted at."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.mounts = folder / "proc", folder / "mounts"
        self.write(self.proc / "meminfo", "MemTotal: 33554432 kB\nMemFree: 1 kB\nMemAvailable: 16777216 kB\n")
        self.write(self.proc / "sys/kernel/random/boot_id", "made-up-boot\n")
        self.write(self.proc / "self/statm", "0 0 0 0 0 0 0\n")
        self.write(self.proc / "self/cgroup", "")
        self.write(self.proc / "self/mountinfo", "23 1 8:1 / / rw - ext4 /dev/root rw\n")

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def append(self, name: str, line: str) -> None:
        with (self.proc / "self" / name).open("a") as file:
            file.write(line + "\n")

    def mount(self, kind: str, name: str, options: str, path: str, root: str = "/") -> Path:
        """Mount a hierarchy whose ``root`` group is seen at the returned folder; this process is in group ``path``."""
        top = self.mounts / name
        top.mkdir(parents=True, exist_ok=True)
        shown = str(top).replace(" ", "\\040")
        self.append("mountinfo", f"30 23 0:28 {root} {shown} rw,nosuid shared:9 - {kind} {kind} {options}")
        self.append("cgroup", f"{'0::' if kind == 'cgroup2' else '4:' + options.removeprefix('rw,') + ':'}{path}")
        return top

    def group(self, folder: Path, **files: Any) -> None:
        """``memory__max=1`` writes "1" into ``memory.max``."""
        for name, text in files.items():
            self.write(folder / name.replace("__", "."), f"{text}\n")

    def memory(self) -> dict[str, int]:
        return {limit.label: int(limit.free) for limit in memory_limits(self.proc)}

    def least(self) -> int:
        return min(self.memory().values())

    def processors(self) -> float:
        return min(limit.free for limit in processor_limits(self.proc))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    return Machine(tmp_path / "a b")


def test_without_control_groups_the_machine_counts(machine: Machine) -> None:
    assert machine.memory() == {"the machine's memory": 16 * GIB}
    assert machine.processors() == 8


def test_version_2_limits_at_each_level(machine: Machine) -> None:
    top = machine.mount("cgroup2", "v2", "rw", "/pod/box")
    machine.group(top / "pod/box", memory__max="max", memory__current=GIB, memory__stat="inactive_file 0")
    assert machine.least() == 16 * GIB
    machine.group(top / "pod", memory__max=4 * GIB, memory__current=3 * GIB, memory__stat=f"inactive_file {GIB}")
    assert machine.least() == 2 * GIB
    machine.group(top / "pod/box", memory__max=2 * GIB)
    assert machine.least() == GIB
    machine.group(top / "pod/box", memory__high=GIB + 5)
    assert machine.least() == 5
    machine.group(top / "pod/box", memory__current=3 * GIB)
    assert machine.least() == 0


def test_a_container_sees_its_group_at_the_mount_whatever_path_it_is_told(machine: Machine) -> None:
    # Version 2 with a name space; a path from outside of it; version 1, whose path is the mount's root.
    for path, root in (("/", "/"), ("/../../other", "/"), ("/docker/0123", "/docker/0123"), ("/docker/0123", "/")):
        machine.write(machine.proc / "self/mountinfo", "")
        machine.write(machine.proc / "self/cgroup", "")
        top = machine.mount("cgroup2", "v2", "rw", path, root)
        machine.group(top, memory__max=3 * GIB, memory__current=GIB, memory__stat="")
        assert machine.least() == 2 * GIB, (path, root)


def test_version_1_limits_and_its_number_for_none(machine: Machine) -> None:
    top = machine.mount("cgroup", "memory", "rw,memory", "/job/step")
    machine.group(top, memory__limit_in_bytes=V1_UNLIMITED, memory__usage_in_bytes=9 * GIB, memory__stat="")
    machine.group(top / "job/step", memory__limit_in_bytes=V1_UNLIMITED, memory__usage_in_bytes=GIB)
    assert machine.memory() == {"the machine's memory": 16 * GIB}
    stat = f"inactive_file 7\ntotal_inactive_file {GIB}\nhierarchical_memory_limit {V1_UNLIMITED}"
    files = {"memory__limit_in_bytes": 5 * GIB, "memory__usage_in_bytes": 3 * GIB, "memory__stat": stat}
    machine.group(top / "job", **files)
    assert machine.least() == 3 * GIB
    # A limit above what is mounted here.
    stat = f"total_inactive_file 0\nhierarchical_memory_limit {2 * GIB}"
    machine.group(top / "job/step", memory__stat=stat)
    assert machine.least() == GIB


def test_both_versions_side_by_side(machine: Machine) -> None:
    unified = machine.mount("cgroup2", "unified", "rw", "/user")
    (unified / "user").mkdir()
    memory = machine.mount("cgroup", "memory", "rw,memory", "/box")
    cpu = machine.mount("cgroup", "cpu", "rw,cpu,cpuacct", "/")
    machine.group(memory / "box", memory__limit_in_bytes=GIB, memory__usage_in_bytes=0, memory__stat="")
    machine.group(cpu, cpu__cfs_quota_us=250000, cpu__cfs_period_us=100000)
    assert control_groups("memory", machine.proc) == [unified / "user", unified, memory / "box", memory]
    assert machine.least() == GIB
    assert machine.processors() == 2.5


def test_processor_quotas_and_affinity(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    top = machine.mount("cgroup2", "v2", "rw", "/pod/box")
    machine.group(top / "pod/box", cpu__max="max 100000")
    assert machine.processors() == 8
    machine.group(top / "pod", cpu__max="150000 100000")
    assert machine.processors() == 1.5
    assert host_limits.usable_processors(mine=processor_limits(machine.proc)) == 1
    machine.group(top / "pod", cpu__max="50000 100000")
    assert host_limits.usable_processors(mine=processor_limits(machine.proc)) == 1
    machine.group(top / "pod", cpu__max="max 100000")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert machine.processors() == 2
    cpu = machine.mount("cgroup", "cpu", "rw,cpu", "/")
    machine.group(cpu, cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    assert machine.processors() == 2


def test_processes_share_a_limit_that_they_have_in_common(machine: Machine) -> None:
    top = machine.mount("cgroup2", "v2", "rw", "/job")
    machine.group(top / "job", memory__max=6 * GIB, memory__current=0)
    mine = memory_limits(machine.proc)
    # The same group, seen by another container at another path, and another process in a group of its own.
    link = machine.mounts / "elsewhere"
    link.symlink_to(top / "job")
    machine.write(machine.proc / "self/cgroup", "0::/\n")
    machine.write(machine.proc / "self/mountinfo", "")
    machine.mount("cgroup2", "elsewhere", "rw", "/")
    beside = memory_limits(machine.proc)
    assert beside[1].label != mine[1].label
    alone = [mine[0], Limit("other", 1.0, "other")]
    assert tightest(mine, [mine, alone]) == (mine[1], 1)
    assert tightest(mine, [mine, beside, alone]) == (mine[1], 2)
    assert tightest(mine, [mine, *[alone] * 7]) == (mine[0], 8)
    assert tightest([Limit("ulimit", 9.0)], [[Limit("ulimit", 9.0)]] * 4)[1] == 1


@pytest.mark.parametrize(("name", "pages"), [("RLIMIT_AS", 1000), ("RLIMIT_DATA", 300)])
def test_resource_limits(machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str, pages: int) -> None:
    machine.write(machine.proc / "self/statm", "1000 90 80 70 0 300 0\n")
    unlimited, limit = resource.RLIM_INFINITY, getattr(resource, name)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (2 * GIB if kind == limit else unlimited, unlimited))
    found = memory_limits(machine.proc)[1]
    assert (found.label, found.free, found.pool) == (
        f"{name} of this process (ulimit)",
        2 * GIB - pages * os.sysconf("SC_PAGE_SIZE"),
        None,
    )


def test_the_host_s_memory_is_the_smallest_of_all_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [Limit("a", 5000, "a"), Limit("b", 3000)]
    monkeypatch.setattr(host_limits, "memory_limits", lambda: limits)
    assert CpuPlatform().memory_info(torch.device("cpu"))[0] == 3000
    assert CpuPlatform().memory_limits(torch.device("cpu"), 0.5) == [Limit("a", 2500, "a"), Limit("b", 1500)]


def test_a_device_s_used_memory_is_part_of_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Platform, "memory_info", lambda self, device: (600, 1000))
    assert [limit.free for limit in Platform().memory_limits(torch.device("cpu"), 0.9)] == [500]


def test_here() -> None:
    assert all(limit.free > 0 for limit in memory_limits())
    assert 1 <= host_limits.usable_processors() <= len(os.sched_getaffinity(0))


def test_one_processor_gives_one_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "usable_processors", lambda: 1)
    alone = f"import os, sys; os.mkdir({str(tmp_path / 'lock')!r}); os.rmdir({str(tmp_path / 'lock')!r})"
    build._run([[sys.executable, "-c", alone]] * 4)
    with pytest.raises(build.BuildError, match="exited with 1: no"):
        build._run([[sys.executable, "-c", "pass"], [sys.executable, "-c", "import sys; sys.exit('no')"]])


THREADS = """
import sys, torch
sys.path[:0] = sys.argv[3:]
from vllm import LLM
from vllm.platforms import host_limits
host_limits._processor_quota = lambda folder: float(sys.argv[1])
before = torch.get_num_threads()
llm = LLM(sys.argv[2], skip_tokenizer_init=True, max_model_len=64)
print("threads", before, torch.get_num_threads())
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2 or not control_groups("cpu"), reason="one processor, or no groups")
def test_a_quota_of_one_processor_gives_one_thread_and_the_user_s_word_wins() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}

    def threads(quota: str, **more: str) -> list[str]:
        command = [sys.executable, "-c", THREADS, quota, tiny.checkpoint("llama"), *sys.path]
        done = subprocess.run(command, env=environment | more, capture_output=True, text=True, timeout=300, check=True)
        return done.stdout.split("threads ")[1].split()

    before, after = threads("1.0")
    assert int(before) > 1
    assert after == "1"
    assert threads("1.0", OMP_NUM_THREADS="2") == ["2", "2"]
