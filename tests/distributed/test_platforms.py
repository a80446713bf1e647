# SPDX-License-Identifier: Apache-2.0
"""Devices, backends, warnings and policies; accelerators are stood in for by fakes."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vllm import platforms
from vllm.distributed import destroy_distributed_environment, init_distributed_environment
from vllm.entrypoints.cli import collect_env
from vllm.platforms import (
    POLICIES,
    CpuPlatform,
    CudaPlatform,
    XpuPlatform,
    get_platform,
    host_limits,
    interface,
    policies_of,
    xpu,
)


@pytest.fixture
def two_xpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
    monkeypatch.setattr(torch.xpu, "set_device", lambda device: None)
    monkeypatch.setattr(interface, "_reported", set())
    monkeypatch.setenv("ZE_AFFINITY_MASK", "2,3")


@pytest.mark.usefixtures("two_xpus")
def test_case_22_masked_devices_are_indexed_by_local_rank() -> None:
    platform = XpuPlatform()
    platform.check_device_count(2)
    assert [platform.get_device(local_rank) for local_rank in (0, 1)] == [
        torch.device("xpu", 0),
        torch.device("xpu", 1),
    ]
    assert os.environ["ZE_AFFINITY_MASK"] == "2,3"


@pytest.mark.usefixtures("two_xpus")
@pytest.mark.parametrize("rank", [0, 3])
def test_case_22_fewer_devices_than_ranks_is_an_error_on_every_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any of them waits for another, as torchrun tells how many share the node."""
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    try:
        with pytest.raises(
            ValueError, match=r"4 ranks .* but 2 are visible \(ZE_AFFINITY_MASK=2,3\): start 2 ranks, or"
        ):
            init_distributed_environment(platform=XpuPlatform())
        assert not dist.is_initialized()
    finally:
        destroy_distributed_environment()


def test_case_22_cuda_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with pytest.raises(ValueError, match=r"2 ranks .* but 1 are visible \(CUDA_VISIBLE_DEVICES=5\)"):
        CudaPlatform().check_device_count(2)
    CudaPlatform().check_device_count(1)
    CpuPlatform().check_device_count(64)


@pytest.mark.usefixtures("two_xpus")
def test_ranks_share_devices_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each then has its part of the device's memory."""
    monkeypatch.setattr(torch.xpu, "mem_get_info", lambda device: (600, 1000), raising=False)
    monkeypatch.setenv("VLLM_DIST_BACKEND", "gloo")
    platform = XpuPlatform()
    platform.check_device_count(4)
    devices = [platform.get_device(local_rank) for local_rank in range(4)]
    assert [device.index for device in devices] == [0, 1, 0, 1]
    everyones = [platform.memory_limits(device, 0.9) for device in devices]
    limit, sharers = host_limits.tightest(everyones[0], everyones)
    assert (limit.free, sharers) == (500, 2)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="but 0 are visible"):
        platform.check_device_count(4)


@pytest.mark.usefixtures("two_xpus")
def test_an_unknown_backend_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_xccl_available", lambda: True, raising=False)
    monkeypatch.setenv("VLLM_DIST_BACKEND", "ncl")
    with pytest.raises(ValueError, match=r"VLLM_DIST_BACKEND='ncl': on xpu choose one of \['xccl', 'gloo'\]"):
        XpuPlatform().check_device_count(1)
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    assert "choose one of ['gloo']" in collect_env._communication()["used"], "the report says so and goes on"
    monkeypatch.setenv("VLLM_DIST_BACKEND", "xccl")
    assert XpuPlatform().group_backend == "xccl"
    monkeypatch.delenv("VLLM_DIST_BACKEND")
    assert (XpuPlatform().group_backend, CpuPlatform().group_backend) == ("xccl", "gloo")


