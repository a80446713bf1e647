# SPDX-License-Identifier: Apache-2.0
from vllm.model_executor.layers.fused_moe.layer import FusedMoE
from vllm.model_executor.layers.fused_moe.router import Gate, Router

__all__ = ["FusedMoE", "Gate", "Router"]
