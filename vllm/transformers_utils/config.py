# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's description: its config, the text model in it, dtype, length and generation defaults."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vllm import envs
from vllm.logger import init_logger

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = init_logger(__name__)

DTYPES = {
    "half": torch.float16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "fp32": torch.float32,
    "float32": torch.float32,
}
# The rope types whose angles are fixed only up to the length that the model was trained for.
LENGTH_DEPENDENT = ("dynamic",)
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


# What says how angles are scaled goes with the scaling; these belong to the model and outlive a new one.
_ROPE_OF_THE_MODEL = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
# Read although not every config class lists them.
_ALSO_READ = (*_ROPE_KEYS, "head_dim", "torch_dtype", "quantization_config", "full_attention_interval")


def get_config(path: Path, trust_remote_code: bool = False, hf_overrides: HfOverrides = None) -> PretrainedConfig:
    """The config of the model in the folder or GGUF file ``path``, read as if its config.json held ``hf_overrides``.

    An override may sit where the checkpoint has the key or flat at the top; one of a text model's keys reaches it
    either way. A rope override that names a ``rope_type`` replaces the scaling, any other changes what it names; the
    model's ``rope_theta`` stays unless it is given. ``hf_overrides`` itself is never changed.

    Raises ``FileNotFoundError`` for a folder without config.json and ``ValueError`` for a config that cannot be read.
    """
    if hf_overrides is not None and not callable(hf_overrides) and not isinstance(hf_overrides, Mapping):
        raise ValueError(f"hf_overrides={hf_overrides!r}: give a dict or a function from config to config")
    overrides = copy.deepcopy(dict(hf_overrides)) if isinstance(hf_overrides, Mapping) else {}
    if path.is_file():
        from vllm.model_executor.model_loader.gguf_loader import gguf_config

        config = gguf_config(path)
        # The list of layers is made from the other fields; it is made anew from the changed ones.
        stored = {key: value for key, value in config.to_dict().items() if key != "layer_types"}
    else:
        config, stored = _folder_config(path, trust_remote_code, overrides.get("model_type"))
    if overrides:
        try:
            config = type(config).from_dict(_override(config, stored, _place_overrides(config, stored, overrides)))
        except Exception as error:
            raise ValueError(
                f"hf_overrides={hf_overrides} does not fit the config of {path}: {type(error).__name__}: {error}"
            ) from error
    if callable(hf_overrides):
        config = _apply(hf_overrides, config)
    text = get_hf_text_config(config)
    if text is not config and getattr(config, "tie_word_embeddings", False):
        text.tie_word_embeddings = True
    return config


def _folder_config(
    folder: Path, trust_remote_code: bool, model_type: str | None
) -> tuple[PretrainedConfig, dict[str, Any]]:
    """The config of ``folder``, read as ``model_type`` where that is given, and what its file holds."""
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

    file = folder / "config.json"
    if not file.is_file():
        ggufs = sorted(entry.name for entry in folder.glob("*.gguf"))
        hint = f"; to load {ggufs[0]}, give that file's path" if ggufs else ""
        raise FileNotFoundError(f"model={str(folder)!r} has no config.json; give a Hugging Face model folder{hint}")
    try:
        stored, _ = PretrainedConfig.get_config_dict(folder)
        if model_type is not None:
            return CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(stored)), stored
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code), stored
    except Exception as error:  # a broken config fails anywhere in transformers
        raise ValueError(
            f"{file} cannot be read: {type(error).__name__}: {error}. Fetch it again, or give trust_remote_code=True "
            "where the model brings its own code"
        ) from error


