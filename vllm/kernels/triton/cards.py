# SPDX-License-Identifier: Apache-2.0
"""What the kernels ask of the card that they run on."""

from __future__ import annotations

import torch


def shared_memory(device: torch.device) -> int:
    """Bytes that a program may stage its operands in."""
    if device.type != "cuda":
        return 128 << 10
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 99 << 10))


def has_fp8(device: torch.device) -> bool:
    """Whether Triton's float8e4nv exists there, in memory and in products."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
