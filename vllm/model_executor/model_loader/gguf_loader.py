# SPDX-License-Identifier: Apache-2.0
"""Single GGUF files: metadata, a Hugging Face config made from it, and dequantised tensors under HF names.

The format is that of the ``gguf`` package, which dequantises; its own reader takes seconds for a usual vocabulary,
so the header is parsed here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import mmap
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from transformers import LlamaConfig, MixtralConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from vllm.model_executor.model_loader.weight_utils import StoredTensor, read_range

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_SIZE = struct.Struct("<Q")
_REQUIRED = object()
_CHUNK_ELEMENTS = 1 << 18

_CONFIGS: dict[tuple[str, bool], tuple[str, type[PretrainedConfig]]] = {
    ("llama", False): ("LlamaForCausalLM", LlamaConfig),
    ("llama", True): ("MixtralForCausalLM", MixtralConfig),
    ("qwen3", False): ("Qwen3ForCausalLM", Qwen3Config),
    ("qwen3moe", True): ("Qwen3MoeForCausalLM", Qwen3MoeConfig),
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MOE = {
    "llama": {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    },
    "qwen3moe": {
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.{}.gate_proj",
        "ffn_down_exps": "mlp.experts.{}.down_proj",
        "ffn_up_exps": "mlp.experts.{}.up_proj",
    },
}


@dataclass(frozen=True)
class GGUFTensor:
    """shape: torch's order; offset: from the start of the file, in bytes."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int

    @property
    def nbytes(self) -> int:
        block, block_bytes = GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // block * block_bytes


@dataclass(frozen=True)
class GGUFFile:
    """A file's metadata (strings, numbers, lists of them) and tensor table."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[GGUFTensor, ...]


class _Cursor:
    """Reads little-endian values one after the other; ``struct.error`` past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def numbers(self, code: str, count: int = 1) -> tuple:
        layout = f"<{count}{code}"
        values = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return values

    def string(self) -> str:
        begin = self.at + 8
        self.at = begin + _SIZE.unpack_from(self.data, self.at)[0]
        if self.at > len(self.data):
            raise struct.error(f"a string ends at {self.at}, the file at {len(self.data)}")
        return self.data[begin : self.at].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            (element,), (count,) = self.numbers("I"), self.numbers("Q")
            if element in _SCALARS:
                return list(self.numbers(_SCALARS[element], count))
            if element == _STRING:
                return [self.string() for _ in range(count)]
            return [self.value(element) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"metadata of type {kind}")
        return self.numbers(_SCALARS[kind])[0]

    def tensor(self) -> GGUFTensor:
        name = self.string()
        (rank,) = self.numbers("I")
        shape = tuple(reversed(self.numbers("Q", rank)))
        (kind,), (offset,) = self.numbers("I"), self.numbers("Q")
        return GGUFTensor(name, shape, GGMLQuantizationType(kind), offset)


def read_gguf(path: str | Path) -> GGUFFile:
    """Parse the header of a GGUF file (version 2 or 3, little-endian).

    Raises ValueError when the file is truncated or not such a file. Format:
    https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """
    path = Path(path)
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data)
    except (ValueError, struct.error) as error:
        raise ValueError(f"{path} is truncated, corrupt or no GGUF file ({error}); fetch it again") from error


