# SPDX-License-Identifier: Apache-2.0
"""Single GGUF files: metadata, a Hugging Face config made from it, and tensors under HF names.

The format is that of the ``gguf`` package, which dequantises what does not stay as it is; its own reader takes seconds
for a usual vocabulary, so the header is parsed here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import mmap
import re
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from vllm.kernels.blocks import units
from vllm.kernels.quantized import FORMATS, QuantizedWeight
from vllm.logger import init_logger
from vllm.model_executor.model_loader.weight_utils import StoredCodes, StoredTensor, read_range
from vllm.model_executor.parameter import WeightSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = init_logger(__name__)

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_CONTROL = 3  # a token's type
_SIZE = struct.Struct("<Q")
_REQUIRED = object()
_CHUNK_ELEMENTS = 1 << 18
# What stays as it is in memory, and as what.
_KEPT = {
    GGMLQuantizationType[kind]: format
    for kind, format in {"Q4_0": "int4", "Q8_0": "int8", **{f.upper(): f for f in FORMATS if f[0] == "q"}}.items()
}

# With the name of the config's class: some of these modules load half of transformers.
_CONFIGS = {
    ("llama", False): ("LlamaForCausalLM", "LlamaConfig"),
    ("llama", True): ("MixtralForCausalLM", "MixtralConfig"),
    ("gemma2", False): ("Gemma2ForCausalLM", "Gemma2Config"),
    ("gemma3", False): ("Gemma3ForCausalLM", "Gemma3TextConfig"),
    ("phi3", False): ("Phi3ForCausalLM", "Phi3Config"),
    ("qwen2", False): ("Qwen2ForCausalLM", "Qwen2Config"),
    ("qwen3", False): ("Qwen3ForCausalLM", "Qwen3Config"),
    ("qwen3moe", True): ("Qwen3MoeForCausalLM", "Qwen3MoeConfig"),
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# Angles come from the config; ``rope_freqs`` goes into it.
_UNREAD = re.compile(r"rope_freqs\.weight|blk\.\d+\.(attn_rot_embd|rope_freqs)\.weight")
_LONGROPE = re.compile(r"rope_factors_(long|short)\.weight")  # into the config of a Phi-3
_ALONE = re.compile(r"(ffn_gate|ffn_up|ffn_down)\.(\d+)")  # one expert, as files of 2023 have them
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
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Blocks that only this architecture has, or has under other names.
_BLOCK_OF = {
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
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

# Metadata that changes what a model computes and that this engine does not compute → values that change nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    key: neutral
    for keys, neutral in (
        (
            "attention.clamp_kqv attention.max_alibi_bias attention.scale attention.temperature_scale "
            "attention.temperature_length attention.q_lora_rank attention.kv_lora_rank attention.shared_kv_layers "
            "attention.sliding_window_pattern attn_logit_softcapping final_logit_softcapping router_logit_softcapping "
            "expert_shared_count expert_group_count expert_group_used_count leading_dense_block_count moe_latent_size "
            "interleave_moe_layer_step moe_every_n_layers nextn_predict_layers rope.dimension_sections "
            "rope.scaling.alpha rope.scaling.yarn_log_multiplier swiglu_clamp_exp use_parallel_residual swin_norm",
            (0, False, [], [0]),
        ),
        (
            "attention.output_scale embedding_scale expert_weights_scale logit_scale residual_scale "
            "rope.scaling.attn_factor rope.scaling.yarn_attn_factor rope.scaling.yarn_ext_factor",
            (0, 1),
        ),
        ("attention.causal", (True,)),
        ("expert_gating_func", (0, 1)),  # 1: softmax
    )
    for key in keys.split()
}
# Those of them that an architecture has.
_TAKEN = {
    "gemma2": {"attn_logit_softcapping", "final_logit_softcapping"},
    "gemma3": {"final_logit_softcapping", "attention.sliding_window_pattern"},
    "phi3": {"rope.scaling.attn_factor"},
}
# Describes the file or the past: vocab_size is token_embd's, pooling is for embeddings, finetuned is a remark.
_INERT = {
    "vocab_size",
    "expert_count",
    "pooling_type",
    "rope.scaling.finetuned",
    "tensor_data_layout",
    "attention.layer_norm_epsilon",
}
# Texts of control tokens that end a turn, a message or a document, for files that give only ``eos_token_id``.
_END_TEXTS = {
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<EOT>",
    "<｜end▁of▁sentence｜>",
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

    def strings(self, count: int) -> list[str]:
        """As ``string``, ``count`` times: vocabularies and merges are most of the time of reading a header."""
        data, at, size, found = self.data, self.at, _SIZE.unpack_from, []
        for _ in range(count):
            begin = at + 8
            at = begin + size(data, at)[0]
            found.append(data[begin:at].decode("utf-8"))
        if at > len(data):
            raise struct.error(f"a string ends at {at}, the file at {len(data)}")
        self.at = at
        return found

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            (element,), (count,) = self.numbers("I"), self.numbers("Q")
            if element in _SCALARS:
                return list(self.numbers(_SCALARS[element], count))
            if element == _STRING:
                return self.strings(count)
            return [self.value(element) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"metadata of type {kind}")
        return self.numbers(_SCALARS[kind])[0]

    def tensor(self) -> GGUFTensor:
        name = self.string()
        (rank,) = self.numbers("I")
        shape = tuple(reversed(self.numbers("Q", rank)))
        (kind,), (offset,) = self.numbers("I"), self.numbers("Q")
        try:
            return GGUFTensor(name, shape, GGMLQuantizationType(kind), offset)
        except ValueError as error:
            raise ValueError(f"{name} is of type {kind}, unknown to the installed gguf: pip install -U gguf") from error


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

    Raises ValueError for an architecture, a rotary scaling or other metadata that is not supported.
    """
    return _config(read_gguf(path))


