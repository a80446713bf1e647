# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints: what each format's tensors mean, as the one form of ``vllm.kernels.quantized``.

A format joins the stored tensors of one matrix, codes, scales and what else it has, to one stored tensor ``….weight``
of the matrix's true shape. Whether a matrix is quantised its tensors say: configs list exceptions, often wrongly.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.base import QuantizationConfig
from vllm.utils.suggestions import nearest

logger = init_logger(__name__)

# quant_method → (module, class)
_METHODS = {
    "fp8": ("fp8", "Fp8Config"),
    "fbgemm_fp8": ("fp8", "Fp8Config"),
    "compressed-tensors": ("compressed_tensors", "CompressedTensorsConfig"),
    "gptq": ("gptq", "GPTQConfig"),
    "awq": ("gptq", "AWQConfig"),
    "auto-round": ("auto_round", "AutoRoundConfig"),
    "mxfp4": ("mxfp4", "Mxfp4Config"),
}
# Names of kernels and of older releases → the format's.
_ALIASES = {
    "gptq_marlin": "gptq",
    "gptqmodel": "gptq",
    "awq_marlin": "awq",
    "auto_round": "auto-round",
    "intel/auto-round": "auto-round",
    "inc": "auto-round",
    "compressed_tensors": "compressed-tensors",
}
ONLINE = ("fp8", "int8")
QUANTIZATION_METHODS = (*_METHODS, "int8", "gguf")
# Where releases from before ``quantization_config`` keep the same.
_OLD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "quantization_config.json": "auto-round"}


def get_quantization_config(quantization: str) -> type[QuantizationConfig]:
    """The class that reads the format ``quantization``; ``ValueError`` where there is none."""
    name = _ALIASES.get(quantization, quantization)
    if name not in _METHODS:
        raise ValueError(
            f"quantization {quantization!r} is not supported{nearest(str(name), _METHODS)}; supported: "
            f"{', '.join(QUANTIZATION_METHODS)}"
        )
    module, cls = _METHODS[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), cls)


def declared_quantization(hf_config: Any, folder: Path) -> dict[str, Any] | None:
    """What the checkpoint says of its quantisation, ``quant_method`` included; None where it says nothing."""
    text = hf_config.get_text_config(decoder=True)
    for config in (hf_config, text):
        for key in ("quantization_config", "compression_config"):
            declared: Any = getattr(config, key, None)
            if hasattr(declared, "to_dict"):
                declared = declared.to_dict()
            if declared:
                method = declared.get("quant_method") or ("compressed-tensors" if "config_groups" in declared else None)
                return {**declared, "quant_method": method}
    for name, method in _OLD_FILES.items():
        if (file := folder / name).is_file():
            try:
                return {"quant_method": method, **json.loads(file.read_text())}
            except (ValueError, TypeError) as error:
                raise ValueError(f"{file} is no JSON mapping ({error}); fetch it again") from error
    return None


def resolve_quantization(asked: str | None, declared: Mapping[str, Any] | None) -> QuantizationConfig | None:
    """How the weights of a safetensors checkpoint that says ``declared`` of itself are held; None: unquantised.

    Raises:
        ValueError: the format is unknown, contradicts ``asked``, or has options that are not supported.
    """
    wish = None if asked is None else _ALIASES.get(str(asked).lower(), str(asked).lower())
    if declared is None:
        if wish is None:
            return None
        if wish in ONLINE:
            from vllm.model_executor.layers.quantization.online import OnlineConfig

            return OnlineConfig({"quant_method": wish})
        if wish in QUANTIZATION_METHODS:
            raise ValueError(
                f"quantization={asked!r}, but the checkpoint is not quantised: its config.json has no "
                f"quantization_config; leave quantization out, or give {' or '.join(ONLINE)} to quantise while loading"
            )
        get_quantization_config(wish)
    assert declared is not None
    method = declared.get("quant_method")
    if method is None:
        raise ValueError("the checkpoint's quantization_config names no quant_method; add it to config.json")
    config = get_quantization_config(str(method))(declared)
    if wish not in (None, config.method):
        raise ValueError(
            f"quantization={asked!r}, but the checkpoint is quantised by {method!r}; leave quantization out, or give a "
            "checkpoint of that format"
        )
    return config


__all__ = ["QUANTIZATION_METHODS", "QuantizationConfig", "get_quantization_config"]
