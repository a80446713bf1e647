# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints with scales for an FP8 cache, and what transformers computes where its cache is rounded so."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import tiny_hybrids as hybrids
import tiny_models as tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

FP8 = torch.float8_e4m3fn
# Of keys and values, by layer: subnormals and numbers that are cut off are among what they make.
SCALES = [(0.037, 0.011), (0.5, 0.002), (0.009, 0.25), (1.7, 0.06)]


def _models(name: str) -> Any:
    return hybrids if name in hybrids.NAMES else tiny


@functools.cache
def checkpoint(name: str) -> str:
    """Checkpoint ``name`` with a ``k_scale`` and a ``v_scale`` in each layer with attention."""
    source = Path(_models(name).checkpoint(name))
    folder = source.with_name(f"{source.name}-fp8-cache")
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    for layer in {key.split(".self_attn.")[0] for key in tensors if ".self_attn." in key}:
        for which, scale in zip("kv", SCALES[int(layer.rsplit(".", 1)[1])], strict=True):
            tensors[f"{layer}.self_attn.{which}_scale"] = torch.tensor(scale)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


class RoundedCache(DynamicCache):
    """Keys and values, of latent attention both parts of its vector, as e4m3 holds them times ``scales[layer]``."""

    def __init__(self, model: Any, scales: list[tuple[float, float]] | None) -> None:
        super().__init__(config=model.config.get_text_config())
        latent = getattr(model.config, "kv_lora_rank", None)
        self.scales = [(k, k if latent else v) for k, v in scales] if scales else [(1.0, 1.0)] * 99

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        keys, values = (
            (x / torch.tensor(scale)).clamp(-448, 448).to(FP8).to(x.dtype) * torch.tensor(scale)
            for x, scale in zip((keys, values), self.scales[layer_idx], strict=True)
        )
        return super().update(keys, values, layer_idx, *args, **kwargs)


@functools.cache
def greedy(name: str, prompt_ids: tuple[int, ...], num_tokens: int, scaled: bool = True) -> tuple[int, ...]:
    """transformers' greedy continuation in fp32 over a rounded cache, with the scales of ``checkpoint`` or with 1.0."""
    model = _models(name).reference_model(name)
    cache, ids, found = RoundedCache(model, SCALES if scaled else None), torch.tensor([prompt_ids]), []
    with torch.inference_mode():
        for _ in range(num_tokens):
            logits = model(ids, cache=cache, use_cache=True).logits
            ids = logits[:, -1:].argmax(-1)
            found.append(int(ids))
    return tuple(found)
