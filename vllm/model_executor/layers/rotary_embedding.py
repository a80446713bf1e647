# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (Su et al. 2021), on the leading ``rotary_dim`` of each head, halves rotated together."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from vllm.kernels import ops
from vllm.transformers_utils.config import LENGTH_DEPENDENT


class RotaryEmbedding(nn.Module):
    """Rotates q and k in place by a table of cos | sin, [max_position, rotary_dim] fp32."""

    def __init__(self, cos_sin_cache: torch.Tensor) -> None:
        super().__init__()
        self.cos_sin_cache = cos_sin_cache

    def forward(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> None:
        """positions [T] int64, q [T, H, D] and k [T, J, D]: both change in place."""
        ops.rotary_embedding(positions, q, k, self.cos_sin_cache)


def get_rope(hf_config: Any, max_position: int, partial: bool = False) -> RotaryEmbedding:
    """The embedding that ``hf_config.rope_parameters`` describes, for positions below ``max_position``.

    ``partial``: the architecture rotates ``partial_rotary_factor`` of each head; to others the key means nothing.
    Frequencies and the attention factor of the scaled kinds (linear, yarn, llama3, …) come from transformers.
    """
    parameters = dict(hf_config.rope_parameters)
    if not partial:
        parameters.pop("partial_rotary_factor", None)
    kind = parameters.get("rope_type", "default")
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
    if kind in LENGTH_DEPENDENT:
        longest = hf_config.max_position_embeddings
        if kind == "longrope":
            longest = min(longest, parameters["original_max_position_embeddings"])
        if max_position > longest:
            raise ValueError(
                f"rope_type={kind!r} over {max_position} positions is not supported: beyond {longest} its angles "
                f"depend on the request's length; set max_model_len={longest}"
            )
    if kind == "default":
        rotary_dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
        inv_freq, attention_factor = 1.0 / parameters["rope_theta"] ** exponents, 1.0
        if "freq_factors" in parameters:  # of a GGUF file
            inv_freq /= torch.tensor(parameters["freq_factors"], device="cpu")
    elif kind in ROPE_INIT_FUNCTIONS:
        config = copy.deepcopy(hf_config)
        config.rope_parameters, config.head_dim = parameters, head_dim
        with torch.device("cpu"):  # transformers makes some of it on the default device
            inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, device="cpu")
    else:
        raise ValueError(f"rope_type={kind!r} is unknown; known: default, {', '.join(sorted(ROPE_INIT_FUNCTIONS))}")
    angles = torch.arange(max_position, dtype=torch.float32, device="cpu")[:, None] * inv_freq.float()
    table = torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor
    return RotaryEmbedding(table.to(torch.get_default_device()))