def _parse(path: Path, data: mmap.mmap) -> GGUFFile:
    cursor = _Cursor(data)
    if data[:4] != b"GGUF":
        raise ValueError(f"it begins with {data[:4]!r}")
    cursor.at = 4
    (version,), (n_tensors, n_values) = cursor.numbers("I"), cursor.numbers("Q", 2)
    if version not in (2, 3):
        raise ValueError(f"version {version}, not 2 or 3")
    metadata = {}
    for _ in range(n_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.numbers("I")[0])
    table = [cursor.tensor() for _ in range(n_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not (isinstance(alignment, int) and alignment > 0):
        raise ValueError(f"general.alignment is {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    tensors = tuple(dataclasses.replace(t, offset=start + t.offset) for t in table)
    for t in tensors:
        block, _ = GGML_QUANT_SIZES[t.kind]
        if min(t.shape, default=0) < 1 or t.shape[-1] % block:
            raise ValueError(f"{t.name} of shape {t.shape} in {t.kind.name} blocks of {block}")
        if t.offset + t.nbytes > len(data):
            raise ValueError(f"{t.name} ends at byte {t.offset + t.nbytes}, the file at {len(data)}")
    return GGUFFile(path, metadata, tensors)


def gguf_config(path: str | Path) -> PretrainedConfig:
    """The transformers config of a GGUF file, ``architectures`` included.

    Raises ValueError for an architecture or a rotary scaling that is not supported.
    """
    return _config(read_gguf(path))


def _config(file: GGUFFile) -> PretrainedConfig:
    arch = str(file.metadata.get("general.architecture"))
    moe = bool(file.metadata.get(f"{arch}.expert_count"))
    if (arch, moe) not in _CONFIGS:
        raise ValueError(
            f"{file.path} has architecture {arch!r}{' with experts' if moe else ''}; known in GGUF files: "
            f"{', '.join(sorted({name for name, _ in _CONFIGS}))}. Use the model's safetensors folder"
        )
    shapes = {t.name: t.shape for t in file.tensors}

    def value(key: str, default: Any = _REQUIRED) -> Any:
        found = file.metadata.get(f"{arch}.{key}", default)
        if found is _REQUIRED:
            raise ValueError(f"{file.path} lacks the metadata {arch}.{key}; convert the model again")
        if isinstance(found, list):
            raise ValueError(f"{file.path} has {arch}.{key}={found}, one a layer, which is not supported")
        return found

    if "token_embd.weight" not in shapes:
        raise ValueError(f"{file.path} lacks the tensor token_embd.weight; convert the model again")
    architecture, config_cls = _CONFIGS[arch, moe]
    hidden_size, n_heads = value("embedding_length"), value("attention.head_count")
    fields = {
        "architectures": [architecture],
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden_size,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": n_heads,
        "num_key_value_heads": value("attention.head_count_kv", n_heads),
        "head_dim": value("attention.key_length", value("rope.dimension_count", hidden_size // n_heads)),
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(file, value),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
    }
    for token in ("bos", "eos", "padding"):
        if f"tokenizer.ggml.{token}_token_id" in file.metadata:
            fields[f"{token[:3]}_token_id"] = file.metadata[f"tokenizer.ggml.{token}_token_id"]
    if value("attention.sliding_window", None):
        fields["sliding_window"] = value("attention.sliding_window")
    if moe:
        fields["num_local_experts" if arch == "llama" else "num_experts"] = value("expert_count")
        fields["num_experts_per_tok"] = value("expert_used_count")
        if arch == "qwen3moe":
            # llama.cpp always renormalises the chosen experts' weights for this architecture.
            fields |= {"norm_topk_prob": True, "moe_intermediate_size": value("expert_feed_forward_length")}
    return config_cls(**fields)


def _rope(file: GGUFFile, value: Callable[..., Any]) -> dict[str, Any]:
    kind = value("rope.scaling.type", "none")
    rope = {"rope_type": "default" if kind == "none" else kind, "rope_theta": value("rope.freq_base", 10000.0)}
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise ValueError(
            f"{file.path} has rotary scaling {kind!r}, not none, linear or yarn; use the safetensors folder"
        )
    rope["factor"] = value("rope.scaling.factor")
    if kind == "yarn":
        rope["original_max_position_embeddings"] = value("rope.scaling.original_context_length")
    return rope


def gguf_tensors(path: str | Path) -> list[StoredTensor]:
    """The tensors of a GGUF file under Hugging Face names, stacked experts one by one; reads the header only.

    A tensor that has no such name keeps its own. llama.cpp interleaves the rotary halves of the rows of q and k for
    the ``llama`` architecture; reading undoes it.
    """
    file = read_gguf(path)
    config, arch = _config(file), file.metadata["general.architecture"]
    blocks = _BLOCK | _MOE.get(arch, {})
    interleaved = {}
    if arch == "llama":
        interleaved = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors: list[StoredTensor] = []
    for t in file.tensors:
        stem, _, suffix = t.name.rpartition(".")
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if match is None or match[2] not in blocks:
            tensors.append(_stored(file.path, t, f"{_TOP[stem]}.{suffix}" if stem in _TOP else t.name))
            continue
        name = f"model.layers.{match[1]}.{blocks[match[2]]}.{suffix}"
        if "{}" not in name:
            tensors.append(_stored(file.path, t, name, interleaved.get(match[2])))
            continue
        size = t.nbytes // t.shape[0]
        for expert in range(t.shape[0]):
            one = dataclasses.replace(t, shape=t.shape[1:], offset=t.offset + expert * size)
            tensors.append(_stored(file.path, one, name.format(expert)))
    return tensors


def _stored(path: Path, tensor: GGUFTensor, name: str, interleaved_heads: int | None = None) -> StoredTensor:
    def read(dtype: torch.dtype) -> torch.Tensor:
        block, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        raw = read_range(path, tensor.offset, tensor.nbytes).numpy()
        flat = torch.empty(math.prod(tensor.shape), dtype=dtype)
        # Blocks are independent, so a run of them is one long row: gguf then works on few large arrays.
        run = _CHUNK_ELEMENTS // block
        for first in range(0, len(raw) // block_bytes, run):
            part = dequantize(raw[first * block_bytes : (first + run) * block_bytes], tensor.kind)
            flat[first * block : first * block + part.size] = torch.from_numpy(part)
        if interleaved_heads is not None:
            flat = flat.view(interleaved_heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).contiguous()
        return flat.view(tensor.shape)

    unreadable = None if _dequantisable(tensor.kind) else f"stored as {tensor.kind.name}, which gguf cannot dequantise"
    return StoredTensor(name, tensor.shape, read, unreadable)


@functools.cache
def _dequantisable(kind: GGMLQuantizationType) -> bool:
    try:
        dequantize(np.zeros(GGML_QUANT_SIZES[kind][1], np.uint8), kind)
    except NotImplementedError:
        return False
    return True
