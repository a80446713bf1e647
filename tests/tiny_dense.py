# SPDX-License-Identifier: Apache-2.0
"""Small random checkpoints of the dense architectures beside Llama and Qwen3, among ``tiny_models``' own.

Heads, windows, soft caps and scales are small enough that a wrong one changes tokens.
"""

from __future__ import annotations

from typing import Any

import tiny_models as tiny

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0],
}
GEMMA: dict[str, Any] = {"query_pre_attn_scalar": 24, "sliding_window": 24, "tie_word_embeddings": True}

DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": (
        "Qwen2",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2},
    ),
    "mistral": ("Mistral", {"sliding_window": 20, "head_dim": 32}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 8.0, "final_logit_softcapping": 3.0}),
    "gemma3": (
        "Gemma3",
        {
            **GEMMA,
            "num_hidden_layers": 3,
            "hidden_size": 48,
            "num_key_value_heads": 1,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            "final_logit_softcapping": 3.0,
        },
    ),
    "phi3": (
        "Phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}},
    ),
    "phi3-long": (
        "Phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128, "tie_word_embeddings": True},
    ),
    "smollm3": (
        "SmolLM3",
        {"num_hidden_layers": 3, "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 24},
    ),
}
NAMES = tuple(DENSE)
tiny.CHECKPOINTS |= {name: (stem, {"pad_token_id": 0, **changes}) for name, (stem, changes) in DENSE.items()}
