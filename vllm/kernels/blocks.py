# SPDX-License-Identifier: Apache-2.0
"""Blocks of quantised weights as GGUF files have them: what the bytes of one mean.

A column is ``scale * code - minimum``. In q4_1, q5_0 and q5_1 a block is 32 columns with a scale, and a minimum or the
middle code for 0, in float16. In q4_k and q5_k it is 256 columns: 8 times 32 of them with a scale and a minimum of 6
bits each, and the float16 units of both; in q6_k 16 times 16, with signed scales of 8 bits and their unit.

float32 holds products of scale and code exactly, so that each value is rounded once at most.
"""

from __future__ import annotations

import torch
from torch import Tensor

# format → where its float16 numbers are: the (units of) scale, and minimum
UNITS = {"q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}


def units(format: str, blocks: Tensor) -> Tensor:
    """uint8 [..., bytes of a block] -> float16 [..., 1 or 2]."""
    at = torch.tensor([byte for first in UNITS[format] for byte in (first, first + 1)], device=blocks.device)
    return blocks[..., at].view(torch.float16)


def _bits(codes: Tensor, width: int, *shifts: int) -> Tensor:
    """[..., n] -> [..., len(shifts) * n]: those bits of all codes one after the other."""
    return torch.cat([codes >> shift & (1 << width) - 1 for shift in shifts], dim=-1)


def block_values(format: str, blocks: Tensor) -> Tensor:
    """uint8 [..., bytes of a block] -> float32 [..., columns of a block]."""
    unit = units(format, blocks).float()
    d, least = unit[..., :1], unit[..., 1:]
    if format == "q6_k":
        halves = blocks[..., :128].unflatten(-1, (2, 64)), blocks[..., 128:192].unflatten(-1, (2, 32))
        codes = _bits(halves[0], 4, 0, 4) | _bits(halves[1], 2, 0, 2, 4, 6) << 4
        scales = blocks[..., 192:208].view(torch.int8).float() * d
        return ((codes.flatten(-2).float() - 32).unflatten(-1, (16, 16)) * scales[..., None]).flatten(-2)
    if format in ("q4_k", "q5_k"):
        low, high, both = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
        scales = torch.cat((low & 63, both & 15 | low >> 6 << 4), dim=-1).float() * d
        minima = torch.cat((high & 63, both >> 4 | high >> 6 << 4), dim=-1).float() * least
        codes = _bits(blocks[..., -128:].unflatten(-1, (4, 32)), 4, 0, 4).flatten(-2)
        if format == "q5_k":
            codes = codes | _bits(blocks[..., 16:48], 1, *range(8)) << 4
        return (codes.float().unflatten(-1, (8, 32)) * scales[..., None] - minima[..., None]).flatten(-2)
    codes = _bits(blocks[..., -16:], 4, 0, 4)
    if format != "q4_1":
        fifths = blocks[..., -20:-16, None] >> torch.arange(8, dtype=torch.uint8, device=blocks.device) & 1
        codes = codes | fifths.flatten(-2) << 4
    return (codes.float() - 16) * d if format == "q5_0" else codes.float() * d + least
