# SPDX-License-Identifier: Apache-2.0
"""Llama (Touvron et al. 2023; Grattafiori et al. 2024): pre-norm attention with rotary positions, SwiGLU."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import SiluAndMul, check_hidden_act
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models.causal_lm import CausalLM, DecoderModel


class LlamaMLP(nn.Module):
    """down(silu(gate x) · up x)."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype,
        prefix: str,
        bias: bool = False,
        reduce_results: bool = True,
    ) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size, [intermediate_size] * 2, bias, dtype, [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        )
        self.down_proj = RowParallelLinear(
            intermediate_size, hidden_size, bias, dtype, f"{prefix}.down_proj", reduce_results
        )
        self.act_fn = SiluAndMul()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class LlamaAttention(nn.Module):
    """Grouped-query attention over the last ``sliding_window`` tokens, over all where it is None.

    ``qk_norm`` normalises each query and key head before the rotation (Qwen3). What not every architecture's config
    defines is an argument, so that a key which another one left in a config means nothing.
    """

    def __init__(
        self,
        config: Any,
        rope: RotaryEmbedding,
        dtype: torch.dtype,
        prefix: str,
        bias: bool = False,
        sliding_window: int | None = None,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            self.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias,
            dtype,
            prefix,
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * self.head_dim, config.hidden_size, bias, dtype, f"{prefix}.o_proj"
        )
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype, f"{prefix}.q_norm") if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype, f"{prefix}.k_norm") if qk_norm else None
        self.rotary_emb = rope
        self.attn = Attention(
            self.qkv_proj.num_heads,
            self.head_dim,
            self.head_dim**-0.5,
            self.qkv_proj.num_kv_heads,
            dtype,
            f"{prefix}.attn",
            sliding_window,
        )

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        num_tokens = hidden_states.shape[0]
        q, k, v = self.qkv_proj.split(self.qkv_proj(hidden_states))
        q = q.view(num_tokens, self.qkv_proj.num_heads, self.head_dim)
        k = k.view(num_tokens, self.qkv_proj.num_kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q, out=q), self.k_norm(k, out=k)
        self.rotary_emb(positions, q, k)
        return self.o_proj(self.attn(q.flatten(1), k.flatten(1), v))


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward around one residual stream; subclasses make the four parts."""

    self_attn: nn.Module
    mlp: nn.Module
    input_layernorm: RMSNorm
    post_attention_layernorm: RMSNorm

    def make_norms(self, config: Any, dtype: torch.dtype, prefix: str, zero_centered: bool = False) -> None:
        self.input_layernorm, self.post_attention_layernorm = (
            RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, f"{prefix}.{name}", zero_centered)
            for name in ("input_layernorm", "post_attention_layernorm")
        )

    def forward(
        self, positions: torch.Tensor, update: torch.Tensor | None, stream: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``update``: what the block before has yet to add to ``stream``, None in the first layer; both [T, hidden]."""
        normed, stream = self.input_layernorm.add(update, stream)
        normed, stream = self.post_attention_layernorm.add(self.self_attn(positions, normed), stream)
        return self.mlp(normed), stream


class LlamaDecoderLayer(DecoderLayer):
    qk_norm: ClassVar[bool] = False
    mlp_has_bias: ClassVar[bool] = True

    def __init__(self, vllm_config: VllmConfig, rope: RotaryEmbedding, prefix: str) -> None:
        super().__init__()
        config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        check_hidden_act(config.hidden_act)
        window = self.sliding_window(config, int(prefix.rsplit(".", 1)[1]))
        attention_bias = bool(getattr(config, "attention_bias", False))
        self.self_attn = LlamaAttention(
            config, rope, dtype, f"{prefix}.self_attn", attention_bias, window, self.qk_norm
        )
        mlp_bias = self.mlp_has_bias and bool(getattr(config, "mlp_bias", False))
        self.mlp = LlamaMLP(config.hidden_size, config.intermediate_size, dtype, f"{prefix}.mlp", mlp_bias)
        self.make_norms(config, dtype, prefix)

    @staticmethod
    def sliding_window(config: Any, index: int) -> int | None:
        """The attention window of layer ``index``, None for full attention; Llama has none."""
        return None


class LlamaModel(DecoderModel):
    layer_cls = LlamaDecoderLayer


class LlamaForCausalLM(CausalLM):
    model_cls = LlamaModel
