# SPDX-License-Identifier: Apache-2.0
"""Which experts a token goes to, and how much each of them counts."""

from __future__ import annotations

import dataclasses

import torch

from vllm.kernels import ops
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.step_buffers import buffer_key, step_buffer
from vllm.model_executor.parameter import WeightSpec


class Gate(ReplicatedLinear):
    """x [T, hidden] → router logits [T, E] in float32, whatever the model's dtype: rounded ones change choices.

    ``dtype`` is that of the weight, which some checkpoints hold in float32.
    """

    def __init__(self, hidden_size: int, num_experts: int, dtype: torch.dtype, prefix: str, bias: bool = False) -> None:
        super().__init__(hidden_size, num_experts, bias, dtype, prefix)
        self.output_key = buffer_key(f"{prefix}.weight", num_experts, torch.float32)

    def weight_specs(self) -> list[WeightSpec]:
        return [dataclasses.replace(spec, dtype=self.dtype) for spec in super().weight_specs()]

    def apply(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        assert self.packed is not None, f"{self.shards[0].name}: no weight was loaded"
        out = step_buffer(self.output_key, x.shape[0])
        if out is None:
            out = x.new_empty(x.shape[0], self.output_size_per_partition, dtype=torch.float32)
        return ops.linear(x if x.dtype is self.dtype else x.to(self.dtype), self.packed, self.bias, out)


class Router(Layer):
    """Router logits [T, E] → weights float32 [T, top_k], expert ids int32 [T, top_k]; id -1 and weight 0 in pad rows,
    whose slot in ``slot_mapping`` [T] is negative.

    scoring: "softmax" over all experts, or each one's own "sigmoid". The softmax over the chosen ones alone (gpt-oss)
    is the renormalised one over all.
    renormalize: the weights of the chosen ones are divided by their sum.
    scale: what the weights are multiplied with after that (``routed_scaling_factor``).
    bias_name: the checkpoint's name of a float32 [E] that is added to the scores where experts are chosen, and not to
        their weights (``e_score_correction_bias``).
    num_groups, topk_groups, group_top: only experts of the ``topk_groups`` best of ``num_groups`` neighbouring groups
        are chosen; a group is as good as the sum of its ``group_top`` best: 1 in DeepSeek-V2, 2 in V3 and GLM-4.5.

    Raises:
        ValueError: numbers of experts and groups that do not fit one another.
    """

    weight_attributes = ("bias",)

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        renormalize: bool,
        scoring: str = "softmax",
        scale: float = 1.0,
        bias_name: str | None = None,
        num_groups: int = 1,
        topk_groups: int = 1,
        group_top: int = 2,
    ) -> None:
        super().__init__()
        if not 0 < top_k <= num_experts:
            raise ValueError(f"num_experts_per_tok={top_k} of {num_experts} experts; give 1 to {num_experts}")
        if scoring not in ("softmax", "sigmoid"):
            raise ValueError(f"scoring_func={scoring!r}: give 'softmax' or 'sigmoid'")
        if num_groups < 1 or num_experts % num_groups or not 0 < topk_groups <= num_groups:
            raise ValueError(
                f"n_group={num_groups}, topk_group={topk_groups} of {num_experts} experts: give a divisor of "
                f"{num_experts} and at most that many groups"
            )
        if top_k > (reachable := topk_groups * (num_experts // num_groups)):
            raise ValueError(f"num_experts_per_tok={top_k} of the {reachable} experts in {topk_groups} groups")
        self.num_experts, self.top_k, self.renormalize = num_experts, top_k, renormalize
        self.scoring, self.scale, self.bias_name = scoring, scale, bias_name
        # A group has at least one expert; where it has fewer than group_top, all of them count.
        self.groups = num_groups, topk_groups, min(group_top, num_experts // num_groups)
        self.bias: torch.Tensor | None = None

    def weight_specs(self) -> list[WeightSpec]:
        if self.bias_name is None:
            return []
        return [WeightSpec(self.bias_name, (self.num_experts,), self._take, torch.float32)]

    def _take(self, loaded: torch.Tensor) -> None:
        self.bias = torch.empty(self.num_experts, dtype=torch.float32)
        self.bias.copy_(loaded)

    def forward(self, router_logits: torch.Tensor, slot_mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.bias_name is None or self.bias is not None, f"{self.bias_name}: no weight was loaded"
        args = router_logits, self.top_k, self.renormalize, slot_mapping
        num_groups, topk_groups, group_top = self.groups
        if topk_groups < num_groups:
            sigmoid = self.scoring == "sigmoid"
            return ops.grouped_topk(*args, num_groups, topk_groups, group_top, sigmoid, self.bias, self.scale)
        if self.scoring == "sigmoid":
            return ops.topk_sigmoid(*args, self.bias, self.scale)
        assert self.bias is None, f"{self.bias_name}: a softmax without groups takes no bias"
        return ops.topk_softmax(*args, self.scale)
