# SPDX-License-Identifier: Apache-2.0
"""Small DeepSeek models: V2-Lite's form, V2's with groups of experts, V3's; latents of several sizes."""

from __future__ import annotations

from typing import Any

import tiny_models as tiny

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}
tiny.CHECKPOINTS |= {
    "latent": ("DeepseekV2", {**LATENT, "q_lora_rank": 24, "num_hidden_layers": 2, "first_k_dense_replace": 2}),
    # V2-Lite: queries without a latent, the value narrower than the key; mscale on cos and sin as well as on the scale
    "v2-lite": (
        "DeepseekV2",
        {
            **LATENT,
            "q_lora_rank": None,
            "v_head_dim": 12,
            "n_shared_experts": 2,
            "topk_method": "greedy",
            "routed_scaling_factor": 1.0,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.8},
        },
    ),
    "v2-groups": (
        "DeepseekV2",
        {
            **LATENT,
            "q_lora_rank": 24,
            "n_shared_experts": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 4.0,
        },
    ),
    "v3": (
        "DeepseekV3",
        {
            **LATENT,
            "q_lora_rank": 24,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "num_mtp_layers": 1,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
}
NAMES = ("v2-lite", "v2-groups", "v3")

checkpoint, greedy = tiny.checkpoint, tiny.greedy
