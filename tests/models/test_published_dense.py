# SPDX-License-Identifier: Apache-2.0
"""Published checkpoints of the dense architectures, by config: each tensor that transformers' own model of that config
saves is one that ours wants, of the same shape, or is rightly left unread. No weight has memory."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig
from transformers.initialization import no_init_weights

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import linear, vocab_parallel_embedding
from vllm.model_executor.model_loader.weight_utils import StoredTensor, match_specs
from vllm.model_executor.models.registry import ModelRegistry

MISTRAL_SMALL: dict[str, Any] = {
    "model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32768, "rope_theta": 1e8, "sliding_window": None,
}  # fmt: skip
# config.json of each release, without what says nothing of its tensors.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B-Instruct": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
        "max_position_embeddings": 32768, "rope_theta": 1e6, "sliding_window": 32768, "use_sliding_window": False,
        "max_window_layers": 21, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True,
    },
    "Qwen2.5-7B-Instruct": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
        "max_position_embeddings": 32768, "rope_theta": 1e6, "sliding_window": 131072, "use_sliding_window": False,
        "max_window_layers": 28, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
    },
    "Mistral-7B-Instruct-v0.3": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 4096, "vocab_size": 32768,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 32768, "rope_theta": 1e6, "sliding_window": None, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "Mistral-Small-24B-Instruct-2501": {
        **MISTRAL_SMALL, "architectures": ["MistralForCausalLM"], "tie_word_embeddings": False,
    },
    "Mistral-Small-3.1-24B-Instruct-2503": {
        "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "spatial_merge_size": 2,
        "text_config": {**MISTRAL_SMALL, "max_position_embeddings": 131072, "rope_theta": 1e9},
        "vision_config": {
            "model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
            "num_attention_heads": 16, "head_dim": 64, "image_size": 1540, "patch_size": 14, "rope_theta": 10000.0,
        },
    },
    "gemma-2-2b-it": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_size": 2304, "head_dim": 256,
        "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
        "vocab_size": 256000, "max_position_embeddings": 8192, "rope_theta": 10000.0, "sliding_window": 4096,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256,
    },
    "gemma-3-1b-it": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 1152, "head_dim": 256,
        "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
        "vocab_size": 262144, "max_position_embeddings": 32768, "rope_theta": 1000000, "rope_local_base_freq": 10000,
        "rope_scaling": None, "sliding_window": 512, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256,
    },
    "gemma-3-4b-it": {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "mm_tokens_per_image": 256,
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "image_size": 896,
            "num_hidden_layers": 27, "num_attention_heads": 16, "patch_size": 14, "vision_use_head": False,
        },
    },
    "phi-4": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 5120, "intermediate_size": 17920,
        "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 10, "vocab_size": 100352,
        "max_position_embeddings": 16384, "original_max_position_embeddings": 16384, "rope_theta": 250000,
        "rope_scaling": None, "sliding_window": None, "rms_norm_eps": 1e-5, "pad_token_id": 100349,
    },
    "Phi-4-mini-instruct": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 32, "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 200064,
        "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75, "sliding_window": 262144, "tie_word_embeddings": True, "pad_token_id": 199999,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0, *[2.0] * 47]},
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    },
    "SmolLM3-3B": {
        "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "hidden_size": 2048, "vocab_size": 128256,
        "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4,
        "max_position_embeddings": 65536, "rope_theta": 5000000.0, "no_rope_layer_interval": 4,
        "use_sliding_window": False, "tie_word_embeddings": True,
    },
}  # fmt: skip
# What releases have parameters of, in billions, vision part included.
BILLIONS = {
    "Qwen2.5-0.5B-Instruct": 0.494, "Qwen2.5-7B-Instruct": 7.616, "Mistral-7B-Instruct-v0.3": 7.248,
    "Mistral-Small-24B-Instruct-2501": 23.572, "Mistral-Small-3.1-24B-Instruct-2503": 24.011, "gemma-2-2b-it": 2.614,
    "gemma-3-1b-it": 1.000, "gemma-3-4b-it": 4.300, "phi-4": 14.660, "Phi-4-mini-instruct": 3.836, "SmolLM3-3B": 3.075,
}  # fmt: skip
RANKS = {"Qwen2.5-7B-Instruct": 4, "gemma-3-1b-it": 2, "phi-4": 2, "Phi-4-mini-instruct": 4}


def folder_of(name: str, path: Path) -> str:
    (path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    return str(path)


def saved(folder: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes as transformers saves them; ``test_dense_models`` has that checked on real files."""
    config = AutoConfig.from_pretrained(folder)
    name = config.architectures[0]
    with torch.device("meta"), no_init_weights():
        model = getattr(transformers, name)(config)
    shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    if name.endswith("ForConditionalGeneration"):
        renamed = {
            "model.language_model.": "language_model.model.",
            "model.": "",
            "lm_head.": "language_model.lm_head.",
        }
        shapes = {
            next(new + key.removeprefix(old) for old, new in renamed.items() if key.startswith(old)): shape
            for key, shape in shapes.items()
        }
    # The release of Mistral Small 3.1 has a head, although the config that transformers makes of it is a tied one.
    tied = config.tie_word_embeddings and name != "Mistral3ForConditionalGeneration"
    return {key: shape for key, shape in shapes.items() if not (tied and key.endswith("lm_head.weight"))}


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_tensor_has_its_place(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank, and on each of several: together these take every row and column."""
    folder = folder_of(name, tmp_path)
    shapes = saved(folder)
    assert sum(map(math.prod, shapes.values())) / 1e9 == pytest.approx(BILLIONS[name], rel=1e-3)
    model_config = EngineArgs(folder, skip_tokenizer_init=True).create_model_config()
    cls, _ = ModelRegistry.resolve_model_cls(model_config.architecture)
    tp_size = RANKS.get(name, 1)
    held = dict.fromkeys(shapes, 0)
    for rank in range(tp_size):
        for module in (linear, vocab_parallel_embedding):
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: tp_size)
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        with torch.device("meta"):
            model = cls(vllm_config=VllmConfig(model_config))
        stored = [StoredTensor(cls.checkpoint_name(key), shape, lambda dtype: None) for key, shape in shapes.items()]
        pairs = match_specs(model.weight_specs(), model.stand_in(stored), model.ignored_weights, name)
        assert {spec.name for spec, _ in pairs} >= {"model.embed_tokens.weight", "model.norm.weight"}
        assert len(pairs) == sum("vision" not in key and "multi_modal" not in key for key in shapes)
        for layer in (module for module in model.modules() if isinstance(module, linear.LinearBase)):
            for shard in layer.shards:
                key = next(key for key in shapes if cls.checkpoint_name(key) == shard.name)
                held[key] += shard.num_rows * shard.num_cols
    heads_of_all = 1 if name == "gemma-3-1b-it" else 0  # key-value heads that both ranks hold
    for key, count in held.items():
        copies = tp_size if heads_of_all and ("k_proj" in key or "v_proj" in key) else 1
        assert count in (0, math.prod(shapes[key]) * copies), key
    assert sum(map(bool, held.values())) >= 4 * model_config.num_hidden_layers


def test_rows_of_a_fused_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    """phi-4 by hand: 40 query heads and 10 key-value heads of 128 rows, the last of two ranks."""
    monkeypatch.setattr(linear, "get_tensor_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(linear, "get_tensor_model_parallel_rank", lambda: 1)
    args = 5120, 128, 40, 10, False, torch.bfloat16, "attn"
    qkv = linear.QKVParallelLinear(*args, fused=True)
    (shard,) = qkv.shards
    assert (shard.name, shard.full) == ("attn.qkv_proj.weight", (7680, 5120))
    assert shard.rows.tolist() == [*range(2560, 5120), *range(5760, 6400), *range(7040, 7680)]
    assert (qkv.q_size, qkv.kv_size) == (2560, 640)
    merged = linear.MergedColumnParallelLinear(5120, [17920] * 2, False, torch.bfloat16, ["g", "u"], "mlp.gate_up_proj")
    (shard,) = merged.shards
    assert (shard.name, shard.full) == ("mlp.gate_up_proj.weight", (35840, 5120))
    assert shard.rows.tolist() == [*range(8960, 17920), *range(26880, 35840)]
