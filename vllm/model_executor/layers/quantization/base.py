# SPDX-License-Identifier: Apache-2.0
"""What the formats have in common: joining the tensors of a matrix, and its faults."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from vllm.kernels.quantized import FORMATS, QuantizedWeight, dequantize, quantize
from vllm.logger import init_logger, log_once
from vllm.model_executor.model_loader.weight_utils import StoredCodes, StoredTensor
from vllm.model_executor.parameter import WeightSpec

logger = init_logger(__name__)

Rows = slice | Tensor | None
FP8 = torch.float8_e4m3fn
# What checkpoints may give for the inputs of a matrix.
INPUT_PARTS = ("input_scale", "input_scale_ub", "input_zero_point", "activation_scale")
# What decides more than it computes: embeddings, heads, routers, and the decays and strengths of linear attention.
KEPT = re.compile(r"(^|\.)(embed_tokens|lm_head|gate|router|shared_expert_gate|in_proj_(a|b|ba))\.weight$")


class QuantizationConfig(ABC):
    """What a checkpoint says of its quantisation (``quantization_config``), and how its tensors are read.

    ``anchors``: what follows a matrix's name in that of the tensor that makes it a quantised one; ``parts``: of others.
    ``online``: floats are quantised as they are read. ``form``: format and group size that most matrices are said to
    have.

    Raises:
        ValueError: on construction, for options that are not supported.
    """

    method: str
    anchors: ClassVar[tuple[str, ...]] = ()
    parts: ClassVar[tuple[str, ...]] = ()
    online: ClassVar[bool] = False
    form: tuple[str, int] = ("int8", 1 << 62)

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)

    @classmethod
    def get_name(cls) -> str:
        return cls.method

    def __repr__(self) -> str:
        """The same on all ranks of one checkpoint, which compare it."""
        return f"{self.method} {json.dumps(self.config, sort_keys=True, default=str)}"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantizationConfig:
        return cls(config)

    def matrix_of(self, name: str) -> str | None:
        """The matrix that stored tensor ``name`` is a part of, itself where of none; None for what is never used."""
        base, _, leaf = name.rpartition(".")
        if leaf in INPUT_PARTS:
            return None
        return base if leaf in (*self.anchors, *self.parts) else name

    def is_anchor(self, tensor: StoredTensor, leaf: str) -> bool:
        return leaf in self.anchors

    @abstractmethod
    def matrix(self, name: str, found: dict[str, StoredTensor], shape: tuple[int, ...] | None) -> StoredTensor:
        """The matrix ``name`` (without ``.weight``) of the tensors ``found``, by what follows its name.

        ``shape`` is what the model wants, None where it wants no such matrix. Reads headers alone.

        Raises:
            ValueError: the tensors do not fit one another.
        """

    def adapt(self, stored: Sequence[StoredTensor], specs: Sequence[WeightSpec]) -> list[StoredTensor]:
        """``stored`` with the tensors of each quantised matrix joined to one; faults are in its ``unreadable``."""
        shapes = {spec.name: tuple(spec.shape) for spec in specs}
        bases = {t.name.rpartition(".")[0] for t in stored if self.is_anchor(t, t.name.rpartition(".")[2])}
        found: dict[str, dict[str, StoredTensor]] = {base: {} for base in bases}
        adapted: list[StoredTensor | str] = []
        for tensor in stored:
            base, _, leaf = tensor.name.rpartition(".")
            if base in bases and leaf in (*self.anchors, *self.parts):
                if self.is_anchor(tensor, leaf):
                    adapted.append(base)
                found[base][leaf] = tensor
            else:
                adapted.append(tensor)
        joined = iter([self._joined(x, found[x], shapes.get(f"{x}.weight")) for x in adapted if isinstance(x, str)])
        return [next(joined) if isinstance(x, str) else x for x in adapted]

    def _joined(self, name: str, found: dict[str, StoredTensor], shape: tuple[int, ...] | None) -> StoredTensor:
        try:
            return self.matrix(name, found, shape)
        except ValueError as error:
            anchor = next(t for leaf, t in found.items() if self.is_anchor(t, leaf))
            return dataclasses.replace(
                anchor, name=f"{name}.weight", shape=shape or anchor.shape, unreadable=str(error), read_rows=None
            )

    def quantised_in_place(self, stored: Sequence[StoredTensor], specs: Sequence[WeightSpec]) -> list[StoredTensor]:
        """``stored`` with those float matrices quantised to ``form`` as they are read that have to be, or that releases
        quantise."""
        return quantised_while_read(stored, specs, *self.form, KEPT.search)


def part(found: Mapping[str, StoredTensor], leaf: str, of: str) -> StoredTensor:
    """``found[leaf]``; ``ValueError`` where matrix ``of`` lacks it."""
    if leaf not in found:
        raise ValueError(f"{of} is stored quantised, but {of}.{leaf} is missing; fetch the checkpoint again")
    return found[leaf]


def check_input_scales(name: str, found: Mapping[str, StoredTensor], rounded: bool) -> None:
    """See to the static scales of the inputs of matrix ``name``, which are not used: what is larger than at calibration
    would be cut off. ``rounded``: whether products round their inputs.

    Raises:
        ValueError: one is NaN, infinite, or not above 0.
    """
    for leaf in INPUT_PARTS:
        if leaf not in found or leaf.endswith("zero_point"):
            continue
        scales = raw(found[leaf]).float()
        if not (scales.isfinite() & (scales > 0)).all():
            raise ValueError(
                f"{name}.{leaf} is {scales.flatten()[:4].tolist()}, which cannot be scales of inputs: the checkpoint "
                "is damaged or was calibrated with a fault; fetch it again, or remove these tensors: they are not used"
            )
        how = "each row has its own scale, found as it comes" if rounded else "inputs stay in the model's dtype"
        log_once(logger, logging.INFO, f"static input scales of the checkpoint ({leaf}) are not used: {how}")


def joined(
    anchor: StoredTensor,
    name: str,
    shape: tuple[int, int],
    format: str,
    group_size: int,
    read: Callable[[torch.dtype, Rows], QuantizedWeight],
    ordered: Callable[[], bool] = bool,
) -> StoredTensor:
    """The matrix ``name`` as one stored tensor, at the place of ``anchor``."""

    def whole(dtype: torch.dtype) -> Tensor:
        return dequantize(read(dtype, None)).to(dtype)

    codes = StoredCodes(format, min(group_size, shape[1]), read, ordered)
    return StoredTensor(f"{name}.weight", shape, whole, codes=codes)


def expect(tensor: StoredTensor, *shapes: tuple[int, ...]) -> None:
    if tensor.shape not in shapes:
        raise ValueError(
            f"{tensor.name} has shape {list(tensor.shape)}, needed {' or '.join(str(list(s)) for s in shapes)}"
        )


def raw(tensor: StoredTensor, rows: Rows = None) -> Tensor:
    """Those rows as they are stored, in memory that the next read uses again."""
    assert tensor.dtype is not None, f"{tensor.name} has no type"
    return tensor.rows(tensor.dtype, rows)


def own(tensor: StoredTensor, rows: Rows = None) -> Tensor:
    return raw(tensor, rows).clone()


def take(tensor: Tensor, rows: Rows) -> Tensor:
    return tensor if rows is None else tensor[rows]


def checked_scales(
    name: str, scales: Tensor, weight: Callable[[Tensor], QuantizedWeight], signed: bool = False
) -> QuantizedWeight:
    """``weight(scales)``, where these can be scales.

    Raises:
        ValueError: one is NaN, infinite, negative where the format has none such, or 0 in a group that is not.
    """
    wide = scales.float()
    bad = ~wide.isfinite() if signed else ~(wide.isfinite() & (wide >= 0))
    made = weight(scales)
    if (wide == 0).any():
        alone = dataclasses.replace(made, scales=(scales == 0).to(scales.dtype), input_order=None)
        nonzero = dequantize(alone) != 0
        width = -nonzero.shape[1] % made.group_size
        nonzero = torch.nn.functional.pad(nonzero, (0, width)).unflatten(1, (scales.shape[1], -1)).any(-1)
        bad |= nonzero
    if bad.any():
        where = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{name}: {int(bad.sum())} of {bad.numel()} scales cannot be, the first is {wide[tuple(where)].item()} for "
            f"row {where[0]}, group {where[1]}; the checkpoint is damaged or was quantised with a fault: fetch it "
            "again, or quantise the model anew"
        )
    return made


def nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., n] -> [..., 2 n], the low half first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def unless_implied(name: str, zeros: Tensor, format: str, symmetric: bool) -> Tensor | None:
    """None where the config says ``symmetric``: by what all ranks know, as they exchange experts.

    Raises:
        ValueError: it says so, but ``zeros`` are others than the format implies.
    """
    if not symmetric:
        return zeros
    if other := int((zeros != FORMATS[format].zero).sum()):
        raise ValueError(
            f"{name}.weight: the config says sym=true, but {other} of {zeros.numel()} zero points are others than the "
            'middle; put "sym": false into the quantization_config of config.json'
        )
    return None


def quantised_while_read(
    stored: Sequence[StoredTensor], specs: Sequence[WeightSpec], format: str, group_size: int, skip: Any = None
) -> list[StoredTensor]:
    wanted = {spec.name: spec for spec in specs}

    def quantised(tensor: StoredTensor) -> StoredTensor:
        spec = wanted.get(tensor.name)
        if spec is None or not spec.quantized or tensor.codes or tensor.unreadable or (skip and skip(tensor.name)):
            return tensor

        def read(dtype: torch.dtype, rows: Rows) -> QuantizedWeight:
            weight = quantize(tensor.rows(dtype, rows), format, group_size, dtype)
            assert weight.scales is not None, f"{format} has scales"
            return checked_scales(tensor.name, weight.scales, lambda _: weight)

        codes = StoredCodes(format, min(group_size, tensor.shape[1]), read)
        return dataclasses.replace(tensor, codes=codes)

    return [quantised(tensor) for tensor in stored]
