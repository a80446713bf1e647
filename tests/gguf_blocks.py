# SPDX-License-Identifier: Apache-2.0
"""Random matrices in the kinds of GGUF's blocks, and a plain rounding of given ones to each."""

from __future__ import annotations

import numpy as np
import torch

from vllm.kernels.blocks import UNITS
from vllm.kernels.quantized import FORMATS, QuantizedWeight

FORMS = tuple(UNITS)


def random_blocks(
    format: str, *shape: int, dtype: torch.dtype = torch.float32, gated: bool = False, size: float = 0.01
) -> QuantizedWeight:
    """[(E,) N, K], any bits as codes and factors; units of about ``size``."""
    (*rows, K), (columns, width, _, _) = shape, FORMATS[format]
    blocks = torch.randint(0, 256, (*rows, K // columns, width), dtype=torch.uint8)
    for at in UNITS[format]:
        unit = (torch.rand(*rows, K // columns, 1) + 0.5) * size
        blocks[..., at : at + 2] = unit.half().view(torch.uint8)
    return QuantizedWeight(format, shape[-2], K, columns, dtype, blocks.flatten(-2), gated=gated)


def normal_blocks(format: str, *shape: int, dtype: torch.dtype = torch.float32, gated: bool = False) -> QuantizedWeight:
    """[(E,) N, K], those of a normal distribution of variance 1 / K."""
    w = (torch.randn(*shape) / shape[-1] ** 0.5).numpy()
    codes = torch.from_numpy(round_to(format.upper(), w))
    return QuantizedWeight(format, shape[-2], shape[-1], FORMATS[format].columns, dtype, codes, gated=gated)


def _nibbles(codes: np.ndarray, run: int) -> np.ndarray:
    """[..., n] -> [..., n / 2]: of every 2 * run codes the first ones in the low halves."""
    halves = codes.reshape(*codes.shape[:-1], -1, 2, run)
    return (halves[..., 0, :] | halves[..., 1, :] << 4).reshape(*codes.shape[:-1], -1)


def _bytes(values: np.ndarray, dtype: type) -> np.ndarray:
    return np.ascontiguousarray(values.astype(dtype)).view(np.uint8)


def round_to(kind: str, w: np.ndarray) -> np.ndarray:
    """float32 [..., K] -> uint8 [..., bytes], as the kind's layout says: K kinds, which gguf only reads."""
    if kind not in ("Q4_K", "Q5_K", "Q6_K"):
        import gguf  # what else is here runs on devices too, without it

        return gguf.quants.quantize(w, gguf.GGMLQuantizationType[kind])
    blocks = w.reshape(*w.shape[:-1], -1, 256)
    if kind == "Q6_K":
        parts = blocks.reshape(*blocks.shape[:-1], 16, 16)
        scale = np.abs(parts).max(-1) / 31
        d = (np.maximum(scale.max(-1, keepdims=True), 1e-8) / 127).astype(np.float16)
        factor = np.clip(np.round(scale / d.astype(np.float32)), 1, 127)
        codes = np.round(parts / (factor * d.astype(np.float32))[..., None]).clip(-32, 31).astype(np.int64) + 32
        halves = codes.astype(np.uint8).reshape(*blocks.shape[:-1], 2, 4, 32)
        low, top = halves & 15, halves >> 4
        low = low[..., :2, :].reshape(*low.shape[:-2], 64) | low[..., 2:, :].reshape(*low.shape[:-2], 64) << 4
        top = top[..., 0, :] | top[..., 1, :] << 2 | top[..., 2, :] << 4 | top[..., 3, :] << 6
        parts_of = [low.reshape(*blocks.shape[:-1], 128), top.reshape(*blocks.shape[:-1], 64)]
        packed = np.concatenate([*parts_of, _bytes(factor, np.int8), _bytes(d, np.float16)], -1)
        return packed.reshape(*w.shape[:-1], -1)
    most = 15 if kind == "Q4_K" else 31
    parts = blocks.reshape(*blocks.shape[:-1], 8, 32)
    least = np.maximum(-parts.min(-1), 0)
    scale = (parts.max(-1).clip(0) + least) / most
    d, dmin = ((np.maximum(x.max(-1, keepdims=True), 1e-8) / 63).astype(np.float16) for x in (scale, least))
    factor, minimum = (
        np.clip(np.round(x / np.maximum(unit.astype(np.float32), 1e-8)), 0, 63).astype(np.uint8)
        for x, unit in ((scale, d), (least, dmin))
    )
    step = np.maximum(factor * d.astype(np.float32), 1e-9)[..., None]
    codes = np.round((parts + (minimum * dmin.astype(np.float32))[..., None]) / step).clip(0, most).astype(np.uint8)
    twelve = [
        factor[..., :4] | factor[..., 4:] >> 4 << 6,
        minimum[..., :4] | minimum[..., 4:] >> 4 << 6,
        factor[..., 4:] & 15 | (minimum[..., 4:] & 15) << 4,
    ]
    fifth = [sum((codes[..., i, :] >> 4) << i for i in range(8))] if kind == "Q5_K" else []
    low = _nibbles((codes & 15).reshape(*blocks.shape[:-1], 256), 32)
    packed = np.concatenate([_bytes(d, np.float16), _bytes(dmin, np.float16), *twelve, *fifth, low], -1)
    return packed.reshape(*w.shape[:-1], -1).astype(np.uint8)
