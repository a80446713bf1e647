# SPDX-License-Identifier: Apache-2.0
"""Operators in Triton, one file a family. Importing this package needs ``triton``.

Inputs are widened to fp32 after they are loaded and rounded once before they are stored. Without a device the kernels
run in Triton's interpreter (``TRITON_INTERPRET=1``, set before ``triton`` is imported), launch by launch in Python.
"""

from vllm.kernels.triton.activation import silu_and_mul
from vllm.kernels.triton.attention import paged_attention, paged_attention_workspace
from vllm.kernels.triton.cache import reshape_and_cache
from vllm.kernels.triton.embedding import embedding
from vllm.kernels.triton.experts import fused_experts
from vllm.kernels.triton.gdn import gated_delta_net
from vllm.kernels.triton.norms import fused_add_rms_norm, rms_norm, rms_norm_gated
from vllm.kernels.triton.rotary import rotary_embedding
from vllm.kernels.triton.routing import grouped_topk, topk_sigmoid, topk_softmax
from vllm.kernels.triton.sampling import apply_penalties, log_probabilities, row_max, sample

__all__ = [
    "apply_penalties",
    "embedding",
    "fused_add_rms_norm",
    "fused_experts",
    "gated_delta_net",
    "grouped_topk",
    "log_probabilities",
    "paged_attention",
    "paged_attention_workspace",
    "reshape_and_cache",
    "rms_norm",
    "rms_norm_gated",
    "rotary_embedding",
    "row_max",
    "sample",
    "silu_and_mul",
    "topk_sigmoid",
    "topk_softmax",
]