def _config(file: GGUFFile) -> PretrainedConfig:
    if (parts := file.metadata.get("split.count", 1)) > 1:
        raise ValueError(
            f"{file.path} is part {file.metadata.get('split.no', 0) + 1} of {parts}; join them: "
            "llama-gguf-split --merge FIRST_PART WHOLE.gguf"
        )
    arch = str(file.metadata.get("general.architecture"))
    moe = bool(file.metadata.get(f"{arch}.expert_count"))
    if (arch, moe) not in _CONFIGS:
        raise ValueError(
            f"{file.path} has architecture {arch!r}{' with experts' if moe else ''}; known in GGUF files: "
            f"{', '.join(sorted({name for name, _ in _CONFIGS}))}. Use the model's safetensors folder"
        )
    shapes = {t.name: t.shape for t in file.tensors}
    unread = {
        key.removeprefix(f"{arch}.") for key, found in file.metadata.items() if found and key.startswith(f"{arch}.")
    }
    unread -= _INERT | _TAKEN.get(arch, set())

    def value(key: str, default: Any = _REQUIRED) -> Any:
        unread.discard(key)
        found = file.metadata.get(f"{arch}.{key}", default)
        if found is _REQUIRED:
            raise ValueError(f"{file.path} lacks the metadata {arch}.{key}; convert the model again")
        if isinstance(found, list):
            if len(set(found)) == 1:
                return found[0]
            raise ValueError(f"{file.path} has {arch}.{key}={found}, one a layer, which is not supported")
        return found

    def refuse_other_than(key: str, *neutral: Any) -> None:
        if (found := file.metadata.get(f"{arch}.{key}", neutral[0])) not in neutral:
            raise ValueError(f"{file.path} has {arch}.{key}={found}, which is not supported; only {neutral[0]} is")
        unread.discard(key)

    for key, neutral in _REFUSED.items():
        if key not in _TAKEN.get(arch, ()):
            refuse_other_than(key, *neutral)

    if "token_embd.weight" not in shapes:
        raise ValueError(f"{file.path} lacks the tensor token_embd.weight; convert the model again")
    architecture, config_class = _CONFIGS[arch, moe]
    hidden_size, n_heads = value("embedding_length"), value("attention.head_count")
    rotary_dim = value("rope.dimension_count", hidden_size // n_heads)
    head_dim = value("attention.key_length", hidden_size // n_heads if arch == "phi3" else rotary_dim)
    if arch != "phi3":
        refuse_other_than("rope.dimension_count", head_dim)
    refuse_other_than("attention.value_length", head_dim)
    fields = {
        "architectures": [architecture],
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden_size,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": n_heads,
        "num_key_value_heads": value("attention.head_count_kv", n_heads),
        "head_dim": head_dim,
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(file, value),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
    }
    if arch == "llama" and not moe:
        fields["mlp_bias"] = "blk.0.ffn_gate.bias" in shapes
    for token in ("bos", "padding"):
        if f"tokenizer.ggml.{token}_token_id" in file.metadata:
            fields[f"{token[:3]}_token_id"] = file.metadata[f"tokenizer.ggml.{token}_token_id"]
    if ends := _end_token_ids(file.metadata):
        fields["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    if value("attention.sliding_window", None):
        fields["sliding_window"] = value("attention.sliding_window")
    if arch.startswith("gemma"):
        fields |= _gemma_fields(file, fields, value)
    elif arch == "phi3":
        fields |= _phi3_fields(file, fields, value, rotary_dim)
    if moe:
        fields["num_local_experts" if arch == "llama" else "num_experts"] = value("expert_count")
        fields["num_experts_per_tok"] = value("expert_used_count")
        if arch == "qwen3moe":
            # llama.cpp renormalises the chosen experts' weights for this architecture unless told otherwise.
            renormalise = bool(value("expert_weights_norm", True))
            fields |= {"norm_topk_prob": renormalise, "moe_intermediate_size": value("expert_feed_forward_length")}
        else:
            refuse_other_than("expert_weights_norm", True)
            refuse_other_than("expert_feed_forward_length", fields["intermediate_size"], 0)
    config = getattr(transformers, config_class)(**fields)
    factors = [t for t in file.tensors if t.name == "rope_freqs.weight"]
    if factors:
        config.rope_parameters["freq_factors"] = _freq_factors(file, factors[0], config)
    if unread:
        logger.warning("%s: unknown metadata, taken as without effect: %s", file.path, ", ".join(sorted(unread)))
    return config


def _gemma_fields(file: GGUFFile, fields: dict[str, Any], value: Callable[..., Any]) -> dict[str, Any]:
    """The query's scale is not in the file: by the head's size, but by the model's width in the releases of 27 B."""
    arch, layers = file.metadata["general.architecture"], fields["num_hidden_layers"]
    widest = layers == {"gemma2": 46, "gemma3": 62}[arch]
    scalar = fields["hidden_size"] // fields["num_attention_heads"] if widest else fields["head_dim"]
    found = {
        "query_pre_attn_scalar": scalar,
        "sliding_window": value("attention.sliding_window"),
        "final_logit_softcapping": value("final_logit_softcapping", None) or None,
    }
    if arch == "gemma2":
        return found | {"attn_logit_softcapping": value("attn_logit_softcapping", None) or None}
    pattern = file.metadata.get("gemma3.attention.sliding_window_pattern", 6)
    windows = pattern if isinstance(pattern, list) else [(i + 1) % pattern > 0 for i in range(layers)]
    local = {"rope_type": "default", "rope_theta": value("rope.freq_base_swa", 10000.0)}
    return found | {
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        "rope_parameters": {"full_attention": fields["rope_parameters"], "sliding_attention": local},
    }


def _phi3_fields(file: GGUFFile, fields: dict[str, Any], value: Callable[..., Any], rotary_dim: int) -> dict[str, Any]:
    rope = fields["rope_parameters"] | {"partial_rotary_factor": rotary_dim / fields["head_dim"]}
    original = value("rope.scaling.original_context_length", fields["max_position_embeddings"])
    attention_factor = value("rope.scaling.attn_factor", None)
    for tensor in file.tensors:
        if match := _LONGROPE.fullmatch(tensor.name):
            factors = _stored(file.path, tensor, tensor.name).read(torch.float32).tolist()
            rope |= {"rope_type": "longrope", f"{match[1]}_factor": factors}
            if attention_factor:
                rope["attention_factor"] = attention_factor
    return {"rope_parameters": rope, "original_max_position_embeddings": original}


def _end_token_ids(metadata: dict[str, Any]) -> list[int]:
    """``eos``, then every other token that ends a turn, a message or a document."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    tokens, types = metadata.get("tokenizer.ggml.tokens", ()), metadata.get("tokenizer.ggml.token_type", ())
    by_text = [
        i for i, (text, kind) in enumerate(zip(tokens, types, strict=False)) if kind == _CONTROL and text in _END_TEXTS
    ]
    return list(dict.fromkeys([*(metadata[key] for key in keys if key in metadata), *by_text]))


def _freq_factors(file: GGUFFile, tensor: GGUFTensor, config: PretrainedConfig) -> list[float]:
    """Divisors of the rotary frequencies: how llama.cpp's converter keeps Llama 3.1's scaling."""
    kind = config.rope_parameters["rope_type"]
    if tensor.shape != (config.head_dim // 2,) or tensor.kind != GGMLQuantizationType.F32 or kind != "default":
        raise ValueError(
            f"{file.path} has {tensor.name} {tensor.shape} {tensor.kind.name} with rotary scaling {kind!r}; only F32 "
            f"factors of shape {(config.head_dim // 2,)} without a scaling are supported; use the safetensors folder"
        )
    return _stored(file.path, tensor, tensor.name).read(torch.float32).tolist()


def _rope(file: GGUFFile, value: Callable[..., Any]) -> dict[str, Any]:
    factor = value("rope.scaling.factor", value("rope.scale_linear", 0))
    kind = value("rope.scaling.type", "linear" if factor else "none")
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return {"rope_type": "default", "rope_theta": value("rope.freq_base", 10000.0)}
    rope = {"rope_type": kind, "rope_theta": value("rope.freq_base", 10000.0)}
    if kind not in ("linear", "yarn"):
        raise ValueError(
            f"{file.path} has rotary scaling {kind!r}, not none, linear or yarn; use the safetensors folder"
        )
    rope["factor"] = factor or value("rope.scaling.factor")
    original = value("rope.scaling.original_context_length", *([0] if kind == "linear" else []))
    if kind == "yarn":
        rope["original_max_position_embeddings"] = original
        for name in ("beta_fast", "beta_slow"):
            if beta := value(f"rope.scaling.yarn_{name}", 0):
                rope[name] = beta
    return rope


def gguf_tensors(path: str | Path) -> list[StoredTensor]:
    """The tensors of a GGUF file under Hugging Face names, stacked experts one by one; reads the header only.
    Matrices have codes where an operator reads their kind.

    A tensor that has no such name keeps its own. llama.cpp interleaves the rotary halves of the rows of q and k for
    the ``llama`` architecture; reading undoes it.
    """
    file = read_gguf(path)
    config, arch = _config(file), file.metadata["general.architecture"]
    blocks = _BLOCK | _BLOCK_OF.get(arch, {})
    interleaved = {}
    if arch == "llama":
        interleaved = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors: list[StoredTensor] = []
    names = {t.name for t in file.tensors}
    for t in file.tensors:
        if _UNREAD.fullmatch(t.name) or (arch == "phi3" and _LONGROPE.fullmatch(t.name)):
            continue
        stem, _, suffix = t.name.rpartition(".")
        # llama.cpp's converter adds the 1 that Gemma's norms leave out.
        shift = -1.0 if arch.startswith("gemma") and t.name.endswith("norm.weight") else 0.0
        match = re.fullmatch(r"blk\.(\d+)\.(\w+(?:\.\d+)?)", stem)
        if match and (alone := _ALONE.fullmatch(match[2])) and f"{alone[1]}_exps" in blocks:
            expert_name = blocks[f"{alone[1]}_exps"].format(alone[2])
            tensors.append(_stored(file.path, t, f"model.layers.{match[1]}.{expert_name}.{suffix}"))
            continue
        if match is None or match[2] not in blocks:
            tensors.append(_stored(file.path, t, f"{_TOP[stem]}.{suffix}" if stem in _TOP else t.name, None, shift))
            continue
        name = f"model.layers.{match[1]}.{blocks[match[2]]}.{suffix}"
        if (
            arch != "qwen2"
            and match[2] == "attn_q"
            and suffix == "bias"
            and f"blk.{match[1]}.attn_output.bias" not in names
        ):
            # transformers' attention has a bias on all four projections or on none.
            tensors.append(_zeros(f"model.layers.{match[1]}.{blocks['attn_output']}.bias", config.hidden_size))
        if "{}" not in name:
            tensors.append(_stored(file.path, t, name, interleaved.get(match[2]), shift))
            continue
        size = t.nbytes // t.shape[0]
        for expert in range(t.shape[0]):
            one = dataclasses.replace(t, shape=t.shape[1:], offset=t.offset + expert * size)
            tensors.append(_stored(file.path, one, name.format(expert)))
    return tensors


def _zeros(name: str, size: int) -> StoredTensor:
    return StoredTensor(name, (size,), lambda dtype: torch.zeros(size, dtype=dtype, device="cpu"))


def _stored(
    path: Path, tensor: GGUFTensor, name: str, interleaved_heads: int | None = None, shift: float = 0.0
) -> StoredTensor:
    block, block_bytes = GGML_QUANT_SIZES[tensor.kind]

    def read(dtype: torch.dtype) -> torch.Tensor:
        raw = read_range(path, tensor.offset, tensor.nbytes).numpy()
        flat = torch.empty(math.prod(tensor.shape), dtype=dtype, device="cpu")
        # Blocks are independent, so a run of them is one long row: gguf then works on few large arrays.
        run = _CHUNK_ELEMENTS // block
        for first in range(0, len(raw) // block_bytes, run):
            part = dequantize(raw[first * block_bytes : (first + run) * block_bytes], tensor.kind)
            flat[first * block : first * block + part.size] = torch.from_numpy(part)
        if interleaved_heads is not None:
            flat = flat.view(interleaved_heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).contiguous()
        if shift:
            flat += shift
        return flat.view(tensor.shape)

    def read_codes(dtype: torch.dtype, rows: slice | torch.Tensor | None) -> QuantizedWeight:
        N, K = tensor.shape
        width, (first, last) = K // block * block_bytes, (0, N)
        if interleaved_heads is not None:
            order = torch.arange(N, device="cpu").view(interleaved_heads, -1, 2).mT.flatten()
            rows = order if rows is None else order[rows]
        elif isinstance(rows, slice):
            (first, last, _), rows = rows.indices(N), None
        raw = read_range(path, tensor.offset + first * width, max(last - first, 0) * width).view(-1, width)
        return _quantised(f"{path}: {tensor.name}", _KEPT[tensor.kind], raw if rows is None else raw[rows], K, dtype)

    codes = None
    if tensor.kind in _KEPT and len(tensor.shape) == 2:
        codes = StoredCodes(_KEPT[tensor.kind], block, read_codes)
    unreadable = None if _dequantisable(tensor.kind) else f"stored as {tensor.kind.name}, which gguf cannot dequantise"
    return StoredTensor(name, tensor.shape, read, unreadable, codes=codes, stored_as=tensor.kind.name)


def _quantised(name: str, format: str, raw: torch.Tensor, K: int, dtype: torch.dtype) -> QuantizedWeight:
    """uint8 [N, bytes of a row] -> the matrix [N, K] that they are.

    Raises:
        ValueError: a scale is NaN or infinite.
    """
    N, size = len(raw), FORMATS[format].bytes
    if FORMATS[format].scaled:  # a float16 scale, then the codes of 32 columns; of int4 those of the first half lie low
        blocks = raw.unflatten(1, (K // 32, raw.shape[1] * 32 // K))
        scales = blocks[..., :2].contiguous().view(torch.float16).flatten(1)
        codes = torch.empty(N, K * size // FORMATS[format].columns, dtype=torch.uint8, device="cpu")
        for first in range(0, N, step := max(_CHUNK_ELEMENTS // K, 1)):
            part = blocks[first : first + step, :, 2:]
            if format == "int4":
                part = torch.cat((part & 15, part >> 4), dim=-1)
                part = part[..., ::2] | part[..., 1::2] << 4
            codes[first : first + step] = part.flatten(1)
        weight = QuantizedWeight(format, N, K, 32, dtype, codes, scales)
    else:
        weight = QuantizedWeight(format, N, K, FORMATS[format].columns, dtype, raw)
        scales = units(format, raw.view(-1, size))
    if bad := int((~scales.isfinite()).sum()):
        raise ValueError(
            f"{name}: {bad} of {scales.numel()} scales are NaN or infinite; the file is damaged or was quantised with "
            "a fault: fetch it again, or convert the model anew"
        )
    return weight


def kept_quantised(
    stored: Sequence[StoredTensor], specs: Sequence[WeightSpec], dtype: torch.dtype
) -> list[StoredTensor]:
    """``stored`` with codes for those matrices alone that can stay as they are; the log says which.

    Others are dequantised: kinds that no operator reads, columns that tensor parallelism cuts within a block, and
    experts of a layer where one of these applies or that are not of one kind.
    """
    wanted = {spec.name: spec for spec in specs}
    layers: dict[int, dict[str | None, set[tuple[str, int] | None]]] = {}
    for tensor in stored:
        if (spec := wanted.get(tensor.name)) is not None and spec.alike is not None:
            form = None if tensor.codes is None or tensor.cut(spec) else (tensor.codes.format, tensor.codes.group_size)
            layers.setdefault(id(spec.owner), {}).setdefault(spec.alike, set()).add(form)
    mixed = {owner for owner, kinds in layers.items() if any(len(k) > 1 or None in k for k in kinds.values())}
    result, counts = [], {True: Counter[str](), False: Counter[str]()}
    for tensor in stored:
        spec = wanted.get(tensor.name)
        if spec is not None and spec.quantized:
            why = ""
            if tensor.codes is not None and tensor.cut(spec):
                why = " whose blocks tensor parallelism would cut"
            elif tensor.codes is not None and spec.alike is not None and id(spec.owner) in mixed:
                why = " beside other experts"
            if why:
                tensor = dataclasses.replace(tensor, codes=None)
            kept = tensor.codes is not None
            if kept or tensor.stored_as not in ("F32", "F16", "BF16"):
                counts[kept][f"{tensor.stored_as}{why}"] += 1
        result.append(tensor)
    said = {kept: ", ".join(f"{n} {kind}" for kind, n in sorted(found.items())) for kept, found in counts.items()}
    if any(said.values()):
        logger.info(
            "GGUF matrices kept as they are: %s; dequantised to %s: %s",
            said[True] or "none", str(dtype).removeprefix("torch."), said[False] or "none",
        )  # fmt: skip
    return result


@functools.cache
def _dequantisable(kind: GGMLQuantizationType) -> bool:
    try:
        dequantize(np.zeros(GGML_QUANT_SIZES[kind][1], np.uint8), kind)
    except NotImplementedError:
        return False
    return True
