# SPDX-License-Identifier: Apache-2.0
"""GGUF files of the dense architectures, laid out as llama.cpp's converter does: transformers' log-probabilities and
tokens of the folder that they were made from."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_dense as dense
import tiny_models as tiny
from safetensors.numpy import load_file
from test_config_variants import assert_equals, edited, reference_of
from transformers import AutoConfig

from vllm.model_executor.model_loader.gguf_loader import gguf_config

TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NORMS = {
    "gemma": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    "others": {"post_attention_layernorm": "ffn_norm"},
}
GEMMA3 = {
    "attention.sliding_window": 24,
    "attention.sliding_window_pattern": [True, False, True],
    "final_logit_softcapping": 3.0,
    "rope.scaling.type": "linear",
    "rope.scaling.factor": 4.0,
    "rope.freq_base": 5000.0,
    "rope.freq_base_swa": 100.0,
}
# name → the file's architecture, its own metadata, what it cannot say of the tiny checkpoint
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2": ("qwen2", {}, {"use_sliding_window": False, "layer_types": ...}),
    "mistral": ("llama", {}, {"sliding_window": None}),
    "gemma2": (
        "gemma2",
        {"attention.sliding_window": 24, "attn_logit_softcapping": 8.0, "final_logit_softcapping": 3.0},
        {"query_pre_attn_scalar": 16},
    ),
    "gemma3": ("gemma3", GEMMA3, {"query_pre_attn_scalar": 16}),
    "phi3": ("phi3", {"rope.dimension_count": 12, "attention.sliding_window": 20}, {"sliding_window": 20}),
    "phi3-long": (
        "phi3",
        {
            "rope.dimension_count": 12,
            "rope.scaling.original_context_length": 128,
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(4) / math.log(128)),
        },
        {},
    ),
}


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's row order of q and k: the two rotary halves of a head alternate."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def write(path: Path, folder: Path, arch: str, extra: dict[str, Any]) -> None:
    config = AutoConfig.from_pretrained(folder)
    writer = gguf.GGUFWriter(path, arch)
    metadata = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        **({} if arch == "phi3" else {"attention.key_length": config.head_dim}),
        "rope.freq_base": 10000.0,
        **extra,
    }
    for key, value in metadata.items():
        if isinstance(value, str):
            writer.add_string(f"{arch}.{key}", value)
        elif isinstance(value, list):
            writer.add_array(f"{arch}.{key}", value)
        else:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{arch}.{key}", value)
    names = {**NAMES, **NORMS["gemma" if arch.startswith("gemma") else "others"]}
    for hf_name, array in load_file(folder / "model.safetensors").items():
        stem, _, suffix = hf_name.rpartition(".")
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
        name = f"blk.{layer[1]}.{names[layer[2]]}" if layer else TOP[stem]
        if arch == "llama" and name.endswith(("attn_q", "attn_k")):
            array = interleave(array, config.num_attention_heads if name.endswith("q") else config.num_key_value_heads)
        if arch.startswith("gemma") and name.endswith("norm"):
            array = array + np.float32(1)
        writer.add_tensor(f"{name}.{suffix}", np.ascontiguousarray(array))
    if "rope.scaling.attn_factor" in extra:
        for kind in ("short", "long"):
            factors = np.array(dense.LONGROPE[f"{kind}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", CASES)
def test_tokens_of_the_folder(name: str, tmp_path: Path, nan_poison: None, log: pytest.LogCaptureFixture) -> None:
    arch, extra, changes = CASES[name]
    folder = edited(tiny.checkpoint(name), tmp_path / "hf", changes)
    write(tmp_path / "m.gguf", folder, arch, extra)
    assert_equals(reference_of(folder), tmp_path / "m.gguf")
    assert "unknown metadata" not in log.text


def test_config_of_gemma(tmp_path: Path) -> None:
    folder = edited(tiny.checkpoint("gemma3"), tmp_path / "hf", {})
    small = {"attention.sliding_window": 24, "block_count": 6}
    write(tmp_path / "m.gguf", folder, "gemma3", small)
    config = gguf_config(tmp_path / "m.gguf")
    assert config.layer_types == ["sliding_attention"] * 5 + ["full_attention"]
    assert config.rope_parameters["sliding_attention"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert (config.query_pre_attn_scalar, config.final_logit_softcapping) == (16, None)
    write(tmp_path / "m.gguf", folder, "gemma3", {**small, "block_count": 62})
    assert gguf_config(tmp_path / "m.gguf").query_pre_attn_scalar == 48 // 4  # as the 27 B release, by its layers


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("gemma3", "attn_logit_softcapping", 8.0),
        ("qwen2", "final_logit_softcapping", 8.0),
        ("phi3", "logit_scale", 2.0),
    ],
)
def test_what_an_architecture_does_not_have_is_refused(name: str, key: str, value: float, tmp_path: Path) -> None:
    arch, extra, _ = CASES[name]
    write(tmp_path / "m.gguf", Path(tiny.checkpoint(name)), arch, {**extra, key: value})
    with pytest.raises(ValueError, match=rf"{arch}\.{key}={value}, which is not supported"):
        gguf_config(tmp_path / "m.gguf")
