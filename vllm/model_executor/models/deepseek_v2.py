# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V2, V3 and R1 (DeepSeek-AI 2024, arXiv:2405.04434, arXiv:2412.19437): latent attention, a few dense layers,
then routed experts beside shared ones."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.kernels import ops
from vllm.model_executor.layers.activation import check_hidden_act
from vllm.model_executor.layers.attention.mla import KVUpProjection, LatentAttention
from vllm.model_executor.layers.fused_moe import FusedMoE, Gate, Router
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    ReplicatedLinear,
    RowParallelLinear,
    Shard,
    divide,
)
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.decoder import DecoderLayer, DecoderModel, GatedMLP

_LATENT_EPS = 1e-6  # of the latents' norms, whatever rms_norm_eps says


def softmax_scale(config: Any) -> float:
    """1 / sqrt(head) with YaRN's m² where the config has ``mscale_all_dim``: m = 0.1 mscale_all_dim ln(factor) + 1."""
    rope = config.rope_parameters
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    m = rope.get("mscale_all_dim") or 0
    if rope.get("rope_type", "default") == "default" or not m or rope["factor"] <= 1:
        return scale
    return scale * (0.1 * m * math.log(rope["factor"]) + 1) ** 2


class DeepseekV2Attention(nn.Module):
    """Queries by way of a latent of their own (``q_lora_rank``) or straight from the hidden states (V2-Lite)."""

    def __init__(self, vllm_config: VllmConfig, rope: RotaryEmbedding, prefix: str) -> None:
        super().__init__()
        config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        hidden, bias, heads = config.hidden_size, bool(config.attention_bias), config.num_attention_heads
        self.num_heads = divide(heads, get_tensor_model_parallel_world_size(), "attention heads")
        self.rank, self.q_rank = config.kv_lora_rank, config.q_lora_rank
        self.nope, self.head_dim = config.qk_nope_head_dim, config.qk_nope_head_dim + config.qk_rope_head_dim
        width, all_heads = self.rank + config.qk_rope_head_dim, heads * self.head_dim
        if self.q_rank is None:
            self.q_proj = ColumnParallelLinear(hidden, all_heads, False, dtype, f"{prefix}.q_proj")
            self.kv_a_proj = ReplicatedLinear(hidden, width, bias, dtype, f"{prefix}.kv_a_proj_with_mqa")
        else:
            everything = slice(None)
            shards = [
                Shard(f"{prefix}.q_a_proj.weight", (self.q_rank, hidden), everything, everything, 0),
                Shard(f"{prefix}.kv_a_proj_with_mqa.weight", (width, hidden), everything, everything, self.q_rank),
            ]
            self.a_proj = LinearBase(shards, bias, dtype)
            self.q_a_layernorm = RMSNorm(self.q_rank, _LATENT_EPS, dtype, f"{prefix}.q_a_layernorm")
            self.q_b_proj = ColumnParallelLinear(self.q_rank, all_heads, False, dtype, f"{prefix}.q_b_proj")
        self.kv_a_layernorm = RMSNorm(self.rank, _LATENT_EPS, dtype, f"{prefix}.kv_a_layernorm")
        self.kv_b_proj = KVUpProjection(self.rank, heads, self.nope, config.v_head_dim, dtype, f"{prefix}.kv_b_proj")
        self.o_proj = RowParallelLinear(heads * config.v_head_dim, hidden, bias, dtype, f"{prefix}.o_proj")
        self.rotary_emb, self.interleaved = rope, bool(getattr(config, "rope_interleave", True))
        self.attn = LatentAttention(
            self.kv_b_proj,
            self.num_heads,
            config.qk_rope_head_dim,
            softmax_scale(config),
            dtype,
            f"{prefix}.attn",
            vllm_config.model_config.max_model_len,
            vllm_config.scheduler_config.max_num_batched_tokens,
            vllm_config.cache_config.block_size,
        )

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.q_rank is None:
            q, latents = self.q_proj(hidden_states), self.kv_a_proj(hidden_states)
        else:
            q_a, latents = self.a_proj(hidden_states).tensor_split((self.q_rank,), dim=-1)
            q = self.q_b_proj(self.q_a_layernorm(q_a, out=q_a))
        q, compressed = q.unflatten(-1, (-1, self.head_dim)), latents[:, : self.rank]
        self.kv_a_layernorm(compressed, out=compressed)
        ops.rotary_embedding(
            positions,
            q[..., self.nope :],
            latents[:, None, self.rank :],
            self.rotary_emb.cos_sin_cache,
            self.interleaved,
        )
        return self.o_proj(self.attn(q, latents))


class DeepseekV2MoE(nn.Module):
    """Routed experts plus the shared ones, which are one feed-forward whose TP shares ride in the experts' sum.

    V2 takes softmax scores, from the groups with the best expert where it is told to; V3 takes sigmoids and a bias,
    from the groups with the best two.
    """

    def __init__(self, vllm_config: VllmConfig, prefix: str, sigmoid: bool) -> None:
        super().__init__()
        config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        hidden, inner, experts = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
        self.gate = Gate(hidden, experts, torch.float32, f"{prefix}.gate")
        grouped = sigmoid or config.topk_method == "group_limited_greedy"
        router = Router(
            experts,
            config.num_experts_per_tok,
            sigmoid and bool(config.norm_topk_prob),
            scoring="sigmoid" if sigmoid else "softmax",
            scale=config.routed_scaling_factor,
            bias_name=f"{prefix}.gate.e_score_correction_bias" if sigmoid else None,
            num_groups=config.n_group if grouped else 1,
            topk_groups=config.topk_group if grouped else 1,
            group_top=2 if sigmoid else 1,
        )
        self.experts = FusedMoE(
            router,
            hidden,
            inner,
            dtype,
            f"{prefix}.experts",
            vllm_config.parallel_config.enable_expert_parallel,
        )
        self.shared_experts = None
        if config.n_shared_experts:
            inner *= config.n_shared_experts
            self.shared_experts = GatedMLP(hidden, inner, dtype, f"{prefix}.shared_experts", reduce_results=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        shared = None if self.shared_experts is None else self.shared_experts(hidden_states)
        return self.experts(hidden_states, self.gate(hidden_states), tp_partial=shared)


class DeepseekV2DecoderLayer(DecoderLayer):
    sigmoid: ClassVar[bool] = False

    def __init__(self, vllm_config: VllmConfig, rope: RotaryEmbedding, prefix: str) -> None:
        super().__init__()
        config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        check_hidden_act(config.hidden_act)
        self.self_attn = DeepseekV2Attention(vllm_config, rope, f"{prefix}.self_attn")
        self.mlp = (
            DeepseekV2MoE(vllm_config, f"{prefix}.mlp", self.sigmoid)
            if int(prefix.rsplit(".", 1)[1]) >= config.first_k_dense_replace
            else GatedMLP(config.hidden_size, config.intermediate_size, dtype, f"{prefix}.mlp")
        )
        self.make_norms(config, dtype, prefix)


class DeepseekV3DecoderLayer(DeepseekV2DecoderLayer):
    sigmoid = True


class DeepseekV2Model(DecoderModel):
    layer_cls: ClassVar[type[nn.Module]] = DeepseekV2DecoderLayer


class DeepseekV3Model(DeepseekV2Model):
    layer_cls = DeepseekV3DecoderLayer


class DeepseekV2ForCausalLM(CausalLM):
    model_cls: ClassVar[type[DecoderModel]] = DeepseekV2Model


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    model_cls = DeepseekV3Model
