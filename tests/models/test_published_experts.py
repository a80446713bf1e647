# SPDX-License-Identifier: Apache-2.0
"""Published checkpoints of the architectures with routed experts, by config: every tensor has its place and shape, and
each expert's an owner. No weight has memory."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm.config import ParallelConfig, VllmConfig
from vllm.distributed.parallel_state import as_rank
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.weight_utils import StoredTensor, match_specs, without_extra_layers
from vllm.model_executor.models.registry import ModelRegistry

# config.json of each release, without what says nothing of its tensors.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen1.5-MoE-A2.7B": {
        "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "hidden_size": 2048, "vocab_size": 151936,
        "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
        "decoder_sparse_step": 1, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
        "num_experts": 60, "num_experts_per_tok": 4, "norm_topk_prob": False, "rope_theta": 1e6,
        "max_position_embeddings": 8192, "sliding_window": 32768, "use_sliding_window": False,
    },
    "GLM-4.5-Air": {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "hidden_size": 4096, "vocab_size": 151552,
        "intermediate_size": 10944, "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8,
        "head_dim": 128, "attention_bias": True, "use_qk_norm": False, "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "max_position_embeddings": 131072,
        "rope_theta": 1e6,
    },
    "GLM-4.5": {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "hidden_size": 5120, "vocab_size": 151552,
        "intermediate_size": 12288, "num_hidden_layers": 92, "num_attention_heads": 96, "num_key_value_heads": 8,
        "head_dim": 128, "attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 1536, "n_routed_experts": 160, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3, "num_nextn_predict_layers": 1, "max_position_embeddings": 131072,
        "rope_theta": 1e6,
    },
    "MiniMax-M2": {
        "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "hidden_size": 3072,
        "intermediate_size": 1536, "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8,
        "head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8, "rotary_dim": 64, "rope_theta": 5000000,
        "use_qk_norm": True, "qk_norm_type": "per_layer", "scoring_func": "sigmoid", "use_routing_bias": True,
        "shared_intermediate_size": 0, "vocab_size": 200064, "max_position_embeddings": 196608, "num_mtp_modules": 3,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "vocab_size": 201088,
        "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "attention_bias": True, "num_local_experts": 32, "num_experts_per_tok": 4,
        "sliding_window": 128, "swiglu_limit": 7.0, "max_position_embeddings": 131072, "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
}  # fmt: skip
PUBLISHED["gpt-oss-120b"] = {**PUBLISHED["gpt-oss-20b"], "num_hidden_layers": 36, "num_local_experts": 128}
# What releases have parameters of, in billions, without the layers that predict several tokens at once.
BILLIONS = {
    "Qwen1.5-MoE-A2.7B": 14.316, "GLM-4.5-Air": 106.85, "GLM-4.5": 352.80, "MiniMax-M2": 228.69,
    "gpt-oss-20b": 20.915, "gpt-oss-120b": 116.83,
}  # fmt: skip


def attention(name: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    head = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    hidden, of_q, of_kv = (
        config["hidden_size"],
        config["num_attention_heads"] * head,
        config["num_key_value_heads"] * head,
    )
    has = {"q_proj.weight": (of_q, hidden), "k_proj.weight": (of_kv, hidden), "v_proj.weight": (of_kv, hidden)}
    has["o_proj.weight"] = (hidden, of_q)
    if not name.startswith("MiniMax"):
        has |= {"q_proj.bias": (of_q,), "k_proj.bias": (of_kv,), "v_proj.bias": (of_kv,)}
    if name.startswith("gpt-oss"):
        has |= {"o_proj.bias": (hidden,), "sinks": (config["num_attention_heads"],)}
    if name == "MiniMax-M2":
        has |= {"q_norm.weight": (of_q,), "k_norm.weight": (of_kv,)}
    if name == "GLM-4.5":
        has |= {"q_norm.weight": (head,), "k_norm.weight": (head,)}
    return {f"self_attn.{key}": shape for key, shape in has.items()}


def feed_forward(prefix: str, hidden: int, inner: int, names: tuple[str, str, str]) -> dict[str, tuple[int, ...]]:
    gate, up, down = (f"{prefix}.{name}.weight" for name in names)
    return {gate: (inner, hidden), up: (inner, hidden), down: (hidden, inner)}


def mixture(name: str, config: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    hidden, usual = config["hidden_size"], ("gate_proj", "up_proj", "down_proj")
    if layer < config.get("first_k_dense_replace", 0):
        return feed_forward("mlp", hidden, config["intermediate_size"], usual)
    if name.startswith("gpt-oss"):
        E, inner = config["num_local_experts"], config["intermediate_size"]
        has = {"router.weight": (E, hidden), "router.bias": (E,), "experts.gate_up_proj": (E, hidden, 2 * inner)}
        has |= {"experts.gate_up_proj_bias": (E, 2 * inner), "experts.down_proj": (E, inner, hidden)}
        return {f"mlp.{key}": shape for key, shape in {**has, "experts.down_proj_bias": (E, hidden)}.items()}
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    E = config.get("num_local_experts") or config.get("n_routed_experts") or config["num_experts"]
    block, names = ("block_sparse_moe", ("w1", "w3", "w2")) if name == "MiniMax-M2" else ("mlp", usual)
    has = {f"{block}.gate.weight": (E, hidden)}
    for e in range(E):
        has |= feed_forward(f"{block}.experts.{e}", hidden, inner, names)
    if name == "MiniMax-M2":
        has["block_sparse_moe.e_score_correction_bias"] = (E,)
    elif name.startswith("GLM"):
        has["mlp.gate.e_score_correction_bias"] = (E,)
        has |= feed_forward("mlp.shared_experts", hidden, inner, usual)
    else:
        has["mlp.shared_expert_gate.weight"] = (1, hidden)
        has |= feed_forward("mlp.shared_expert", hidden, config["shared_expert_intermediate_size"], usual)
    return has


def released(name: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the release's tensors, its experts in 16 bits."""
    config = PUBLISHED[name]
    hidden, norms = config["hidden_size"], ("input_layernorm.weight", "post_attention_layernorm.weight")
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (hidden,)}
    shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (config["vocab_size"], hidden))
    for layer in range(config["num_hidden_layers"]):
        parts = attention(name, config) | mixture(name, config, layer) | dict.fromkeys(norms, (hidden,))
        shapes |= {f"model.layers.{layer}.{key}": shape for key, shape in parts.items()}
    return shapes