@pytest.mark.usefixtures("two_xpus")
@pytest.mark.parametrize(
    ("installed", "root", "warned"),
    [
        ("2022.0.0", "", True),
        ("2021.17.2", "", False),
        (None, "/opt/intel/oneapi/ccl/2022.1", True),
        (None, "/opt/intel/oneapi/ccl/2021.15", False),
        (None, "", False),
    ],
)
def test_case_23_oneccl_2022_warns_and_user_variables_stay(
    monkeypatch: pytest.MonkeyPatch,
    installed: str | None,
    root: str,
    warned: bool,
) -> None:
    def version(name: str) -> str:
        assert name == "oneccl"
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(xpu.importlib.metadata, "version", version)
    for name in [name for name in os.environ if name.startswith(XpuPlatform.environment_prefixes)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CCL_ROOT", root)
    monkeypatch.setenv("CCL_ALLREDUCE", "ring")
    monkeypatch.setenv("SYCL_UR_USE_LEVEL_ZERO_V2", "0")
    before = dict(os.environ)
    lines: list[str] = []
    monkeypatch.setattr(interface.logger, "_log", lambda level, text, args, **_: lines.append(text % args))
    XpuPlatform().report_environment()
    XpuPlatform().report_environment()
    assert dict(os.environ) == before
    effective = f"CCL_ALLREDUCE=ring CCL_ROOT={root} SYCL_UR_USE_LEVEL_ZERO_V2=0"
    assert lines.count(f"communication variables in force: {effective}") == 1
    assert len([line for line in lines if "all_reduce is reported to hang on Arc B60" in line]) == warned


@pytest.mark.parametrize("has_xccl", [True, False])
def test_xpu_backend(monkeypatch: pytest.MonkeyPatch, has_xccl: bool) -> None:
    imported: list[str] = []
    monkeypatch.setattr(dist, "is_xccl_available", lambda: has_xccl, raising=False)
    monkeypatch.setattr(xpu.importlib, "import_module", imported.append)
    platform = XpuPlatform()
    platform.import_dist_backend()
    assert (platform.dist_backend, imported) == (("xccl", []) if has_xccl else ("ccl", ["oneccl_bindings_for_pytorch"]))


def test_a_missing_xpu_backend_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_xccl_available", lambda: False, raising=False)

    def fail(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(xpu.importlib, "import_module", fail)
    with pytest.raises(ValueError, match="oneccl_bindings_for_pytorch is not installed: install a torch XPU build"):
        XpuPlatform().import_dist_backend()


def test_platform_is_found_at_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "current_platform" not in vars(platforms)
    assert platforms.current_platform is get_platform("auto")
    get_platform.cache_clear()
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    assert isinstance(platforms.current_platform, XpuPlatform)
    get_platform.cache_clear()
    with pytest.raises(ValueError, match=r"device 'tpu': choose one of \['xpu', 'cuda', 'cpu', 'auto'\]"):
        get_platform("tpu")
    assert [get_platform(name).dist_backend for name in ("cpu", "cuda")] == ["gloo", "nccl"]


def test_host_memory() -> None:
    free, total = CpuPlatform().memory_info(torch.device("cpu"))
    assert 0 < free <= total


def test_policies_of_the_platforms_and_their_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_POLICIES", "VLLM_DP_PAD_TO_MAX", "VLLM_MOE_BARRIER"):
        monkeypatch.delenv(name, raising=False)
    assert CpuPlatform().policies == POLICIES["cpu"]
    assert not POLICIES["cpu"].pad_dp_to_max
    assert POLICIES["xpu"].pad_dp_to_max
    assert POLICIES["xpu"].moe_barrier
    monkeypatch.setenv("VLLM_POLICIES", "xpu")
    assert CpuPlatform().policies == POLICIES["xpu"]
    monkeypatch.setenv("VLLM_DP_PAD_TO_MAX", "0")
    assert policies_of("cpu").pad_dp_to_max is False
    monkeypatch.setenv("VLLM_DP_PAD_TO_MAX", "1")
    monkeypatch.setenv("VLLM_MOE_BARRIER", "0")
    assert policies_of("cpu").moe_barrier is False
    assert policies_of("cpu").pad_dp_to_max is True
    monkeypatch.setenv("VLLM_POLICIES", "b60")
    with pytest.raises(ValueError, match=r"VLLM_POLICIES='b60': choose one of \['cpu', 'cuda', 'xpu'\]"):
        policies_of("cpu")
