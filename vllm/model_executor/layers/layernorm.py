# SPDX-License-Identifier: Apache-2.0
"""RMS normalisation (Zhang and Sennrich 2019): x / sqrt(mean(x²) + eps) · weight."""

from __future__ import annotations

import torch

from vllm.kernels import ops
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.parameter import WeightSpec


class RMSNorm(Layer):
    """Over the last dimension of x [..., D].

    ``zero_centered`` checkpoints store weight − 1 (Qwen3-Next): 1 is added, in fp32, when the weight is loaded.
    """

    weight_attributes = ("weight",)

    def __init__(self, size: int, eps: float, dtype: torch.dtype, prefix: str, zero_centered: bool = False) -> None:
        super().__init__()
        self.size, self.eps, self.dtype, self.prefix = size, eps, dtype, prefix
        self.zero_centered = zero_centered
        self.weight: torch.Tensor | None = None

    def weight_specs(self) -> list[WeightSpec]:
        return [WeightSpec(f"{self.prefix}.weight", (self.size,), self._take, torch.float32)]

    def _take(self, loaded: torch.Tensor) -> None:
        # A zero-centred weight stays fp32: rounding 1 + w to bf16 would lose most of w.
        weight = loaded + 1.0 if self.zero_centered else loaded.to(self.dtype)
        self.weight = torch.empty(self.size, dtype=weight.dtype)
        self.weight.copy_(weight)

    def forward(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The normalised x, in ``out`` (may be x) where given."""
        assert self.weight is not None, f"{self.prefix}: no weight was loaded"
        return ops.rms_norm(x, self.weight, self.eps, out)

    def add(self, update: torch.Tensor | None, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``stream`` takes in ``update`` (None adds nothing): the normalised sum, in its place, and the sum."""
        if update is None:
            return self(stream), stream
        assert self.weight is not None, f"{self.prefix}: no weight was loaded"
        return ops.fused_add_rms_norm(update, stream, self.weight, self.eps, update)
