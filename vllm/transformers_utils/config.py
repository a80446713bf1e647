# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's description: its config, the text model in it, dtype, length and generation defaults."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vllm.logger import init_logger

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = init_logger(__name__)

DTYPES = {
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
}
HfOverrides = Mapping[str, Any] | Callable[["PretrainedConfig"], "PretrainedConfig"] | None

# Read by the sampler from generation_config.json, as upstream does; HF's max_new_tokens is max_tokens.
_SAMPLING_DEFAULTS = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "max_new_tokens",
)


def get_config(path: Path, trust_remote_code: bool = False, hf_overrides: HfOverrides = None) -> PretrainedConfig:
    """The config of the model in the folder or GGUF file ``path``, with ``hf_overrides`` applied.

    Raises ``FileNotFoundError`` for a folder without config.json and ``ValueError`` for a config that cannot be read.
    """
    if path.is_file():
        from vllm.model_executor.model_loader.gguf_loader import gguf_config

        config = gguf_config(path)
    else:
        config = _folder_config(path, trust_remote_code)
    if callable(hf_overrides):
        return hf_overrides(config)
    _override(config, hf_overrides or {})
    return config


def _folder_config(folder: Path, trust_remote_code: bool) -> PretrainedConfig:
    from transformers import AutoConfig

    file = folder / "config.json"
    if not file.is_file():
        ggufs = sorted(entry.name for entry in folder.glob("*.gguf"))
        hint = f"; to load {ggufs[0]}, give that file's path" if ggufs else ""
        raise FileNotFoundError(f"model={str(folder)!r} has no config.json; give a Hugging Face model folder{hint}")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # a broken config fails anywhere in transformers
        raise ValueError(
            f"{file} cannot be read: {type(error).__name__}: {error}. Fetch it again, or give trust_remote_code=True "
            "where the model brings its own code"
        ) from error


def _override(config: Any, overrides: Mapping[str, Any]) -> None:
    for key, value in overrides.items():
        inner = getattr(config, key, None)
        if isinstance(value, Mapping) and hasattr(inner, "to_dict"):
            _override(inner, value)
        else:
            setattr(config, key, value)


def get_hf_text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The text model's part of a multimodal ``config``, or ``config`` itself."""
    return config.get_text_config(decoder=True)


def get_architecture(config: PretrainedConfig) -> str:
    """The registry's name of the text model of ``config``.

    A multimodal checkpoint keeps its name where that is registered, for the names of its weights; otherwise it is named
    by its text part: X5ForConditionalGeneration holds an X5ForCausalLM. Where no name is registered, or there is none,
    the model type decides, as in transformers, unless the model brings its own code.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from vllm.model_executor.models.registry import ModelRegistry

    text = get_hf_text_config(config)
    names = list(getattr(text, "architectures", None) or getattr(config, "architectures", None) or ())
    if text is not config:
        names += [name.replace("ForConditionalGeneration", "ForCausalLM") for name in names]
    by_type = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(text.model_type)
    known = ModelRegistry.get_supported_archs()
    for name in names:
        if name in known:
            return name
    if by_type in known and not getattr(config, "auto_map", None):
        logger.warning("architectures=%s: none is known; loaded as %s, by its model type", names, by_type)
        return by_type
    if not names:
        raise ValueError(
            f'the config of type {config.model_type!r} names no architecture; add "architectures" to config.json or '
            "give hf_overrides={'architectures': [...]}"
        )
    return names[0]


def check_unquantised(config: PretrainedConfig) -> None:
    """Raise ``NotImplementedError`` for a checkpoint of quantised safetensors."""
    quantised = getattr(config, "quantization_config", None)
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        raise NotImplementedError(
            f"the checkpoint is quantised by {method!r}, which is not supported; use an unquantised one or a GGUF file"
        )


def resolve_dtype(dtype: str | torch.dtype, config: PretrainedConfig) -> torch.dtype:
    """``auto`` is the checkpoint's own dtype, but bfloat16 for fp32 and unnamed ones (upstream's rule on every device
    that has bfloat16); fp32 is asked for by name."""
    if isinstance(dtype, torch.dtype):
        wanted = dtype
    elif isinstance(dtype, str) and dtype.lower() == "auto":
        own = getattr(get_hf_text_config(config), "dtype", None) or getattr(config, "dtype", None) or torch.float32
        own = DTYPES.get(own, torch.float32) if isinstance(own, str) else own
        return own if own in (torch.float16, torch.bfloat16) else torch.bfloat16
    elif isinstance(dtype, str) and dtype.lower() in DTYPES:
        wanted = DTYPES[dtype.lower()]
    else:
        raise ValueError(f"dtype={dtype!r} is not one of auto, {', '.join(DTYPES)}")
    if wanted not in DTYPES.values():
        raise ValueError(f"dtype={dtype!r} is not one of auto, {', '.join(DTYPES)}")
    return wanted


def resolve_max_model_len(max_model_len: int | None, config: PretrainedConfig) -> int:
    """``max_model_len``, or by default what the config allows; ``ValueError`` where it is more than that."""
    text = get_hf_text_config(config)
    names = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
    limits = [(getattr(text, name), name) for name in names if getattr(text, name, None)]
    if not limits:
        if max_model_len is None:
            logger.warning("the config names no longest sequence; max_model_len is 2048")
        return max_model_len or 2048
    limit, name = min(limits)
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "linear":
        limit = int(limit * rope["factor"])
    if max_model_len is None:
        return limit
    if max_model_len < 1:
        raise ValueError(f"max_model_len={max_model_len}: give 1 or more, or leave it out for the model's {limit}")
    if max_model_len > limit:
        raise ValueError(
            f"max_model_len={max_model_len} exceeds the {limit} positions that the model knows ({name} in its config): "
            f"give {limit} or less; where the model is known to go further, hf_overrides={{'{name}': {max_model_len}}}"
        )
    return max_model_len


def get_generation_config(path: Path, source: str, overrides: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """End tokens and sampling defaults of a model.

    ``source``: ``auto`` reads ``generation_config.json`` beside the model at ``path``, where it has one; ``vllm`` takes
    only the end tokens of it; anything else is a folder to read it from. Without the file the end tokens come from
    ``config``. ``overrides`` go above all.
    """
    folder = path if source in ("auto", "vllm") else Path(source)
    file = folder / "generation_config.json"
    if file.is_file():
        try:
            found = json.loads(file.read_text())
        except ValueError as error:
            raise ValueError(f"{file} is no JSON ({error}); repair it or pass generation_config='vllm'") from error
    elif source in ("auto", "vllm"):
        found = {"eos_token_id": getattr(get_hf_text_config(config), "eos_token_id", None)}
    else:
        raise FileNotFoundError(f"generation_config={source!r}: no {file}; give 'auto', 'vllm' or a folder with it")
    if source == "vllm":
        found = {"eos_token_id": found.get("eos_token_id")}
    return {**found, **overrides}


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``SamplingParams`` that ``generation_config`` sets."""
    found = {name: generation_config[name] for name in _SAMPLING_DEFAULTS if generation_config.get(name) is not None}
    if "max_new_tokens" in found:
        found["max_tokens"] = found.pop("max_new_tokens")
    return found