def _place_overrides(config: Any, stored: Mapping[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """``overrides`` with those of the text model under its own key; a key of both goes to both."""
    text = get_hf_text_config(config)
    levels = [(config, _names(config, stored))]
    if text is not config:
        place = next(name for name in config.sub_configs if getattr(config, name, None) is text)
        levels.append((text, _names(text, stored.get(place) or {}) - {"model_type"}))
    known = set().union(*(names for _, names in levels))
    for key in sorted(overrides.keys() - known):
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
        logger.warning(
            "hf_overrides has %r, which %s does not define: no model here reads it%s",
            key,
            type(text).__name__,
            f"; did you mean {near[0]!r}?" if near else "",
        )
    if text is config:
        return overrides
    inner = {key: value for key, value in overrides.items() if key in levels[1][1]}
    outer = {key: value for key, value in overrides.items() if key in levels[0][1] or key not in inner}
    given = outer.pop(place, None) or {}
    return {**outer, place: {**inner, **given}}


def _names(config: Any, stored: Mapping[str, Any]) -> set[str]:
    """The keys that ``config`` has a use for."""
    names = {f.name for f in dataclasses.fields(config)} | stored.keys() | config.attribute_map.keys()
    return names | set(_ALSO_READ) if hasattr(config, "rope_parameters") else names


def _override(config: Any, stored: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """``stored``, the file's part that ``config`` was made from, as it is with ``overrides``."""
    changed = dict(stored)
    for key, value in overrides.items():
        inner = getattr(config, key, None)
        if key in _ROPE_KEYS:
            continue
        if isinstance(value, Mapping) and hasattr(inner, "to_dict"):
            value = _override(inner, stored.get(key) or {}, value)
        changed["dtype" if key == "torch_dtype" else key] = value
    if "num_hidden_layers" in overrides and "layer_types" not in overrides and changed.get("layer_types"):
        changed["layer_types"] = changed["layer_types"][: changed["num_hidden_layers"]]
    rope = {key: overrides[key] for key in _ROPE_KEYS if key in overrides}
    if rope:
        changed["rope_parameters"] = {
            kind: _override_rope({"rope_parameters": config.rope_parameters[kind]}, _rope_of(kind, rope))
            for kind in _rope_kinds(config)
        } or _override_rope(changed, rope)
        changed.pop("rope_scaling", None)
    return changed


def _rope_kinds(config: Any) -> list[str]:
    """The kinds of layers that have rotary embeddings of their own (Gemma 3), none where all share one."""
    return config.nested_rope_parameter_keys(getattr(config, "rope_parameters", None) or {})


def _rope_of(kind: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """What ``overrides`` say of the layers of ``kind``; what names no kind is of full attention, as in transformers."""
    found = {}
    for key, value in overrides.items():
        by_kind = isinstance(value, Mapping) and any(isinstance(inner, Mapping) for inner in value.values())
        if by_kind and kind in value:
            found[key] = value[kind]
        elif not by_kind and kind == "full_attention":
            found[key] = value
    return found


def _override_rope(stored: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The ``rope_parameters`` of ``stored`` under ``overrides``, whichever of the keys each of them uses."""
    old = {key: stored[key] for key in _ROPE_OF_THE_MODEL if key in stored}
    old |= stored.get("rope_scaling") or stored.get("rope_parameters") or {}
    new: dict[str, Any] = {}
    for key, value in sorted(overrides.items()):
        if key in ("rope_parameters", "rope_scaling"):
            new |= {"rope_type": "default"} if value is None else value
        else:
            new[key] = value
    if "rope_type" in new or "type" in new:
        old = {key: old[key] for key in _ROPE_OF_THE_MODEL if key in old}
    return old | new


def _apply(function: Callable[[Any], Any], config: PretrainedConfig) -> PretrainedConfig:
    text = get_hf_text_config(config)
    before, kinds = copy.deepcopy(getattr(text, "rope_parameters", None) or {}), _rope_kinds(text)
    kept = {key: before[key] for key in _ROPE_OF_THE_MODEL if before.get(key) is not None}
    changed = function(config)
    if not hasattr(changed, "get_text_config"):
        raise ValueError(f"hf_overrides returned {changed!r}: the function has to return the config")
    text = get_hf_text_config(changed)
    rope = getattr(text, "rope_parameters", None)
    if rope:
        flat = {key: value for key, value in vars(text).items() if key in _ROPE_OF_THE_MODEL}
        if kinds:
            given = {"rope_parameters": {key: value for key, value in rope.items() if value is not None}, **flat}
            text.rope_parameters = {
                kind: _override_rope({"rope_parameters": before[kind]}, _rope_of(kind, given)) for kind in kinds
            }
        else:
            text.rope_parameters = kept | {key: value for key, value in rope.items() if value is not None} | flat
        text.standardize_rope_params()
    return changed


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


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """The torch dtype that ``dtype`` names, None for ``auto``."""
    wanted = dtype
    if isinstance(dtype, str):
        if dtype.lower() == "auto":
            return None
        wanted = DTYPES.get(dtype.lower().removeprefix("torch."), dtype)
    if not isinstance(wanted, torch.dtype) or wanted not in DTYPES.values():
        raise ValueError(f"dtype={dtype!r} is not one of auto, {', '.join(DTYPES)}")
    return wanted


def resolve_dtype(dtype: str | torch.dtype, config: PretrainedConfig) -> torch.dtype:
    """``auto`` is the checkpoint's own dtype, but bfloat16 for fp32 and unnamed ones (upstream's rule on every device
    that has bfloat16); fp32 is asked for by name."""
    wanted = parse_dtype(dtype)
    if wanted is None:
        own = getattr(get_hf_text_config(config), "dtype", None) or getattr(config, "dtype", None) or torch.float32
        own = DTYPES.get(own, torch.float32) if isinstance(own, str) else own
        return own if own in (torch.float16, torch.bfloat16) else torch.bfloat16
    return wanted


def resolve_max_model_len(max_model_len: int | None, config: PretrainedConfig) -> int:
    """``max_model_len``, or what the config allows where it is None or −1.

    ``ValueError`` where it is more than that, unless ``VLLM_ALLOW_LONG_MAX_MODEL_LEN`` is set.
    """
    text = get_hf_text_config(config)
    names = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
    max_model_len = None if max_model_len == -1 else max_model_len
    name = next((name for name in names if getattr(text, name, None)), None)
    if max_model_len is not None and max_model_len < 1:
        raise ValueError(f"max_model_len={max_model_len}: give 1 or more, or 'auto' for what the model allows")
    if name is None:
        if max_model_len is None:
            logger.warning("the config names no longest sequence; max_model_len is 2048")
        return max_model_len or 2048
    limit = default = getattr(text, name)
    rope = getattr(text, "rope_parameters", None) or {}
    kind, factor = rope.get("rope_type", "default"), rope.get("factor")
    if kind == "linear":
        limit = default = int(limit * factor)
    elif kind == "yarn" and factor:
        limit = default = int(rope["original_max_position_embeddings"] * factor)
    elif kind == "longrope":
        default = min(limit, rope["original_max_position_embeddings"])
        if max_model_len is None and default < limit:
            logger.info("max_model_len is %d, that of longrope's short factors; the model knows %d", default, limit)
    if max_model_len is None or max_model_len <= limit:
        return max_model_len or default
    if kind in LENGTH_DEPENDENT:
        raise ValueError(
            f"max_model_len={max_model_len} exceeds the {limit} positions up to which the angles of rope_type={kind!r} "
            f"do not depend on the request's length, which is not supported: give {limit} or less"
        )
    if envs.VLLM_ALLOW_LONG_MAX_MODEL_LEN:
        logger.warning("max_model_len=%d exceeds the %d positions that the model knows", max_model_len, limit)
        return max_model_len
    scaled = f"{{'rope_type': 'yarn', 'factor': {math.ceil(max_model_len / limit)}.0, "
    scaled += f"'original_max_position_embeddings': {limit}}}"
    recipe = f", or scale its angles: hf_overrides={{'rope_parameters': {scaled}}}" if kind == "default" else ""
    raise ValueError(
        f"max_model_len={max_model_len} exceeds the {limit} positions that the model knows ({name} in its config): "
        f"give {limit} or less; where the model is known to go further, set VLLM_ALLOW_LONG_MAX_MODEL_LEN=1{recipe}"
    )


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
