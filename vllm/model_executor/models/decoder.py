# SPDX-License-Identifier: Apache-2.0
"""What the decoder-only models are made of: attention, feed-forward, a layer around one residual stream, the stack."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import gated_activation
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding, get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


class GatedMLP(nn.Module):
    """down(act(gate x) · up x); ``fused``: checkpoints have gate and up as one, ``gate_up_proj``."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype,
        prefix: str,
        bias: bool = False,
        reduce_results: bool = True,
        hidden_act: str = "silu",
        fused: bool = False,
    ) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size,
            [intermediate_size] * 2,
            bias,
            dtype,
            [f"{prefix}.gate_proj", f"{prefix}.up_proj"],
            f"{prefix}.gate_up_proj" if fused else None,
        )
        self.down_proj = RowParallelLinear(
            intermediate_size, hidden_size, bias, dtype, f"{prefix}.down_proj", reduce_results
        )
        self.act_fn = gated_activation(hidden_act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class DecoderAttention(nn.Module):
    """Grouped-query attention over the last ``sliding_window`` tokens, over all where it is None.

    ``qk_norm`` normalises each query and key head before the rotation (Qwen3), which ``rope`` None leaves out. What
    not every architecture's config defines is an argument, so that a key which another one left in a config means
    nothing. ``o_bias``: as ``bias``, which is that of q, k and v, where None. ``fused``: checkpoints have q, k and v as
    one tensor.
    """

    def __init__(
        self,
        config: Any,
        rope: RotaryEmbedding | None,
        dtype: torch.dtype,
        prefix: str,
        bias: bool = False,
        sliding_window: int | None = None,
        qk_norm: bool = False,
        o_bias: bool | None = None,
        fused: bool = False,
        zero_centered_norm: bool = False,
        scale: float | None = None,
        soft_cap: float = 0.0,
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
            fused=fused,
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * self.head_dim,
            config.hidden_size,
            bias if o_bias is None else o_bias,
            dtype,
            f"{prefix}.o_proj",
        )
        self.q_norm, self.k_norm = (
            RMSNorm(self.head_dim, config.rms_norm_eps, dtype, f"{prefix}.{name}", zero_centered_norm)
            if qk_norm
            else None
            for name in ("q_norm", "k_norm")
        )
        self.rotary_emb = rope
        self.attn = Attention(
            self.qkv_proj.num_heads,
            self.head_dim,
            self.head_dim**-0.5 if scale is None else scale,
            self.qkv_proj.num_kv_heads,
            dtype,
            f"{prefix}.attn",
            sliding_window,
            soft_cap,
        )

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        num_tokens = hidden_states.shape[0]
        q, k, v = self.qkv_proj.split(self.qkv_proj(hidden_states))
        q = q.view(num_tokens, self.qkv_proj.num_heads, self.head_dim)
        k = k.view(num_tokens, self.qkv_proj.num_kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q, out=q), self.k_norm(k, out=k)
        if self.rotary_emb is not None:
            self.rotary_emb(positions, q, k)
        return self.o_proj(self.attn(q.flatten(1), k.flatten(1), v))


def window_by_layer(config: Any, index: int) -> int | None:
    """The attention window of layer ``index`` by its ``layer_types``, None for full attention."""
    return config.sliding_window if config.layer_types[index] == "sliding_attention" else None


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward around one residual stream; subclasses make the four parts."""

    self_attn: nn.Module
    mlp: nn.Module
    input_layernorm: RMSNorm
    post_attention_layernorm: RMSNorm

    norms: ClassVar[tuple[str, ...]] = ("input_layernorm", "post_attention_layernorm")

    def make_norms(self, config: Any, dtype: torch.dtype, prefix: str, zero_centered: bool = False) -> None:
        for name in self.norms:
            norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, f"{prefix}.{name}", zero_centered)
            setattr(self, name, norm)

    def forward(
        self, positions: torch.Tensor, update: torch.Tensor | None, stream: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``update``: what the block before has yet to add to ``stream``, None in the first layer; both [T, hidden]."""
        normed, stream = self.input_layernorm.add(update, stream)
        normed, stream = self.post_attention_layernorm.add(self.self_attn(positions, normed), stream)
        return self.mlp(normed), stream


class DecoderModel(nn.Module):
    """Token ids [T] and positions [T] → hidden states [T, hidden].

    ``layer_cls(vllm_config, rope, prefix)`` maps (positions, update, stream) to (update, stream): the residual stream,
    and what its last block has yet to add to it.
    """

    layer_cls: ClassVar[type[nn.Module]]
    zero_centered_norm: ClassVar[bool] = False
    partial_rotary: ClassVar[bool] = False

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        model_config = vllm_config.model_config
        config, dtype = model_config.hf_config, model_config.dtype
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, dtype, f"{prefix}.embed_tokens"
        )
        rope = self.make_rope(config, model_config.max_model_len)
        self.layers = nn.ModuleList(
            self.layer_cls(vllm_config, rope, f"{prefix}.layers.{i}") for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, f"{prefix}.norm", self.zero_centered_norm)

    def make_rope(self, config: Any, max_model_len: int) -> Any:
        return get_rope(config, max_model_len, self.partial_rotary)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(input_ids)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        update, stream = None, self.embed(input_ids)
        for layer in self.layers:
            update, stream = layer(positions, update, stream)
        return self.norm.add(update, stream)[0]
