# SPDX-License-Identifier: Apache-2.0
"""New weights for a model that is loaded: from a trainer, tensor by tensor, into the memory of the old ones.

Those that are held quantised come as the checkpoint had them, and are quantised again where the engine did that itself;
what lies in one piece of memory, as q, k and v do, comes whole then, and is laid out anew.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm.kernels.quantized import QuantizedWeight, dequantize
from vllm.model_executor.model_loader.weight_utils import FLOATS, StoredTensor
from vllm.model_executor.parameter import WeightSpec
from vllm.utils.suggestions import nearest

if TYPE_CHECKING:
    from vllm.model_executor.layers.quantization import QuantizationConfig


@dataclass
class HeldForms:
    """How a model's weights came, and what has come of new ones.

    quantization: reads them; None with ``quantized`` names: what read them reads files alone.
    quantized: the specs' names of matrices that are held quantised.
    tensors: of the checkpoint, by the matrix that they are parts of; none where weights are made up.
    found: of matrices of which a part is still to come.
    """

    quantization: QuantizationConfig | None = None
    quantized: frozenset[str] = frozenset()
    tensors: Mapping[str, set[str]] = field(default_factory=dict)
    found: dict[str, dict[str, StoredTensor]] = field(default_factory=dict)

    @property
    def is_made_up(self) -> bool:
        return self.quantization is not None and not self.quantization.online and not self.tensors

    @staticmethod
    def by_matrix(quantization: QuantizationConfig | None, names: Iterable[str]) -> dict[str, set[str]]:
        grouped: dict[str, set[str]] = {}
        for name in names:
            if quantization is not None and (matrix := quantization.matrix_of(name)) is not None:
                grouped.setdefault(matrix, set()).add(name)
        return grouped

    def add(self, new: StoredTensor, specs: Mapping[str, WeightSpec]) -> list[StoredTensor]:
        """The weights that are complete with ``new``."""
        if self.quantization is None:
            return [new]
        matrix = self.quantization.matrix_of(new.name)
        if matrix is None:
            return []
        if self.is_made_up:
            raise ValueError(
                f"load_weights: {new.name}: made-up weights in the form of {self.quantization.method} do not tell "
                "which tensors a checkpoint has; load one, or quantization='fp8' or 'int8' of an unquantised one"
            )
        of = self.tensors.get(matrix, set())
        if len(of) < 2 or (new.name in self.quantized and not new.unreadable):
            return self._read([new], specs)
        found = self.found.setdefault(matrix, {})
        found[new.name] = new
        if found.keys() >= of:
            return self._read(list(self.found.pop(matrix).values()), specs)
        whole = new.read(new.dtype or torch.float32).clone()  # the trainer may use its memory again
        found[new.name] = _stored(new.name, whole)
        return []

    def _read(self, parts: Sequence[StoredTensor], specs: Mapping[str, WeightSpec]) -> list[StoredTensor]:
        assert self.quantization is not None
        names = {*(part.name for part in parts), f"{self.quantization.matrix_of(parts[0].name)}.weight"}
        return self.quantization.adapt(parts, [specs[name] for name in names if name in specs])

    def how_else(self, name: str) -> str:
        """What to do where ``name`` came as a float."""
        remedy = "load an unquantised checkpoint, with quantization='fp8' or 'int8' or without, to bring float weights"
        if self.quantization is None:
            return remedy
        of = ", ".join(sorted(self.tensors.get(name.removesuffix(".weight"), ())))
        return f"give its tensors as the checkpoint has them{of and f' ({of})'}, or {remedy}"


def _stored(name: str, tensor: torch.Tensor) -> StoredTensor:
    def rows(dtype: torch.dtype, rows: slice) -> torch.Tensor:
        return tensor.detach()[rows].to("cpu", dtype).contiguous()

    def read(dtype: torch.dtype) -> torch.Tensor:
        return tensor.detach().to("cpu", dtype).contiguous()

    unreadable = None if tensor.dtype in FLOATS else f"given as {tensor.dtype}"
    return StoredTensor(name, tuple(tensor.shape), read, unreadable, rows if tensor.dim() else None, tensor.dtype)


def update_weights(
    model: Any, specs: Mapping[str, WeightSpec], weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype
) -> set[str]:
    """Take whole checkpoint tensors, on any device and in any order or number of calls; returns the names in ``specs``
    of the weights that they make. Each rank keeps its shards of them. ``model.missing_weights`` are without them, and
    with what lies in one quantised piece of memory with one of them and has not come.

    Raises:
        ValueError: a name that the model does not have, another shape, or a form in which it does not hold the weight;
            tensors before it are taken.
    """
    held: HeldForms = model.held_forms
    missing: set[str] = model.missing_weights
    taken: set[str] = set()
    owner: Any = None

    def process(module: Any) -> None:
        whole = missing.isdisjoint(model.weights_of(module))
        if module is not None and whole and hasattr(module, "process_weights_after_loading"):
            module.process_weights_after_loading()

    for stored in _complete(model, specs, weights):
        spec = _fitting(stored, specs, held)
        if spec is None:
            if stored.name in held.tensors or any(re.search(pattern, stored.name) for pattern in model.ignored_weights):
                continue
            raise ValueError(f"load_weights: the model has no weight {stored.name!r}{nearest(stored.name, specs)}")
        taken.add(spec.name)
        if not spec.needed:
            continue
        # A module is packed again when another one's tensors begin: those of one module mostly come together.
        if owner is not spec.owner:
            process(owner)
        owner = spec.owner
        weight = stored.wanted(spec, dtype)
        if spec.quantized and missing.isdisjoint(of := model.weights_of(owner)) and not held.quantized.isdisjoint(of):
            missing |= {name for name in of if specs[name].quantized}
        if isinstance(weight, QuantizedWeight) and spec.name not in held.quantized:
            weight = dequantize(weight).to(weight.dtype)
        spec.take(weight)
        missing.discard(spec.name)
    process(owner)
    return taken


def _complete(
    model: Any, specs: Mapping[str, WeightSpec], weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[StoredTensor]:
    rename = getattr(model, "checkpoint_name", lambda name: name)
    for given, whole in weights:
        for name, tensor in _unstacked(given, whole, model.transposed_experts):
            yield from model.held_forms.add(_stored(rename(name), tensor), specs)


def _fitting(stored: StoredTensor, specs: Mapping[str, WeightSpec], held: HeldForms) -> WeightSpec | None:
    """Its spec, None where it has none; ``ValueError`` where it does not fit that."""
    spec, name = specs.get(stored.name), stored.name
    if spec is None:
        return None
    if stored.unreadable:
        raise ValueError(f"load_weights: {name}: {stored.unreadable}")
    if stored.shape != tuple(spec.shape):
        raise ValueError(
            f"load_weights: {name} has shape {stored.shape}, the model's is {tuple(spec.shape)}; give the whole "
            "tensor, not a rank's shard"
        )
    if stored.codes is None and name in held.quantized:
        raise ValueError(f"load_weights: {name} is held quantised, and came in {stored.dtype}; {held.how_else(name)}")
    if why := stored.cut(spec):
        raise ValueError(f"load_weights: {name}: {why}")
    return spec


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
    held: Any = model.held_forms
    if held.quantized and held.quantization is None:
        raise ValueError(
            f"{len(held.quantized)} weights, held as a GGUF file has them, cannot be dropped, as load_weights cannot "
            f"bring such; {held.how_else('')}"
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
