# SPDX-License-Identifier: Apache-2.0
"""Harness: the parts that upstream's CPU build lacks for DP with expert parallelism. Not part of any patch.

Loaded by upstream itself, in every process, as a general plugin:
- ragged collectives: CpuCommunicator gets XpuCommunicator's `all_gatherv` and `reduce_scatterv`, as they are in the
  tree under test;
- an expert map in the MoE kernel: upstream's own knows none and would read past its experts. A plain loop over the
  local experts takes its place.
"""

from __future__ import annotations

from typing import Any

import torch


def _keep_weights(self: Any, layer: torch.nn.Module) -> None:
    """The loop reads the weights as loaded; upstream's kernel would pack them."""


def _experts(
    self: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    global_num_experts: int,
    expert_map: torch.Tensor | None,
    *_: Any,
    **__: Any,
) -> None:
    assert activation.value == "silu", activation
    output.zero_()
    for expert in range(global_num_experts):
        local = expert if expert_map is None else int(expert_map[expert])
        rows, choice = (topk_ids == expert).nonzero(as_tuple=True)
        if local < 0 or rows.numel() == 0:
            continue
        gate, up = (hidden_states[rows] @ w1[local].t()).chunk(2, dim=-1)
        found = (torch.nn.functional.silu(gate) * up) @ w2[local].t()
        output.index_add_(0, rows, found * topk_weights[rows, choice, None].to(found.dtype))


def supply() -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.distributed.device_communicators.xpu_communicator import XpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    CpuCommunicator.all_gatherv = XpuCommunicator.all_gatherv
    CpuCommunicator.reduce_scatterv = XpuCommunicator.reduce_scatterv
    CPUUnquantizedExperts.process_weights_after_loading = _keep_weights
    CPUUnquantizedExperts.apply = _experts
    CPUUnquantizedExperts.supports_expert_map = lambda self: True
