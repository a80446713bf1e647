# SPDX-License-Identifier: Apache-2.0
"""MXFP4 (Open Compute Project 2023, "Microscaling Formats"): e2m1 values, 32 of them with one power of two.

gpt-oss holds its experts so, all of a layer in one tensor, the rows of gate and up in turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from vllm.kernels.quantized import QuantizedWeight
from vllm.model_executor.layers.quantization import base
from vllm.model_executor.model_loader.weight_utils import StoredTensor
from vllm.model_executor.parameter import WeightSpec

_GROUP = 32


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """uint8 e -> 2 ** (e - 127), exact in bfloat16; 255 is NaN."""
    bits = exponents.to(torch.int16) << 7
    bits = torch.where(exponents == 0, 0x40, bits)
    return torch.where(exponents == 255, 0x7FC0, bits).to(torch.int16).view(torch.bfloat16)


def mxfp4_matrix(
    name: str,
    codes: StoredTensor,
    scales: StoredTensor,
    shape: tuple[int, int],
    expert: int | None = None,
    every: slice = slice(None),
) -> StoredTensor:
    """Matrix [N, K], ``shape``: of ``expert``, where the tensors stack several, those rows that are in ``every``."""
    (N, K), lead = shape, () if expert is None else codes.shape[:1]
    all_rows = N if every == slice(None) else 2 * N
    base.expect(codes, (*lead, all_rows, K // 2), (*lead, all_rows, K // _GROUP, _GROUP // 2))
    base.expect(scales, (*lead, all_rows, K // _GROUP))

    def part(tensor: StoredTensor, rows: base.Rows, columns: int) -> torch.Tensor:
        held = base.raw(tensor, None if expert is None else slice(expert, expert + 1))
        return base.take(held.view(torch.uint8).reshape(all_rows, columns)[every], rows)

    def read(dtype: torch.dtype, rows: base.Rows) -> QuantizedWeight:
        powers = powers_of_two(part(scales, rows, K // _GROUP).clone())
        held = part(codes, rows, K // 2)
        return base.checked_scales(
            name, powers, lambda s: QuantizedWeight("mxfp4", len(held), K, _GROUP, dtype, held, s)
        )

    return base.joined(codes, name.removesuffix(".weight"), shape, "mxfp4", _GROUP, read)


class Mxfp4Config(base.QuantizationConfig):
    method = "mxfp4"
    form = ("mxfp4", _GROUP)

    def matrix_of(self, name: str) -> str:
        return name.removesuffix("_blocks").removesuffix("_scales")

    def adapt(self, stored: Sequence[StoredTensor], specs: Sequence[WeightSpec]) -> list[StoredTensor]:
        by_name = {tensor.name: tensor for tensor in stored}
        return [
            one
            for tensor in stored
            if not tensor.name.endswith("_scales") or tensor.name.removesuffix("scales") + "blocks" not in by_name
            for one in (self._experts(tensor, by_name) if tensor.name.endswith("_blocks") else [tensor])
        ]

    def _experts(self, blocks: StoredTensor, by_name: Mapping[str, StoredTensor]) -> Iterator[StoredTensor]:
        stack, _, kind = blocks.name.removesuffix("_blocks").rpartition(".")
        scales = by_name.get(blocks.name.removesuffix("blocks") + "scales")
        if scales is None or len(blocks.shape) != 4 or kind not in ("gate_up_proj", "down_proj"):
            raise ValueError(
                f"{blocks.name} {list(blocks.shape)} has no {kind}_scales or is no stack of experts "
                "[E, N, K / 32, 16]; fetch the checkpoint again"
            )
        parts = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
        if kind == "down_proj":
            parts = {"down_proj": slice(None)}
        rows, columns = blocks.shape[1] // len(parts), blocks.shape[2] * _GROUP
        for expert in range(blocks.shape[0]):
            for name, every in parts.items():
                yield mxfp4_matrix(f"{stack}.{expert}.{name}.weight", blocks, scales, (rows, columns), expert, every)

    def matrix(self, name: str, found: dict[str, StoredTensor], shape: tuple[int, ...] | None) -> StoredTensor:
        raise NotImplementedError("experts come in stacks")
