# SPDX-License-Identifier: Apache-2.0
"""Small random checkpoints of the architectures with routed experts beside Mixtral and Qwen3-MoE, among
``tiny_models``' own. Groups, biases, sinks and windows are such that a wrong one changes tokens."""

from __future__ import annotations

from typing import Any

import tiny_models as tiny

GLM: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "num_mtp_layers": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
}
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-moe": (
        "Qwen2Moe",
        {
            **tiny.MOE,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "shared_expert_intermediate_size": 48,
            "norm_topk_prob": False,
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 3,
        },
    ),
    "glm4-moe": ("Glm4Moe", {**GLM, "attention_bias": True, "use_qk_norm": True}),
    "glm4-moe-plain": ("Glm4Moe", {**GLM, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}),
    "minimax-m2": (
        "MiniMaxM2",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32, "rotary_dim": 8},
    ),
    "gpt-oss": (
        "GptOss",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "sliding_window": 24,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
        },
    ),
}
NAMES = tuple(EXPERTS)
tiny.CHECKPOINTS |= EXPERTS
tiny.CHECKPOINTS["gpt-oss-32"] = ("GptOss", {**EXPERTS["gpt-oss"][1], "intermediate_size": 32})
