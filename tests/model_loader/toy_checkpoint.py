# SPDX-License-Identifier: Apache-2.0
"""A toy architecture that wants whatever its config lists, and folders that hold it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.parameter import WeightSpec, collect_weight_specs


class Held(nn.Module):
    """Wants the tensors of ``shapes``; holds the rows ``rank`` of ``parts`` of each, in a buffer made before loading.

    ``events`` records each take and the processing, by name.
    """

    def __init__(self, label: str, shapes: dict[str, tuple[int, ...]], options: dict[str, Any], toy: Any) -> None:
        super().__init__()
        self.label, self.shapes, self.options, self.toy = label, shapes, options, toy
        self.held: dict[str, torch.Tensor] = {}

    def weight_specs(self) -> list[WeightSpec]:
        return [WeightSpec(n, s, self._taker(n), **self.options.get(n, {})) for n, s in self.shapes.items()]

    def _taker(self, name: str):
        def take(loaded: torch.Tensor) -> None:
            assert loaded.is_contiguous()
            assert loaded.device.type == "cpu"
            rows = loaded.shape[0] // self.toy.parts
            kept = torch.empty(rows, *loaded.shape[1:], dtype=loaded.dtype)
            kept.copy_(loaded[self.toy.rank * rows : (self.toy.rank + 1) * rows])
            self.held[name] = kept
            self.toy.events.append(name)

        return take

    def process_weights_after_loading(self) -> None:
        self.toy.events.append(f"processed {self.label}")


class ToyModel(nn.Module):
    """``hf_config``: ``modules`` {label: {tensor name: shape}}, ``options`` {tensor name: WeightSpec fields}."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        toy = vllm_config.model_config.hf_config
        self.ignored_weights = toy.ignored
        self.parts_of = nn.ModuleList(Held(label, s, toy.options, toy) for label, s in toy.modules.items())

    def weight_specs(self) -> list[WeightSpec]:
        return collect_weight_specs(self)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor for part in self.parts_of for name, tensor in part.held.items()}


def toy_config(
    model: str | Path,
    modules: dict[str, dict[str, tuple[int, ...]]],
    *,
    options: dict[str, Any] | None = None,
    ignored: tuple[str, ...] = (),
    dtype: torch.dtype = torch.float32,
    rank: int = 0,
    parts: int = 1,
    **model_fields: Any,
) -> VllmConfig:
    hf_config = SimpleNamespace(
        modules=modules, options=options or {}, ignored=ignored, rank=rank, parts=parts, events=[]
    )
    fields = {"architecture": "ToyModel", "max_model_len": 16, "tokenizer": "none"} | model_fields
    return VllmConfig(ModelConfig(model=str(model), hf_config=hf_config, dtype=dtype, **fields))


def random_tensors(modules: dict[str, dict[str, tuple[int, ...]]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {name: shape for part in modules.values() for name, shape in part.items()}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def write_folder(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> list[Path]:
    """A model folder of one file, or of ``shards`` files with an index; returns the weight files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return [folder / "model.safetensors"]
    names, weight_map = sorted(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        save_file({name: tensors[name] for name in names[i::shards]}, folder / file)
        weight_map |= dict.fromkeys(names[i::shards], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sorted(folder.glob("*.safetensors"))