def unstacked(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """As the loader hands gpt-oss's out: a matrix an expert, outputs first."""
    result = {}
    for key, shape in shapes.items():
        if re.search(r"experts\.(gate_up|down)_proj$", key):
            stack, _, kind = key.rpartition(".")
            for part in ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",):
                rows = shape[2] // (2 if kind == "gate_up_proj" else 1)
                result |= {f"{stack}.{e}.{part}.weight": (rows, shape[1]) for e in range(shape[0])}
        else:
            result[key] = shape
    return result


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_tensor_has_its_place(name: str, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    shapes = released(name)
    assert sum(map(math.prod, shapes.values())) / 1e9 == pytest.approx(BILLIONS[name], rel=1e-3)
    model_config = EngineArgs(str(tmp_path), skip_tokenizer_init=True).create_model_config()
    cls, _ = ModelRegistry.resolve_model_cls(model_config.architecture)
    last = PUBLISHED[name]["num_hidden_layers"]
    extra = {f"model.layers.{last}.eh_proj.weight": (8, 16)} if name.startswith("GLM") else {}
    wanted = unstacked(shapes)
    stored = [
        StoredTensor(cls.checkpoint_name(key), shape, lambda dtype: None) for key, shape in (wanted | extra).items()
    ]
    with torch.device("meta"), as_rank(3, 2, 2, True, torch.device("meta")):
        parallel = ParallelConfig(tensor_parallel_size=2, data_parallel_size=2, enable_expert_parallel=True)
        model = cls(vllm_config=VllmConfig(model_config, parallel_config=parallel))
        specs = model.weight_specs()
        kept = without_extra_layers(stored, specs, model.ignored_weights, name)
        taken = {spec.name for spec, _ in match_specs(specs, model.stand_in(kept), model.ignored_weights, name)}
    assert len(specs) == len(wanted)
    assert not log.records
    E = model.model.layers[-1].mlp.experts.num_experts
    missing = {int(re.search(r"experts\.(\d+)\.", key)[1]) for key in wanted.keys() - taken}  # type: ignore[index]
    assert missing == set(range(E - E // 4)), "the last of four ranks holds the last quarter of the experts"
    assert model.model.layers[0].self_attn.rotary_emb.cos_sin_cache.shape[1] == (128 if "Qwen" in name else 64)
