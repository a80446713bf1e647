# SPDX-License-Identifier: Apache-2.0
"""Operators in Triton, one file a family. Importing this package needs ``triton``.

Inputs are widened to fp32 after they are loaded and rounded once before they are stored. Without a device the kernels
run in Triton's interpreter (``TRITON_INTERPRET=1``, set before ``triton`` is imported), launch by launch in Python.
"""

import sys

from vllm.kernels.triton.activation import gelu_tanh_and_mul, silu_and_mul
from vllm.kernels.triton.attention import paged_attention, paged_attention_forms, paged_attention_workspace
from vllm.kernels.triton.cache import reshape_and_cache, zero_padding_rows
from vllm.kernels.triton.embedding import embedding
from vllm.kernels.triton.experts import fused_experts, fused_experts_forms
from vllm.kernels.triton.gdn import gated_delta_net
from vllm.kernels.triton.norms import fused_add_rms_norm, rms_norm, rms_norm_gated
from vllm.kernels.triton.quantized import (
    quantized_embedding,
    quantized_experts,
    quantized_linear,
    quantized_linear_forms,
)
from vllm.kernels.triton.rotary import rotary_embedding
from vllm.kernels.triton.routing import grouped_topk, topk_sigmoid, topk_softmax
from vllm.kernels.triton.sampling import apply_penalties, log_probabilities, row_max, sample


def num_compiled() -> int:
    """Kernels of this package that were compiled in this process; none are in the interpreter."""
    modules = [module for name, module in sys.modules.items() if name.startswith(f"{__name__}.")]
    kernels = {id(x): x for module in modules for x in vars(module).values() if hasattr(x, "device_caches")}
    return sum(len(caches[0]) for kernel in kernels.values() for caches in kernel.device_caches.values())


__all__ = [
    "apply_penalties",
    "embedding",
    "fused_add_rms_norm",
    "fused_experts",
    "fused_experts_forms",
    "gated_delta_net",
    "gelu_tanh_and_mul",
    "grouped_topk",
    "log_probabilities",
    "num_compiled",
    "paged_attention",
    "paged_attention_forms",
    "paged_attention_workspace",
    "quantized_embedding",
    "quantized_experts",
    "quantized_linear",
    "quantized_linear_forms",
    "reshape_and_cache",
    "rms_norm",
    "rms_norm_gated",
    "rotary_embedding",
    "row_max",
    "sample",
    "silu_and_mul",
    "topk_sigmoid",
    "topk_softmax",
    "zero_padding_rows",
]
