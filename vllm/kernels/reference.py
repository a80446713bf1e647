# SPDX-License-Identifier: Apache-2.0
"""The operators in plain torch, for any device: what is right. Contracts and letters are those of ``kernels.ops``.

They ask the device for lengths and counts, so that a step with them waits many times. Those, and what makes tables
anew, are called between the pieces of a captured step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.compilation.recording import outside
from vllm.kernels.padding import PAD_EXPERT
from vllm.kernels.quantized import QuantizedWeight, dequantize, round_activations
from vllm.kernels.reference_gdn import GDNWeights, delta_rule_chunked, gated_delta_net_ref
from vllm.kernels.reference_sampling import apply_penalties, log_probabilities, row_max, sample  # noqa: F401
from vllm.kernels.weights import PackedExperts, PackedWeight, rows_in_range

FP8, E4M3_MAX = torch.float8_e4m3fn, 448.0
_MOST_SCORES = 1 << 24


def linear(x_TK: Tensor, packed: PackedWeight, bias_N: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    y = F.linear(x_TK, packed.data, bias_N)
    return y if out is None else out.copy_(y)


def embedding(ids_T: Tensor, packed: PackedWeight, vocab_range: tuple[int, int] | None = None) -> Tensor:
    if vocab_range is None:
        return F.embedding(ids_T, packed.data)
    rows, elsewhere = rows_in_range(ids_T, vocab_range)
    return F.embedding(rows, packed.data).masked_fill_(elsewhere[:, None], 0)


@outside
def quantized_linear(
    x_TK: Tensor, weight: QuantizedWeight, bias_N: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    wide = torch.promote_types(x_TK.dtype, torch.float32)
    y = F.linear(round_activations(x_TK, weight.activations).to(wide), dequantize(weight).to(wide))
    y = (y if bias_N is None else y + bias_N).to(x_TK.dtype if out is None else out.dtype)
    return y if out is None else out.copy_(y)


@outside
def quantized_embedding(ids_T: Tensor, weight: QuantizedWeight, vocab_range: tuple[int, int] | None = None) -> Tensor:
    if vocab_range is None:
        return dequantize(weight.rows(ids_T)).to(weight.dtype)
    rows, elsewhere = rows_in_range(ids_T, vocab_range)
    return quantized_embedding(rows, weight).masked_fill_(elsewhere[:, None], 0)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = weight_D * y.to(x.dtype) if weight_D.dtype is x.dtype else (weight_D * y).to(x.dtype)
    return y if out is None else out.copy_(y)


def fused_add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    residual_TD += x_TD
    return rms_norm(residual_TD, weight_D, eps, out), residual_TD


def silu_and_mul(x: Tensor, out: Tensor | None = None) -> Tensor:
    return _gated(F.silu, x, out)


def gelu_tanh_and_mul(x: Tensor, out: Tensor | None = None) -> Tensor:
    return _gated(functools.partial(F.gelu, approximate="tanh"), x, out)


def _gated(activation: Callable[[Tensor], Tensor], x: Tensor, out: Tensor | None) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    y = activation(gate) * up
    return y if out is None else out.copy_(y)


def swigluoai_and_mul(x: Tensor) -> Tensor:
    """The clamped form of gpt-oss, [T, 2 * D] = [gate, up] -> [T, D]; see ``ops.fused_experts``."""
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (gate * torch.sigmoid(1.702 * gate) * (up + 1)).to(x.dtype)


def sigmoid_gate(x: Tensor, gate: Tensor) -> None:
    x *= gate.sigmoid()


def rotary_embedding(
    positions_T: Tensor, q_THD: Tensor, k_TJD: Tensor, cos_sin_cache: Tensor, interleaved: bool = False
) -> None:
    rot_dim = cos_sin_cache.shape[1]
    cos, sin = cos_sin_cache[positions_T].unsqueeze(1).chunk(2, dim=-1)
    for x in (q_THD, k_TJD):
        of_a, of_b = (
            (slice(0, rot_dim, 2), slice(1, rot_dim, 2))
            if interleaved
            else (slice(0, rot_dim // 2), slice(rot_dim // 2, rot_dim))
        )
        a, b = (x[..., part].to(torch.promote_types(x.dtype, torch.float32), copy=True) for part in (of_a, of_b))
        x[..., of_a], x[..., of_b] = (a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype)


@outside
def reshape_and_cache(
    k_TJD: Tensor,
    v_TJD: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor | None,
    slot_mapping_T: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    def stored(x: Tensor, scale: float) -> Tensor:
        if key_cache.dtype is not FP8:
            return x
        return (x.to(torch.promote_types(x.dtype, torch.float32)) / scale).clamp(-E4M3_MAX, E4M3_MAX).to(FP8)

    block_size = key_cache.shape[2]
    real = slot_mapping_T >= 0
    slots = slot_mapping_T[real]
    block, offset = slots // block_size, slots % block_size
    key_cache[block, :, offset] = stored(k_TJD[real], k_scale)
    if v_TJD is not None and value_cache is not None:
        value_cache[block, :, offset] = stored(v_TJD[real], v_scale)


@outside
def paged_attention(
    q_THD: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    out_THD: Tensor,
    sliding_window: int = 0,
    num_reqs: int | None = None,
    sinks: Tensor | None = None,
    soft_cap: float = 0.0,
    query_start_loc_cpu: Tensor | None = None,
    seq_lens_cpu: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """A NaN among a chunk's own new keys or values may reach earlier rows of the chunk."""
    wide = torch.promote_types(q_THD.dtype, torch.float32)
    block_size, device = key_cache.shape[2], q_THD.device
    R = query_start_loc.shape[0] - 1 if num_reqs is None else num_reqs
    starts = (query_start_loc if query_start_loc_cpu is None else query_start_loc_cpu).tolist()
    lengths = (seq_lens if seq_lens_cpu is None else seq_lens_cpu).tolist()
    for r in range(R):
        first, last, length = starts[r], starts[r + 1], lengths[r]
        if length == 0 or first == last:
            continue
        begin_key = max(0, length - (last - first) + 1 - sliding_window) if sliding_window else 0
        key = torch.arange(begin_key, length, device=device)
        block, offset = block_table[r, key // block_size].long(), key % block_size
        keys, values = (
            cache[block, :, offset].transpose(0, 1).to(wide) * factor
            for cache, factor in ((key_cache, k_scale), (value_cache, v_scale))
        )
        at_once = _rows_at_once(q_THD.shape[1], length)
        for begin in range(first, last, at_once):
            end = min(begin + at_once, last)
            position = torch.arange(length - (last - begin), length - (last - end), device=device)[:, None]
            visible = key <= position
            if sliding_window:
                visible &= key > position - sliding_window
            queries = q_THD[begin:end].transpose(0, 1).to(wide)
            if sinks is None and not soft_cap:
                y = F.scaled_dot_product_attention(
                    queries, keys, values, attn_mask=visible, scale=scale, enable_gqa=True
                )
            else:
                scores = queries.unflatten(0, (keys.shape[0], -1)) @ keys.unsqueeze(1).mT * scale
                if soft_cap:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                scores = scores.masked_fill(~visible, -torch.inf).flatten(0, 1)
                if sinks is not None:
                    scores = torch.cat((scores, sinks.to(wide)[:, None, None].expand(-1, end - begin, 1)), dim=-1)
                weights = scores.softmax(-1)[..., : len(key)].unflatten(0, (keys.shape[0], -1))
                y = (weights @ values.unsqueeze(1)).flatten(0, 1)
            out_THD[begin:end] = y.transpose(0, 1).to(out_THD.dtype)
    out_THD[starts[R] :] = 0


def paged_attention_workspace(
    num_tokens: int, max_model_len: int, num_heads: int, num_kv_heads: int, head_size: int, dtype: torch.dtype
) -> int:
    rows = min(_rows_at_once(num_heads, max_model_len), num_tokens)
    # Gathered from the blocks, widened, and repeated for all heads; then mask, scores and weights, queries and result.
    copies = 2 * head_size * (num_kv_heads * (dtype.itemsize + 4) + 4 * num_heads)
    return max_model_len * (copies + 24 + rows * (2 + 8 * num_heads)) + rows * num_heads * head_size * 8


def _rows_at_once(num_heads: int, length: int) -> int:
    """Scores of all heads at a time: a long prompt in a long context would take more memory than the cache."""
    return max(_MOST_SCORES // (num_heads * length), 1)


@outside
def fused_experts(
    x_TD: Tensor,
    w13: PackedExperts,
    w2: PackedExperts,
    topk_ids_TS: Tensor,
    topk_weights_TS: Tensor,
    out: Tensor | None = None,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    def product(x: Tensor, packed: PackedExperts, e: int) -> Tensor:
        return F.linear(x, packed.data[e])

    return _experts(product, x_TD, w13, w2, topk_ids_TS, topk_weights_TS, out, b13, b2, activation)


@outside
def quantized_experts(
    x_TD: Tensor,
    w13: QuantizedWeight,
    w2: QuantizedWeight,
    topk_ids_TS: Tensor,
    topk_weights_TS: Tensor,
    out: Tensor | None = None,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """Each expert's weight is decoded when it has rows."""

    def product(x: Tensor, weight: QuantizedWeight, e: int) -> Tensor:
        return quantized_linear(x, weight.rows(e))

    return _experts(product, x_TD, w13, w2, topk_ids_TS, topk_weights_TS, out, b13, b2, activation)


def _experts(
    product: Callable[[Tensor, Any, int], Tensor],
    x_TD: Tensor,
    w13: Any,
    w2: Any,
    topk_ids_TS: Tensor,
    topk_weights_TS: Tensor,
    out: Tensor | None,
    b13: Tensor | None,
    b2: Tensor | None,
    activation: str,
) -> Tensor:
    act = {"silu": silu_and_mul, "swigluoai": swigluoai_and_mul}[activation]
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    y_TSD = x_TD.new_zeros((*topk_ids_TS.shape, x_TD.shape[1]), dtype=wide)
    for e in topk_ids_TS[topk_ids_TS >= 0].unique().tolist():
        token, slot = torch.where(topk_ids_TS == e)
        gate_up = product(x_TD[token], w13, e)
        y = product(act(gate_up if b13 is None else (gate_up + b13[e]).to(x_TD.dtype)), w2, e).to(wide)
        y_TSD[token, slot] = (y if b2 is None else y + b2[e]) * topk_weights_TS[token, slot, None]
    y = torch.zeros_like(x_TD, dtype=wide)
    for s in range(topk_ids_TS.shape[1]):
        y += y_TSD[:, s]
    return y.to(x_TD.dtype) if out is None else out.copy_(y)


def zero_padding_rows(x: Tensor, slot_mapping_T: Tensor) -> None:
    x.masked_fill_((slot_mapping_T < 0).view(-1, *[1] * (x.dim() - 1)), 0)


def topk_softmax(
    router_logits_TE: Tensor, top_k: int, renormalize: bool, slot_mapping_T: Tensor, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    chosen = router_logits_TE.float().softmax(-1).topk(top_k)
    return _shares(chosen.values, chosen.indices, renormalize, 0, slot_mapping_T, scale)


def topk_sigmoid(
    router_logits_TE: Tensor,
    top_k: int,
    renormalize: bool,
    slot_mapping_T: Tensor,
    bias_E: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    scores = router_logits_TE.float().sigmoid()
    ids = (scores if bias_E is None else scores + bias_E).topk(top_k).indices
    return _shares(scores.gather(1, ids), ids, renormalize, 1e-20, slot_mapping_T, scale)


def grouped_topk(
    router_logits_TE: Tensor,
    top_k: int,
    renormalize: bool,
    slot_mapping_T: Tensor,
    num_groups: int,
    topk_groups: int,
    group_top: int,
    sigmoid: bool,
    bias_E: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    logits = router_logits_TE.float()
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    keys_TGE = (scores if bias_E is None else scores + bias_E).unflatten(1, (num_groups, -1))
    best = keys_TGE.topk(group_top).values.sum(-1).topk(topk_groups).indices
    passed = torch.ones(keys_TGE.shape[:2], dtype=torch.bool, device=best.device).scatter_(1, best, False)
    ids = keys_TGE.masked_fill(passed[:, :, None], -torch.inf).flatten(1).topk(top_k).indices
    return _shares(scores.gather(1, ids), ids, renormalize, 1e-20 if sigmoid else 0, slot_mapping_T, scale)


def _shares(
    weights: Tensor, ids: Tensor, renormalize: bool, tiny: float, slot_mapping_T: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + tiny)
    if scale != 1.0:
        weights = weights * scale
    padding = slot_mapping_T[:, None] < 0
    return weights.masked_fill(padding, 0), ids.int().masked_fill_(padding, PAD_EXPERT)


@outside
def gated_delta_net(
    x_TN: Tensor,
    weights: GDNWeights,
    conv_state: Tensor,
    recurrent_state: Tensor,
    query_start_loc: Tensor,
    state_indices: Tensor,
    query_start_loc_cpu: Tensor | None = None,
) -> Tensor:
    return gated_delta_net_ref(
        x_TN, weights, conv_state, recurrent_state, query_start_loc, state_indices, torch.float32, delta_rule_chunked
    )
