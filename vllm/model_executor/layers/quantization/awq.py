# SPDX-License-Identifier: Apache-2.0
"""AWQ checkpoints (Lin et al. 2023, arXiv:2306.00978), version "gemm": words along the outputs.

``qweight`` int32 [K, N / 8] and ``qzeros`` int32 [K / G, N / 8]: nibble j of a word is the column [0, 2, 4, 6, 1, 3, 5,
7][j] of its eight; ``scales`` [K / G, N].
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.kernels.quantized import QuantizedWeight
from vllm.model_executor.layers.quantization import base
from vllm.model_executor.model_loader.weight_utils import StoredTensor

_NIBBLE_OF_COLUMN = [0, 4, 1, 5, 2, 6, 3, 7]


def unpacked(words: Tensor) -> Tensor:
    """int32 [M, N / 8] -> uint8 [M, N], columns in order."""
    M = words.shape[0]
    return base.nibbles(words.view(torch.uint8)).view(M, -1, 8)[..., _NIBBLE_OF_COLUMN].view(M, -1)


def awq_matrix(
    name: str, codes: StoredTensor, zeros: StoredTensor, scales: StoredTensor, symmetric: bool
) -> StoredTensor:
    K, (groups, N) = codes.shape[0], scales.shape
    if K % 2 or not 0 < groups <= K or K % groups:
        raise ValueError(f"{codes.name} {list(codes.shape)} does not fit {scales.name} {list(scales.shape)}")
    group_size = K // groups
    base.expect(codes, (K, N // 8))
    base.expect(zeros, (groups, N // 8))

    def read(dtype: torch.dtype, rows: base.Rows) -> QuantizedWeight:
        of_rows = base.take(base.own(scales).T, rows).contiguous()
        z = base.unless_implied(name, base.take(unpacked(base.raw(zeros)).T, rows).contiguous(), "int4", symmetric)
        pairs = unpacked(base.raw(codes)).view(K // 2, 2, N)
        held = base.take((pairs[:, 0] | pairs[:, 1] << 4).T, rows).contiguous()
        return base.checked_scales(
            f"{name}.weight",
            of_rows,
            lambda s: QuantizedWeight("int4", len(held), K, group_size, dtype, held, s, z),
            signed=True,
        )

    return base.joined(codes, name, (N, K), "int4", group_size, read)
