# SPDX-License-Identifier: Apache-2.0
"""FP8 (e4m3) weights with a scale for the tensor, for each row, or for blocks of rows and columns (DeepSeek-AI 2024,
arXiv:2412.19437: 128 × 128, ``weight_scale_inv``, which multiplies).

Inputs stay in 16 bits but on devices that multiply FP8 by FP8, where each row is rounded by its own largest magnitude.
Stored scales of inputs are checked and not used, see ``base.check_input_scales``. Blocks have finer scales of inputs
than a row's, so there inputs are never rounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from vllm.kernels.quantized import QuantizedWeight, multiplies_fp8
from vllm.model_executor.layers.quantization import base
from vllm.model_executor.model_loader.weight_utils import StoredTensor


def fp8_matrix(
    name: str, found: Mapping[str, StoredTensor], scales: StoredTensor, block: tuple[int, int] | None, rounds: bool
) -> StoredTensor:
    """``block``: rows and columns of a scale, None where there is one for the tensor or for each row. ``rounds``:
    products round their inputs, where the device multiplies FP8."""
    codes = found["weight"]
    N, K = codes.shape
    in_blocks = block is not None and scales.shape == (-(-N // block[0]), -(-K // block[1]))
    if not in_blocks:
        base.expect(
            scales,
            *([(-(-N // block[0]), -(-K // block[1]))] if block else []),
            (), (1,), (1, 1), (N,), (N, 1),
        )  # fmt: skip
    rows_each, group_size = block if in_blocks and block is not None else (N // math.prod(scales.shape), K)
    activations = "fp8" if rounds and not in_blocks and multiplies_fp8(torch.get_default_device()) else None
    base.check_input_scales(name, found, activations is not None)

    def read(dtype: torch.dtype, rows: base.Rows) -> QuantizedWeight:
        of_blocks = base.raw(scales).float().reshape(-1, -(-K // group_size))
        of_rows = of_blocks[base.take(torch.arange(N, device="cpu"), rows) // rows_each]
        bits = base.raw(codes, rows).view(torch.uint8)
        return base.checked_scales(
            f"{name}.weight",
            of_rows,
            lambda s: QuantizedWeight("fp8", len(bits), K, min(group_size, K), dtype, bits, s, activations=activations),
        )

    return base.joined(codes, name, (N, K), "fp8", group_size, read)


class Fp8Config(base.QuantizationConfig):
    method = "fp8"
    anchors = ("weight",)
    parts = ("weight_scale_inv", "weight_scale", *base.INPUT_PARTS)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        if (fmt := str(config.get("fmt") or "e4m3")) not in ("e4m3", "float8_e4m3fn"):
            raise ValueError(f"quantization_config has fmt={fmt!r}; only e4m3 is supported")
        block = config.get("weight_block_size")
        if block is not None and not (len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
            raise ValueError(
                f"quantization_config has weight_block_size={block!r}; needed are two sizes, as [128, 128]"
            )
        self.block = None if block is None else (block[0], block[1])
        self.form = ("fp8", self.block[1] if self.block else 1 << 62)

    def is_anchor(self, tensor: StoredTensor, leaf: str) -> bool:
        return leaf == "weight" and tensor.dtype is base.FP8 and len(tensor.shape) == 2

    def matrix(self, name: str, found: dict[str, StoredTensor], shape: tuple[int, ...] | None) -> StoredTensor:
        inverse = "weight_scale_inv" in found or (self.block is not None and "weight_scale" not in found)
        scales = base.part(found, "weight_scale_inv" if inverse else "weight_scale", name)
        return fp8_matrix(name, found, scales, self.block, True)
