# SPDX-License-Identifier: Apache-2.0
"""Intel XPU with XCCL, or with oneCCL's bindings on a torch that has no XCCL."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re

import torch
import torch.distributed as dist

from vllm.platforms.interface import Platform


def _torch_has_xccl() -> bool:
    probe = getattr(dist, "is_xccl_available", None)
    return probe is not None and probe()


def oneccl_version() -> str | None:
    """Version of the oneCCL in use: the installed package's, else the one in ``CCL_ROOT``'s path; None if unknown."""
    try:
        return importlib.metadata.version("oneccl")
    except importlib.metadata.PackageNotFoundError:
        found = re.search(r"(20\d\d\.\d+(?:\.\d+)*)", os.environ.get("CCL_ROOT", ""))
        return found.group(1) if found else None


class XpuPlatform(Platform):
    device_type = "xpu"
    visible_devices_variable = "ZE_AFFINITY_MASK"
    environment_prefixes = ("CCL_", "SYCL_", "ZE_", "ONEAPI_", "FI_")

    @property
    def dist_backend(self) -> str:
        return "xccl" if _torch_has_xccl() else "ccl"

    def import_dist_backend(self) -> None:
        if self.dist_backend == "xccl":
            return
        try:
            importlib.import_module("oneccl_bindings_for_pytorch")
        except ImportError as error:
            raise ValueError(
                f"torch {torch.__version__} has no XCCL and oneccl_bindings_for_pytorch is not installed: install a "
                "torch XPU build from 2.8 on, or the bindings that match this torch"
            ) from error

    def is_available(self) -> bool:
        return hasattr(torch, "xpu") and torch.xpu.is_available()

    def device_count(self) -> int | None:
        return torch.xpu.device_count()

    def device_name(self, device: torch.device) -> str:
        return torch.xpu.get_device_name(device)

    def memory_info(self, device: torch.device) -> tuple[int, int]:
        return torch.xpu.mem_get_info(device)

    def synchronize(self) -> None:
        torch.xpu.synchronize()

    def empty_cache(self) -> None:
        torch.xpu.empty_cache()

    def set_device(self, device: torch.device) -> None:
        torch.xpu.set_device(device)

    def graph_faults(self) -> str:
        return (
            "after a captured all_reduce was replayed, eager ones give NaN (pytorch #189403; here all run eagerly); "
            "replays that never end under load (vllm #54698); UR_RESULT_ERROR_OUT_OF_RESOURCES from the fifth size on "
            "(vllm-xpu-kernels #509: give fewer cudagraph_capture_sizes)"
        )

    def warnings(self) -> list[str]:
        version = oneccl_version()
        if version is None or not version.startswith("2022."):
            return []
        return [
            f"oneCCL {version}: all_reduce is reported to hang on Arc B60 with 2022.x; 2021.17.2 passes, and so does "
            "CCL_ALLREDUCE=ring at about 30 % cost"
        ]
