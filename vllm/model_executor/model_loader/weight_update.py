# SPDX-License-Identifier: Apache-2.0
"""New weights for a model that is loaded: from a trainer, tensor by tensor, into the memory of the old ones."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from vllm.model_executor.parameter import WeightSpec
from vllm.utils.suggestions import nearest

_REMEDY = "load an unquantised checkpoint, without quantization=, where weights are to change"


def update_weights(
    model: nn.Module, specs: Mapping[str, WeightSpec], weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype
) -> set[str]:
    """Take whole checkpoint tensors, on any device and in any order or number of calls; returns their names in
    ``specs``. Each rank keeps its shards of them.

    Raises:
        ValueError: a name that the model does not have, or another shape; tensors before it are taken.
    """
    rename = getattr(model, "checkpoint_name", lambda name: name)
    taken: set[str] = set()
    owner: Any = None
    for given, whole in weights:
        for name, tensor in _unstacked(given, whole, getattr(model, "transposed_experts", False)):
            spec = specs.get(rename(name))
            if spec is None:
                if any(re.search(pattern, name) for pattern in getattr(model, "ignored_weights", ())):
                    continue
                raise ValueError(f"load_weights: the model has no weight {name!r}{nearest(name, specs)}")
            if tuple(tensor.shape) != tuple(spec.shape):
                raise ValueError(
                    f"load_weights: {name} has shape {tuple(tensor.shape)}, the model's is {tuple(spec.shape)}; give "
                    "the whole tensor, not a rank's shard"
                )
            if spec.quantized and getattr(spec.owner, "is_quantized", False):
                raise ValueError(f"load_weights: {name} is held quantised, which new weights cannot change; {_REMEDY}")
            taken.add(spec.name)
            if not spec.needed:
                continue
            # A module is packed again when another one's tensors begin: those of one module mostly come together.
            if owner is not None and owner is not spec.owner:
                _process(owner)
            owner = spec.owner
            rows = tensor.detach() if spec.rows is None else tensor.detach()[spec.rows]
            spec.take(rows.to("cpu", spec.dtype or dtype).contiguous())
    if owner is not None:
        _process(owner)
    return taken


def _process(module: Any) -> None:
    if hasattr(module, "process_weights_after_loading"):
        module.process_weights_after_loading()


def _unstacked(name: str, tensor: torch.Tensor, transposed: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """The parts by expert where ``tensor`` stacks them: ``….experts.gate_up_proj`` [E, 2·I, H], ``….down_proj``
    [E, H, I]; transformers keeps experts so. ``transposed``: as ``read_safetensors`` has it."""
    stack, _, kind = name.rpartition(".")
    if not stack.endswith(".experts") or kind not in ("gate_up_proj", "down_proj") or tensor.dim() != 3:
        yield name, tensor
        return
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    for expert in range(tensor.shape[0]):
        every = [tensor[expert, :, i :: len(parts)].T for i in range(len(parts))]
        for part, rows in zip(parts, every if transposed else tensor[expert].chunk(len(parts)), strict=True):
            yield f"{stack}.{expert}.{part}.weight", rows


def drop_weights(model: nn.Module) -> None:
    """Free what ``weight_attributes`` of the modules name; ``ValueError`` where some could not come back."""
    if any(getattr(module, "is_quantized", False) for module in model.modules()):
        raise ValueError(
            f"weights that are held quantised cannot be dropped, as load_weights cannot bring them; {_REMEDY}"
        )
    for module, attribute, _ in _held(model):
        setattr(module, attribute, None)


def move_weights(model: nn.Module, device: torch.device) -> None:
    """Hold the weights on ``device`` instead."""
    for module, attribute, value in _held(model):
        setattr(module, attribute, _moved(value, device))


def _held(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    return [
        (module, attribute, value)
        for module in model.modules()
        for attribute in getattr(module, "weight_attributes", ())
        if (value := getattr(module, attribute)) is not None
    ]


def held_tensors(model: nn.Module) -> list[torch.Tensor]:
    """The weights, once each."""
    return list({id(tensor): tensor for _, _, value in _held(model) for tensor in _tensors(value)}.values())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(x, device) for x in value)
    if isinstance(value, slice):
        return value
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dataclasses.replace(value, **{n: v.to(device) for n, v in fields.items() if isinstance(v, torch.Tensor)})
