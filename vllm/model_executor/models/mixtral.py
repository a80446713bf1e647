# SPDX-License-Identifier: Apache-2.0
"""Mixtral (Jiang et al. 2024): Llama's layer with top-k routed experts in place of the feed-forward."""

from __future__ import annotations

import re
from typing import ClassVar

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import check_hidden_act
from vllm.model_executor.layers.fused_moe import FusedMoE, Router
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.decoder import DecoderAttention, DecoderLayer, DecoderModel


class MixtralMoE(nn.Module):
    """Softmax router over all experts; the weights of the chosen ones are renormalised to 1."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        self.gate = ReplicatedLinear(config.hidden_size, config.num_local_experts, False, dtype, f"{prefix}.gate")
        self.experts = FusedMoE(
            Router(config.num_local_experts, config.num_experts_per_tok, True),
            config.hidden_size,
            config.intermediate_size,
            dtype,
            f"{prefix}.experts",
            vllm_config.parallel_config.enable_expert_parallel,
            ("w1", "w3", "w2"),
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.experts(hidden_states, self.gate(hidden_states))


class MixtralDecoderLayer(DecoderLayer):
    def __init__(self, vllm_config: VllmConfig, rope: RotaryEmbedding, prefix: str) -> None:
        super().__init__()
        config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        check_hidden_act(config.hidden_act)
        self.self_attn = DecoderAttention(
            config, rope, dtype, f"{prefix}.self_attn", sliding_window=config.sliding_window
        )
        self.mlp = MixtralMoE(vllm_config, f"{prefix}.block_sparse_moe")
        self.make_norms(config, dtype, prefix)


class MixtralModel(DecoderModel):
    layer_cls = MixtralDecoderLayer


class MixtralForCausalLM(CausalLM):
    """Checkpoints call the layer ``block_sparse_moe`` or ``mlp``, the projections w1, w3, w2 or, where all experts are
    stacked, gate, up, down."""

    model_cls: ClassVar[type[DecoderModel]] = MixtralModel

    @classmethod
    def checkpoint_name(cls, stored: str) -> str:
        name = super().checkpoint_name(stored).replace(".mlp.", ".block_sparse_moe.")
        for ours, theirs in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
            name = re.sub(rf"(\.experts\.\d+)\.{theirs}\.", rf"\1.{ours}.", name)
        return name
