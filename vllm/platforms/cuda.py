# SPDX-License-Identifier: Apache-2.0
"""CUDA with NCCL."""

from __future__ import annotations

from typing import Any

import torch

from vllm.platforms.interface import Platform


class CudaPlatform(Platform):
    device_type = "cuda"
    visible_devices_variable = "CUDA_VISIBLE_DEVICES"
    environment_prefixes = ("NCCL_",)

    @property
    def dist_backend(self) -> str:
        return "nccl"

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def device_count(self) -> int | None:
        return torch.cuda.device_count()

    def device_name(self, device: torch.device) -> str:
        return torch.cuda.get_device_name(device)

    def memory_info(self, device: torch.device) -> tuple[int, int]:
        return torch.cuda.mem_get_info(device)

    def begin_graph(self, pool: Any) -> Any:
        """Other threads, NCCL's watchdog among them, go on as they please."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        return graph

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def set_device(self, device: torch.device) -> None:
        torch.cuda.set_device(device)
