# SPDX-License-Identifier: Apache-2.0
"""Upstream's path of ``vllm.kernels.ops``."""

from vllm.kernels.ops import fused_add_rms_norm, reshape_and_cache, rms_norm, rotary_embedding, silu_and_mul

__all__ = ["fused_add_rms_norm", "reshape_and_cache", "rms_norm", "rotary_embedding", "silu_and_mul"]
