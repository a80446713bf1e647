# SPDX-License-Identifier: Apache-2.0
"""Operators as C++ kernels, built on the machine that they run on."""

from vllm.kernels.cpu.gdn import gated_delta_net
from vllm.kernels.cpu.ops import (
    embedding,
    empty_experts,
    fused_add_rms_norm,
    fused_experts,
    gelu_tanh_and_mul,
    linear,
    pack_expert_weights,
    pack_linear_weight,
    paged_attention,
    repack_expert_weight,
    reshape_and_cache,
    rms_norm,
    rotary_embedding,
    silu_and_mul,
    unpack_linear_weight,
)
from vllm.kernels.cpu.quantized import (
    pack_quantized_weight,
    quantized_embedding,
    quantized_experts,
    quantized_linear,
)

__all__ = [
    "embedding",
    "empty_experts",
    "fused_add_rms_norm",
    "fused_experts",
    "gated_delta_net",
    "gelu_tanh_and_mul",
    "linear",
    "pack_expert_weights",
    "pack_linear_weight",
    "pack_quantized_weight",
    "paged_attention",
    "quantized_embedding",
    "quantized_experts",
    "quantized_linear",
    "repack_expert_weight",
    "reshape_and_cache",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
    "unpack_linear_weight",
]
