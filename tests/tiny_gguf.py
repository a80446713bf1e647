# SPDX-License-Identifier: Apache-2.0
"""Small GGUF files in several kinds, laid out as llama.cpp's converter does, and transformers' tokens on the matrices
that the package gguf makes of them: ``"kinds:model"`` names one."""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf_blocks import round_to
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3MoeConfig

Kind = gguf.GGMLQuantizationType

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXTURE = {"num_experts_per_tok": 2, "tie_word_embeddings": False}
MODELS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "llama": ("llama", LlamaConfig, {"tie_word_embeddings": True}),
    "narrow": ("llama", LlamaConfig, {"tie_word_embeddings": False, "intermediate_size": 256}),
    "mixtral": ("llama", MixtralConfig, {**MIXTURE, "num_local_experts": 4}),
    "qwen3moe": (
        "qwen3moe",
        Qwen3MoeConfig,
        {**MIXTURE, "num_experts": 4, "moe_intermediate_size": 256, "norm_topk_prob": True},
    ),
}
# As released files have them: by regular expressions of names in the file, the first that fits.
KINDS: dict[str, dict[str, str]] = {
    "q4_0": {"token_embd|^output\\.w": "Q8_0", "": "Q4_0"},
    "q8_0": {"": "Q8_0"},
    "q4_1": {"attn_v": "Q5_1", "ffn_down": "Q5_0", "": "Q4_1"},
    "q4_k_m": {"token_embd|^output\\.w|attn_v|ffn_down": "Q6_K", "": "Q4_K"},
    "q5_k_m": {"token_embd|^output\\.w|ffn_down": "Q6_K", "": "Q5_K"},
    "odd": {"ffn_up": "Q5_K", "attn_q": "F16", "attn_k": "TQ1_0", "": "Q4_K"},
}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

_files = tempfile.TemporaryDirectory(prefix="vllm-gguf-")


def _interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    return rows.reshape(heads, 2, -1, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def write(path: Path, kinds: str, model: str) -> dict[str, np.ndarray]:
    """The file; returns what its tensors mean, under Hugging Face names."""
    arch, config_cls, fields = MODELS[model]
    config = config_cls(**SIZES | fields)
    numbers, writer = np.random.default_rng(len(kinds)), gguf.GGUFWriter(path, arch)
    hidden, inter, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    metadata: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": hidden,
        "feed_forward_length": inter,
        "attention.head_count": heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": 5000.0,
        "vocab_size": config.vocab_size,
    }
    experts = 4 if config_cls is not LlamaConfig else 0
    if experts:
        metadata |= {"expert_count": experts, "expert_used_count": 2}
    if arch == "qwen3moe":
        metadata["expert_feed_forward_length"] = inter = config.moe_intermediate_size
    for key, value in metadata.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{arch}.{key}", value)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    meant: dict[str, np.ndarray] = {}

    def put(name: str, hf_names: list[str], *shape: int, interleaved: int = 0, plain: bool = False) -> None:
        scale = 1.0 if "norm" in name else 3 / shape[-1] ** 0.5
        arrays = [numbers.standard_normal(shape, dtype=np.float32) * np.float32(scale) for _ in hf_names]
        kind = Kind[next(kind for pattern, kind in KINDS[kinds].items() if re.search(pattern, name))]
        kind = Kind.F32 if plain or len(shape) == 1 else kind
        raw = [round_to(kind.name, array) for array in arrays]
        meant.update((n, gguf.quants.dequantize(r, kind)) for n, r in zip(hf_names, raw, strict=True))
        raw = [_interleaved(r, interleaved) if interleaved else r for r in raw]
        writer.add_tensor(name, np.stack(raw) if "_exps" in name else raw[0], raw_dtype=kind)

    put("token_embd.weight", ["model.embed_tokens.weight"], config.vocab_size, hidden)
    put("output_norm.weight", ["model.norm.weight"], hidden)
    if not config.tie_word_embeddings:
        put("output.weight", ["lm_head.weight"], config.vocab_size, hidden)
    q, kv = heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes = {"attn_output": (hidden, q), "attn_q": (q, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden)}
    shapes |= {"ffn_gate": (inter, hidden), "ffn_up": (inter, hidden), "ffn_down": (hidden, inter)}
    for i in range(config.num_hidden_layers):
        put(f"blk.{i}.attn_norm.weight", [f"model.layers.{i}.input_layernorm.weight"], hidden)
        put(f"blk.{i}.ffn_norm.weight", [f"model.layers.{i}.post_attention_layernorm.weight"], hidden)
        if arch == "qwen3moe":
            for part in "qk":
                name = f"model.layers.{i}.self_attn.{part}_norm.weight"
                put(f"blk.{i}.attn_{part}_norm.weight", [name], config.head_dim)
        if experts:
            put(f"blk.{i}.ffn_gate_inp.weight", [f"model.layers.{i}.mlp.gate.weight"], experts, hidden, plain=True)
        for hf_name, name in NAMES.items():
            base, turned = f"model.layers.{i}.{hf_name}.weight", 0
            if arch == "llama" and name in ("attn_q", "attn_k"):
                turned = heads if name == "attn_q" else config.num_key_value_heads
            if experts and name.startswith("ffn"):
                each = [base.replace("mlp.", f"mlp.experts.{e}.") for e in range(experts)]
                put(f"blk.{i}.{name}_exps.weight", each, *shapes[name])
            else:
                put(f"blk.{i}.{name}.weight", [base], *shapes[name], interleaved=turned)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


@functools.cache
def files(name: str) -> tuple[Path, Any]:
    """The file and transformers' float32 model of what it means."""
    kinds, model = name.split(":")
    path = Path(_files.name) / f"{kinds}-{model}.gguf"
    meant = {name: torch.from_numpy(array.copy()) for name, array in write(path, kinds, model).items()}
    _, config_cls, fields = MODELS[model]
    reference = AutoModelForCausalLM.from_config(config_cls(**SIZES | fields), dtype=torch.float32).eval()
    for stack in {n.partition(".experts.")[0] + ".experts" for n in meant if ".experts." in n}:
        parts = [[meant.pop(f"{stack}.{e}.{p}_proj.weight") for e in range(4)] for p in ("gate", "up", "down")]
        meant[f"{stack}.gate_up_proj"] = torch.cat([torch.stack(parts[0]), torch.stack(parts[1])], dim=1)
        meant[f"{stack}.down_proj"] = torch.stack(parts[2])
    if "lm_head.weight" not in meant:
        meant["lm_head.weight"] = meant["model.embed_tokens.weight"]
    reference.load_state_dict(meant, strict=True)
    reference.generation_config.eos_token_id = None
    return path, reference


def checkpoint(name: str) -> str:
    return str(files(name)[0])


@functools.cache
def greedy(name: str, prompt_ids: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """transformers' greedy continuation in fp32."""
    ids = torch.tensor([prompt_ids])
    with torch.inference_mode():
        out = files(name)[1].generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
        )
    return tuple(out[0, len(prompt_ids) :].tolist())
