# SPDX-License-Identifier: Apache-2.0
from vllm.model_executor.layers.fused_moe.layer import FusedMoE

__all__ = ["FusedMoE"]
