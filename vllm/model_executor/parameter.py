# SPDX-License-Identifier: Apache-2.0
"""What a module wants from a checkpoint: each tensor's name and full shape, and how to take it in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, eq=False)
class WeightSpec:
    """One checkpoint tensor that a module wants.

    A module lists its own specs in ``weight_specs() -> list[WeightSpec]`` and may have
    ``process_weights_after_loading() -> None`` (pack, tie), which the loader calls once, as soon as every spec of
    the module was taken, or at the end for a module without specs. A model lists checkpoint tensors that it
    rightly leaves unread as ``ignored_weights: tuple[str, ...]``, regular expressions for ``re.search``.

    name: full checkpoint name, such as ``model.layers.0.self_attn.q_proj.weight``.
    shape: full checkpoint shape, before any slicing.
    take: called once with the tensor's ``rows``, on CPU, contiguous, in ``dtype``. Its memory is used again after the
        call: what is kept must be copied.
    dtype: None for the model's dtype.
    optional: the checkpoint may lack it; ``take`` is then never called.
    needed: False when this rank has no use for the data (an expert of another rank): presence and shape are
        checked, nothing is read and ``take`` is never called.
    owner: the module whose weights these are; ``collect_weight_specs`` fills it in.
    rows: those of the first dimension, a slice or indices in the order wanted, that this rank makes do with; None: all.
    quantized: ``take`` keeps a matrix that is stored quantised as it is, and is given those rows of it as a
        ``QuantizedWeight``, all columns; else the matrix is dequantised for it.
    cols: the columns of them that it keeps; None: all.
    alike: tensors of one owner that have this in common must all be stored in one format, or none of them.
    """

    name: str
    shape: tuple[int, ...]
    take: Callable[[Any], None]
    dtype: torch.dtype | None = None
    optional: bool = False
    needed: bool = True
    owner: nn.Module | None = None
    rows: slice | torch.Tensor | None = None
    quantized: bool = False
    cols: slice | None = None
    alike: str | None = None


def collect_weight_specs(root: nn.Module) -> list[WeightSpec]:
    """The specs of every submodule of ``root`` (``root`` itself excepted), each with its owner.

    A model implements ``weight_specs`` as ``return collect_weight_specs(self)``. Only leaves of that walk may list
    specs: a module that lists the specs of its children as well would have each of them twice, which the loader
    refuses.
    """
    specs: list[WeightSpec] = []
    for module in root.modules():
        if module is root or not hasattr(module, "weight_specs"):
            continue
        specs += [s if s.owner is not None else dataclasses.replace(s, owner=module) for s in module.weight_specs()]  # type: ignore[operator]
    return specs
