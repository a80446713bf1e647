# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (Su et al. 2021), on the leading ``rotary_dim`` of each head, halves rotated together."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from vllm import _custom_ops as ops


class RotaryEmbedding(nn.Module):
    """Rotates q and k in place by a table of cos | sin, [max_position, rotary_dim] fp32."""

    def __init__(self, cos_sin_cache: torch.Tensor) -> None:
        super().__init__()
        self.cos_sin_cache = cos_sin_cache

    def forward(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> None:
        """positions [T] int64, q [T, H, D] and k [T, J, D]: both change in place."""
        ops.rotary_embedding(positions, q, k, self.cos_sin_cache)


def get_rope(hf_config: Any, max_position: int) -> RotaryEmbedding:
    """The embedding that ``hf_config.rope_parameters`` describes, for positions below ``max_position``.

    Frequencies and the attention factor of the scaled kinds (linear, yarn, llama3, …) come from transformers.
    """
    parameters = hf_config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        raise ValueError(
            f"rope_type={kind!r} is not supported: its angles depend on the request's length; use a model with "
            "another rope_type"
        )
    if kind == "default":
        head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
        rotary_dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
        inv_freq, attention_factor = 1.0 / parameters["rope_theta"] ** exponents, 1.0
        if "freq_factors" in parameters:  # of a GGUF file
            inv_freq /= torch.tensor(parameters["freq_factors"], device="cpu")
    elif kind in ROPE_INIT_FUNCTIONS:
        inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[kind](hf_config, device="cpu")
    else:
        raise ValueError(f"rope_type={kind!r} is unknown; known: default, {', '.join(sorted(ROPE_INIT_FUNCTIONS))}")
    angles = torch.arange(max_position, dtype=torch.float32, device="cpu")[:, None] * inv_freq.float()
    table = torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor
    return RotaryEmbedding(table.to(torch.get_default_device()))
