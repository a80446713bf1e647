# SPDX-License-Identifier: Apache-2.0
"""Slot mappings, which tell real rows from padding."""

from __future__ import annotations

import torch


def slots(real: int, rows: int, device: str | torch.device = "cpu") -> torch.Tensor:
    """int64 [rows]: the first ``real`` rows have slots, the others are padding."""
    row = torch.arange(rows, device=device)
    return row.where(row < real, -1)
