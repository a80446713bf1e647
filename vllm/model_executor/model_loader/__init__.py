# SPDX-License-Identifier: Apache-2.0
"""Build a model and fill it from a Hugging Face folder, a hub id, a GGUF file, or with dummy weights."""

from __future__ import annotations

import dataclasses
import time

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.kv_cache import load_cache_scales
from vllm.model_executor.model_loader.weight_update import HeldForms
from vllm.model_executor.model_loader.weight_utils import (
    StoredTensor,
    dummy_tensors,
    freed_memory_goes_back,
    load_weights,
    match_specs,
    read_safetensors,
    resolve_model_path,
    safetensors_files,
    without_extra_layers,
)
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_executor.parameter import WeightSpec

logger = init_logger(__name__)

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


def check_load_format(load_format: str) -> str:
    """``load_format`` in lower case; ``ValueError`` where there is no such format."""
    if str(load_format).lower() not in LOAD_FORMATS:
        raise ValueError(f"load_format={load_format!r}: choose one of {', '.join(LOAD_FORMATS)}")
    return load_format.lower()


def get_model(vllm_config: VllmConfig) -> nn.Module:
    """The model of ``vllm_config``, in eval mode, its weights loaded and processed.

    Building the module allocates no weights; they come through its ``WeightSpec``s, those that are stored quantised as
    they are. Names and shapes
    are checked against the files' headers before any data is read. Raises FileNotFoundError for a model, config or
    weights that are not there, ValueError for files that are corrupt or do not fit the model.
    """
    config = vllm_config.model_config
    check_load_format(config.load_format)
    start = time.perf_counter()
    model_cls, _ = ModelRegistry.resolve_model_cls(config.architecture)
    model = model_cls(vllm_config=vllm_config, prefix="")
    specs: list[WeightSpec] = model.weight_specs()  # type: ignore[operator]
    origin: str
    stored: list[StoredTensor]
    if config.load_format == "dummy":
        origin, stored = "dummy weights", dummy_tensors(specs, config.seed)
    else:
        path = resolve_model_path(config.model, config.revision)
        origin = str(path)
        if path.is_file():
            from vllm.model_executor.model_loader.gguf_loader import gguf_tensors

            stored = gguf_tensors(path)
        elif config.load_format == "gguf":
            raise ValueError(f"load_format='gguf' but model={config.model!r} is a folder; give the .gguf file's path")
        else:
            files = safetensors_files(path, getattr(config.hf_config, "transformers_weights", None))
            stored = read_safetensors(files, getattr(model, "transposed_experts", False))
    quantization = config.quant_config
    if (checkpoint_name := getattr(model, "checkpoint_name", None)) is not None:
        stored = [dataclasses.replace(tensor, name=checkpoint_name(tensor.name)) for tensor in stored]
    names = () if config.load_format == "dummy" else [tensor.name for tensor in stored]
    if vllm_config.cache_config.is_fp8:
        load_cache_scales(model, stored, quantization)
    if config.load_format != "dummy" and path.is_file():
        from vllm.model_executor.model_loader.gguf_loader import kept_quantised

        stored = kept_quantised(stored, specs, config.dtype)
    if quantization is not None:
        of_files = config.load_format != "dummy"
        stored = (quantization.adapt if of_files else quantization.quantised_in_place)(stored, specs)
        if not any(tensor.codes or tensor.unreadable for tensor in stored):
            logger.warning("the checkpoint is said to be quantised by %s, but no matrix is", quantization.method)
    model.held_forms = HeldForms(  # type: ignore[assignment]
        quantization,
        frozenset(tensor.name for tensor in stored if tensor.codes),
        HeldForms.by_matrix(quantization, names),
    )
    ignored = getattr(model, "ignored_weights", ())
    stored = without_extra_layers(stored, specs, ignored, origin)
    if (stand_in := getattr(model, "stand_in", None)) is not None:
        stored = stand_in(stored)
    pairs = match_specs(specs, stored, ignored, origin)
    with torch.no_grad(), freed_memory_goes_back():
        load_weights(model, pairs, config.dtype)
    logger.info("%d tensors of %s loaded in %.2f s", len(pairs), origin, time.perf_counter() - start)
    return model.eval()


__all__ = ["LOAD_FORMATS", "check_load_format", "get_model"]
