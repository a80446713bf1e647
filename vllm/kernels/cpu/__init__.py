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
    row_max,
    sigmoid_gate,
    silu_and_mul,
    unpack_linear_weight,
    zero_padding_rows,
)
from vllm.kernels.cpu.quantized import (
    pack_quantized_weight,
    quantized_embedding,
    quantized_experts,
    quantized_linear,
)
from vllm.kernels.cpu.routing import grouped_topk, topk_sigmoid, topk_softmax

__all__ = [
    "embedding",
    "empty_experts",
    "fused_add_rms_norm",
    "fused_experts",
    "gated_delta_net",
    "gelu_tanh_and_mul",
    "grouped_topk",
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
    "row_max",
    "sigmoid_gate",
    "silu_and_mul",
    "topk_sigmoid",
    "topk_softmax",
    "unpack_linear_weight",
    "zero_padding_rows",
]
