# SPDX-License-Identifier: Apache-2.0
"""CPU with Gloo: runs anywhere; the ranks of a node share its memory and cores."""

from __future__ import annotations

import os
import platform as host

import torch

from vllm.platforms.interface import Platform


class CpuPlatform(Platform):
    device_type = "cpu"
    environment_prefixes = ("GLOO_",)

    @property
    def dist_backend(self) -> str:
        return "gloo"

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int | None:
        return None

    def get_device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def device_name(self, device: torch.device) -> str:
        return host.processor() or host.machine()

    def memory_info(self, device: torch.device) -> tuple[int, int]:
        """(available, physical) bytes of the host."""
        page = os.sysconf("SC_PAGE_SIZE")
        total = os.sysconf("SC_PHYS_PAGES") * page
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024, total
        return os.sysconf("SC_AVPHYS_PAGES") * page, total
