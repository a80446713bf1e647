# SPDX-License-Identifier: Apache-2.0
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.mla import LatentAttention

__all__ = ["Attention", "LatentAttention"]
