# SPDX-License-Identifier: Apache-2.0
"""The scales of an FP8 KV cache: one number for a layer's keys and one for its values, as checkpoints name them."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.model_executor.layers.quantization.base import QuantizationConfig
    from vllm.model_executor.model_loader.weight_utils import StoredTensor

logger = init_logger(__name__)

# Of the layer itself, its attention or a projection: ``k_scale``, ``v_scale``; ``kv_scale`` is both; ``k_proj`` and
# ``v_proj`` may have theirs as the scale of their output.
_SCALE = re.compile(r"(.+\.self_attn)\.(?:(?:\w+\.)?(k|v|kv)(?:_cache)?_scale|(k|v)_proj\.output_scale)")
_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
_AUTO = "or leave the cache in the model's dtype with kv_cache_dtype='auto', which reads no scales"


def cached_in_fp8(model: nn.Module) -> Iterator[Any]:
    """The layers of ``model`` whose cache may be FP8."""
    return (layer for layer in model.modules() if hasattr(layer, "cache_dtype"))


def load_cache_scales(
    model: nn.Module, stored: Sequence[StoredTensor], quantization: QuantizationConfig | None
) -> None:
    """Give each layer the scales that ``stored`` has for it; one without keeps 1.0. Logs which.

    Raises:
        ValueError: a scale is no positive number, or not one for all heads; one of two is missing; the checkpoint was
            calibrated for a cache of another format.
    """
    scheme = (quantization.config.get("kv_cache_scheme") if quantization is not None else None) or {}
    if other := {key: scheme[key] for key, usual in _SCHEME.items() if scheme.get(key, usual) != usual}:
        raise ValueError(
            f"the checkpoint's kv_cache_scheme has {other}, kv_cache_dtype='fp8' takes {_SCHEME}; give another "
            f"checkpoint, {_AUTO}"
        )
    layers = {layer.layer_name.removesuffix(".attn"): layer for layer in cached_in_fp8(model)}
    found: dict[str, dict[str, float]] = {}
    for tensor in stored:
        if (match := _SCALE.fullmatch(tensor.name)) and match[1] in layers:
            found.setdefault(match[1], {})[match[2] or match[3]] = _number(tensor)
    used = []
    for name, scales in found.items():
        for which in ("k",) if layers[name].v_scale is None else ("k", "v"):
            if (scale := scales.get(which, scales.get("kv"))) is None:
                raise ValueError(
                    f"{name}.{which}_scale is missing beside {', '.join(f'{x}_scale' for x in scales)}; fetch the "
                    f"checkpoint again, {_AUTO}"
                )
            setattr(layers[name], f"{which}_scale", scale)
            used.append(scale)
    if not found:
        logger.info("KV cache in FP8 (e4m3): no scales in the checkpoint, 1.0 for all layers")
        return
    rest = len(layers) - len(found)
    logger.log(
        logging.WARNING if rest else logging.INFO,
        "KV cache in FP8 (e4m3): scales of the checkpoint for %d layers, %.3g to %.3g%s",
        len(found), min(used), max(used), f"; 1.0 for the other {rest}" if rest else "",
    )  # fmt: skip


def _number(tensor: StoredTensor) -> float:
    if tensor.unreadable or math.prod(tensor.shape) != 1:
        raise ValueError(
            f"{tensor.name} {list(tensor.shape)} is {tensor.unreadable or 'not one number'}; needed is one float for "
            f"all heads: calibrate the cache per tensor, {_AUTO}"
        )
    value = tensor.read(torch.float32).item()
    if not 0 < value < math.inf:
        raise ValueError(
            f"{tensor.name} is {value}, and a scale is a positive number; fetch the checkpoint again, calibrate it "
            f"anew, {_AUTO}"
        )
    return value
