# SPDX-License-Identifier: Apache-2.0
"""What must be the same on all ranks before they load anything: whatever decides collectives or answers."""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from vllm import __version__
from vllm.config import ModelConfig, VllmConfig
from vllm.kernels.table import choose
from vllm.model_executor.model_loader.weight_utils import resolve_model_path, safetensors_files
from vllm.platforms import current_platform

# The ranks agree on the smallest cache that one of them has memory for, and a label decides nothing.
_OWN = ("gpu_memory_utilization", "kv_cache_memory_bytes", "served_model_name")
# Places differ between hosts, so what lies there is compared; the hf_config is listed key by key.
_BY_CONTENT = ("model", "tokenizer", "hf_config")
_NOTES_OF_HF = ("_name_or_path", "transformers_version")
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges*", "*.model", "special_tokens_map.json", "added_tokens.json")
_SAMPLE = 1 << 16


def settings_of(vllm_config: VllmConfig, generation_config: Mapping[str, Any]) -> dict[str, str]:
    """Name → value, as text, of everything that ranks must be started alike with."""
    settings: dict[str, str] = {}
    for part in vars(vllm_config).values():
        for name, value in vars(part).items() if dataclasses.is_dataclass(part) else ():
            if name not in (*_OWN, *_BY_CONTENT):
                settings[name] = _text(value)
    config, chosen = vllm_config.model_config, choose(current_platform.device_type)
    settings |= {f"hf_config.{k}": _text(v) for k, v in config.hf_config.to_dict().items() if k not in _NOTES_OF_HF}
    settings |= {f"generation_config.{key}": _text(value) for key, value in generation_config.items()}
    settings["model"] = "dummy" if config.load_format == "dummy" else _weights(config)
    settings["tokenizer"] = "none" if config.skip_tokenizer_init else _tokenizer(config)
    return settings | {
        "device": current_platform.device_type,
        **{f"kernel of {choice.operator}": choice.implementation for choice in chosen.values()},
        "vllm": __version__,
        "torch": torch.__version__,
    }


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _weights(config: ModelConfig) -> str:
    try:
        path = resolve_model_path(config.model, config.revision)
        return _digest([path] if path.is_file() else safetensors_files(path))
    except (OSError, ValueError) as error:
        return repr(error)  # the loader raises it, on the ranks that have it


def _tokenizer(config: ModelConfig) -> str:
    path = Path(config.tokenizer)
    if path.is_dir():
        return _digest(sorted({file for pattern in _TOKENIZER_FILES for file in path.glob(pattern)}))
    return _digest([path]) if path.is_file() else config.tokenizer


def _digest(files: Iterable[Path]) -> str:
    """Names, sizes and samples of the contents: enough to tell one checkpoint from another without reading it all."""
    digest, total, names = 0, 0, []
    for file in files:
        with file.open("rb") as data:
            size = file.stat().st_size
            for at in (0, size // 3, 2 * size // 3, max(size - _SAMPLE, 0)):
                data.seek(at)
                digest = zlib.crc32(data.read(_SAMPLE), digest)
        digest, total = zlib.crc32(f"{file.name} {size}".encode(), digest), total + size
        names.append(file.name)
    return f"{', '.join(names[:1]) or 'nothing'}{' and more' * (len(names) > 1)}, {total} bytes, digest {digest:08x}"
