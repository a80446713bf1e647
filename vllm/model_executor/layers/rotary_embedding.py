# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (Su et al. 2021), on the leading ``rotary_dim`` of each head, halves rotated together."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from vllm.kernels import ops
from vllm.logger import init_logger
from vllm.model_executor.layers.layer import Layer
from vllm.transformers_utils.config import LENGTH_DEPENDENT

logger = init_logger(__name__)


class RotaryEmbedding(Layer):
    """Rotates q and k in place by a table of cos | sin, [max_position, rotary_dim] fp32."""

    def __init__(self, cos_sin_cache: torch.Tensor) -> None:
        super().__init__()
        self.cos_sin_cache = cos_sin_cache

    def forward(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> None:
        """positions [T] int64, q [T, H, D] and k [T, J, D]: both change in place."""
        ops.rotary_embedding(positions, q, k, self.cos_sin_cache)


def get_rope(
    hf_config: Any, max_position: int, partial: bool = False, layer_type: str | None = None
) -> RotaryEmbedding:
    """The embedding that ``hf_config.rope_parameters`` describes, for positions below ``max_position``.

    ``partial``: the architecture rotates ``partial_rotary_factor`` of each head; to others the key means nothing.
    ``layer_type``: of which layers, where the config describes one embedding for each kind of them.
    Frequencies and the attention factor of the scaled kinds (linear, yarn, llama3, …) come from transformers.

    The long factors of ``longrope`` are those of every request where one may be longer than the original length; a
    shorter one then has other angles than in transformers, which takes them by the length that a request has reached.
    """
    parameters = dict(hf_config.rope_parameters[layer_type] if layer_type else hf_config.rope_parameters)
    if not partial:
        parameters.pop("partial_rotary_factor", None)
    kind = parameters.get("rope_type", "default")
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
    if kind in LENGTH_DEPENDENT and max_position > (longest := hf_config.max_position_embeddings):
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
        with torch.device("cpu"):  # for all that they make on the way
            inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, device="cpu", seq_len=max_position)
        if kind == "longrope" and max_position > (original := parameters["original_max_position_embeddings"]):
            logger.warning(
                "max_model_len=%d: all requests get longrope's long factors, made for more than %d tokens; with "
                "max_model_len=%d they get the short ones", max_position, original, original
            )  # fmt: skip
    else:
        raise ValueError(f"rope_type={kind!r} is unknown; known: default, {', '.join(sorted(ROPE_INIT_FUNCTIONS))}")
    angles = torch.arange(max_position, dtype=torch.float32, device="cpu")[:, None] * inv_freq.float()
    table = torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor
    return RotaryEmbedding(table.to(torch.get_default_device()))
