# SPDX-License-Identifier: Apache-2.0
"""The device type that this process runs on, found at first use of ``current_platform``."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.cuda import CudaPlatform
from vllm.platforms.interface import POLICIES, ParallelPolicies, Platform, policies_of
from vllm.platforms.xpu import XpuPlatform

PLATFORMS: dict[str, type[Platform]] = {"xpu": XpuPlatform, "cuda": CudaPlatform, "cpu": CpuPlatform}

if TYPE_CHECKING:
    current_platform: Platform


@functools.cache
def get_platform(device_type: str) -> Platform:
    """The platform of a device type: ``cpu``, ``xpu``, ``cuda``, or ``auto`` for the first that has a device."""
    if device_type == "auto":
        return next(get_platform(name) for name in PLATFORMS if get_platform(name).is_available())
    if device_type not in PLATFORMS:
        raise ValueError(f"device {device_type!r}: choose one of {[*PLATFORMS, 'auto']}")
    return PLATFORMS[device_type]()


def __getattr__(name: str) -> Any:
    if name == "current_platform":
        return get_platform(envs.VLLM_TARGET_DEVICE)
    raise AttributeError(f"module 'vllm.platforms' has no attribute {name!r}")


__all__ = [
    "PLATFORMS",
    "POLICIES",
    "CpuPlatform",
    "CudaPlatform",
    "ParallelPolicies",
    "Platform",
    "XpuPlatform",
    "current_platform",
    "get_platform",
    "policies_of",
]
