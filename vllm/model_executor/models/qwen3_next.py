# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next (Qwen team 2025): gated delta nets with a gated full attention every few layers, routed experts beside a
shared one."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.kernels import ops
from vllm.model_executor.layers.activation import check_hidden_act
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from vllm.model_executor.layers.mamba.gdn_linear_attn import GatedDeltaNet
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.decoder import DecoderLayer, DecoderModel, GatedMLP
from vllm.model_executor.models.qwen3_moe import Qwen3MoeSparseMoeBlock, has_experts


class Qwen3NextAttention(nn.Module):
    """Grouped-query attention with normed heads, rotation of a part of each head, and a sigmoid gate on the output.

    The query projection has, head after head, the query's rows and the gate's.
    """

    def __init__(self, config: Any, rope: RotaryEmbedding, dtype: torch.dtype, prefix: str) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        bias = bool(getattr(config, "attention_bias", False))
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            self.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias,
            dtype,
            prefix,
            q_rows_per_head=2 * self.head_dim,
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * self.head_dim, config.hidden_size, bias, dtype, f"{prefix}.o_proj"
        )
        self.q_norm, self.k_norm = (
            RMSNorm(self.head_dim, config.rms_norm_eps, dtype, f"{prefix}.{name}", zero_centered=True)
            for name in ("q_norm", "k_norm")
        )
        self.rotary_emb = rope
        self.attn = Attention(
            self.qkv_proj.num_heads,
            self.head_dim,
            self.head_dim**-0.5,
            self.qkv_proj.num_kv_heads,
            dtype,
            f"{prefix}.attn",
        )

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qg, k, v = self.qkv_proj.split(self.qkv_proj(hidden_states))
        q, gate = qg.unflatten(-1, (-1, 2, self.head_dim)).unbind(-2)
        k = k.unflatten(-1, (-1, self.head_dim))
        q, k = self.q_norm(q, out=q), self.k_norm(k, out=k)
        self.rotary_emb(positions, q, k)
        out = self.attn(q.flatten(1), k.flatten(1), v)
        ops.sigmoid_gate(out.view(q.shape), gate)
        return self.o_proj(out)


class Qwen3NextSparseMoeBlock(Qwen3MoeSparseMoeBlock):
    """Routed experts plus sigmoid(gate) times a shared expert, whose TP shares ride in the experts' sum."""

    def __init__(self, vllm_config: VllmConfig, prefix: str, renormalize: bool) -> None:
        super().__init__(vllm_config, prefix, renormalize)
        config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        hidden, inner = config.hidden_size, config.shared_expert_intermediate_size
        self.shared_expert_gate = ReplicatedLinear(hidden, 1, False, dtype, f"{prefix}.shared_expert_gate")
        self.shared_expert = GatedMLP(hidden, inner, dtype, f"{prefix}.shared_expert", reduce_results=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        shared = self.shared_expert(hidden_states)
        ops.sigmoid_gate(shared, self.shared_expert_gate(hidden_states))
        return self.experts(hidden_states, self.gate(hidden_states), tp_partial=shared)


class Qwen3NextDecoderLayer(DecoderLayer):
    """``interleaved``: how checkpoints order the rows of the delta net's input projection.

    ``routed(config, index)``: whether layer ``index`` has experts and, if so, whether their weights are renormalised.
    """

    interleaved: ClassVar[bool] = True

    def __init__(self, vllm_config: VllmConfig, rope: RotaryEmbedding, prefix: str) -> None:
        super().__init__()
        config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        check_hidden_act(config.hidden_act)
        index = int(prefix.rsplit(".", 1)[1])
        kind = config.layer_types[index]
        if kind == "linear_attention":
            self.self_attn = GatedDeltaNet(config, self.interleaved, dtype, f"{prefix}.linear_attn")
        elif kind == "full_attention":
            self.self_attn = Qwen3NextAttention(config, rope, dtype, f"{prefix}.self_attn")
        else:
            raise ValueError(f"layer_types[{index}]={kind!r}: give 'linear_attention' or 'full_attention'")
        sparse, renormalize = self.routed(config, index)
        self.mlp = (
            Qwen3NextSparseMoeBlock(vllm_config, f"{prefix}.mlp", renormalize)
            if sparse
            else GatedMLP(config.hidden_size, config.intermediate_size, dtype, f"{prefix}.mlp")
        )
        self.make_norms(config, dtype, prefix, zero_centered=True)

    @staticmethod
    def routed(config: Any, index: int) -> tuple[bool, bool]:
        return has_experts(config, index), bool(config.norm_topk_prob)


class Qwen3NextModel(DecoderModel):
    layer_cls = Qwen3NextDecoderLayer
    zero_centered_norm = True
    partial_rotary = True


class Qwen3NextForCausalLM(CausalLM):
    """The layers that predict several tokens at once (``mtp``) are left unread."""

    model_cls: ClassVar[type[Qwen3NextModel]] = Qwen3NextModel
    ignored_weights = (*CausalLM.ignored_weights, r"^mtp\.")
