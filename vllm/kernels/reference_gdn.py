# SPDX-License-Identifier: Apache-2.0
"""The gated delta net between its projections (Yang et al. 2024, "Gated Delta Networks"): causal convolution, gated
delta rule with a state of fixed size per request, gated RMS norm.

Shape letters: T token rows, R requests, S state slots, C = 2·G·D + H·E convolution channels (q | k | v), K taps,
G key heads of size D, H value heads of size E (H a multiple of G; key head i serves value heads i·H/G and on),
N = C + H·E + 2·H columns of the projection (q | k | v | z | b | a).

For one value head with state S [D, E], log decay g ≤ 0 and step β, token after token:

    S ← exp(g) S;   S ← S + k βᵀ(v − Sᵀk);   o = Sᵀq

Rows [query_start_loc[r], query_start_loc[r + 1]) are request r's next tokens; its state is in slot state_indices[r].
Slot 0 is the pad slot: it is neither read nor written, and its rows come out 0, as do rows past query_start_loc[-1].
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.kernels.padding import PAD_STATE_SLOT
from vllm.kernels.weights import GDNWeights

_CHUNK = 64
_L2_EPS = 1e-6


def requests(query_start_loc: Tensor, state_indices: Tensor) -> Iterator[tuple[int, int, int]]:
    """(first row, end row, slot) of every request that has rows and a slot of its own."""
    rows = itertools.pairwise(query_start_loc.tolist())
    for (first, end), slot in zip(rows, state_indices.tolist(), strict=True):
        if first < end and slot != PAD_STATE_SLOT:
            yield first, end, slot


def causal_conv1d_ref(
    x_TC: Tensor, weight_KC: Tensor, conv_state: Tensor, query_start_loc: Tensor, state_indices: Tensor
) -> Tensor:
    """silu of the depthwise causal convolution, [T, C] in the weights' dtype; conv_state [S, K − 1, C] holds the last
    K − 1 inputs of each request and is updated."""
    K = weight_KC.shape[0]
    y_TC = torch.zeros(x_TC.shape, dtype=weight_KC.dtype, device=x_TC.device)
    for first, end, slot in requests(query_start_loc, state_indices):
        inputs = torch.cat([conv_state[slot].to(weight_KC.dtype), x_TC[first:end].to(weight_KC.dtype)])
        terms = [inputs[j : j + end - first] * weight_KC[j] for j in range(K)]
        y_TC[first:end] = F.silu(sum(terms[1:], start=terms[0]))
        conv_state[slot] = inputs[end - first :].to(conv_state.dtype)
    return y_TC


def delta_rule_recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """The definition, token after token: q, k [H, n, D], v [H, n, E], g, beta [H, n] → [H, n, E].

    state [H, D, E] is updated in place; everything is computed in its dtype.
    """
    out = torch.empty_like(v)
    for t in range(q.shape[1]):
        state *= g[:, t, None, None].exp()
        delta = beta[:, t, None] * (v[:, t] - (k[:, t, :, None] * state).sum(1))
        state += k[:, t, :, None] * delta[:, None]
        out[:, t] = (q[:, t, :, None] * state).sum(1)
    return out


def delta_rule_chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """As ``delta_rule_recurrent``, 64 tokens at a time.

    With Γ the running sum of g in a chunk and M[i, j] = exp(Γᵢ − Γⱼ) for j ≤ i, the corrections U of a chunk solve
    (I + tril(β K Kᵀ ∘ M, −1)) U = β (V − exp(Γ) K S); then O = exp(Γ) Q S + (Q Kᵀ ∘ M) U, and the next state is
    exp(Γₙ) S + (exp(Γₙ − Γ) K)ᵀ U.
    """
    out = torch.empty_like(v)
    for first in range(0, q.shape[1], _CHUNK):
        rows = slice(first, first + _CHUNK)
        Q, K, V, B = q[:, rows], k[:, rows], v[:, rows], beta[:, rows, None]
        log_decay = g[:, rows].cumsum(-1)
        n = Q.shape[1]
        future = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        M = (log_decay[:, :, None] - log_decay[:, None]).masked_fill(future, float("-inf")).exp()
        decay = log_decay.exp()[..., None]
        system = B * (K @ K.transpose(-1, -2)) * M
        U = torch.linalg.solve_triangular(system, B * (V - decay * (K @ state)), upper=False, unitriangular=True)
        out[:, rows] = decay * (Q @ state) + ((Q @ K.transpose(-1, -2)) * M) @ U
        to_end = (log_decay[:, -1:] - log_decay).exp()[..., None]
        state.mul_(decay[:, -1:]).add_((to_end * K).transpose(-1, -2) @ U)
    return out


DeltaRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def gated_delta_rule_ref(
    q_TGD: Tensor,
    k_TGD: Tensor,
    v_THE: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    state: Tensor,
    query_start_loc: Tensor,
    state_indices: Tensor,
    rule: DeltaRule = delta_rule_recurrent,
) -> Tensor:
    """[T, H, E] in v's dtype; state [S, H, D, E] is updated. q and k are normalised here and q scaled by D^-0.5."""
    H = v_THE.shape[1]
    q_TGD, k_TGD = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS) for x in (q_TGD, k_TGD))
    q, k = (x.repeat_interleave(H // x.shape[1], 1).transpose(0, 1) for x in (q_TGD * q_TGD.shape[-1] ** -0.5, k_TGD))
    v, g, beta = v_THE.transpose(0, 1), g_TH.T, beta_TH.T
    out = torch.zeros_like(v_THE)
    for first, end, slot in requests(query_start_loc, state_indices):
        rows = slice(first, end)
        wide = state[slot].to(v.dtype)
        one = rule if end - first > 1 else delta_rule_recurrent
        out[rows] = one(q[:, rows], k[:, rows], v[:, rows], g[:, rows], beta[:, rows], wide).transpose(0, 1)
        state[slot] = wide.to(state.dtype)
    return out


def rms_norm_gated_ref(x: Tensor, z: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """x / rms(x) · weight · silu(z), over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight_E * F.silu(z.to(x.dtype))


def gated_delta_net_ref(
    x_TN: Tensor,
    weights: GDNWeights,
    conv_state: Tensor,
    recurrent_state: Tensor,
    query_start_loc: Tensor,
    state_indices: Tensor,
    dtype: torch.dtype = torch.float64,
    rule: DeltaRule = delta_rule_recurrent,
) -> Tensor:
    """Twin of ``ops.gated_delta_net``, computed in ``dtype``."""
    mixed, z, b, a = weights.split(x_TN)
    G, H, D = weights.num_k_heads, weights.num_v_heads, weights.head_k_dim
    y = causal_conv1d_ref(mixed, weights.conv_weight_KC.to(dtype), conv_state, query_start_loc, state_indices)
    q, k, v = y.split([G * D, G * D, weights.value_dim], dim=-1)
    g = -weights.decay_rate_H.to(dtype) * F.softplus(a.to(dtype) + weights.dt_bias_H.to(dtype))
    args = (q.unflatten(-1, (G, D)), k.unflatten(-1, (G, D)), v.unflatten(-1, (H, -1)), g, b.to(dtype).sigmoid())
    o = gated_delta_rule_ref(*args, recurrent_state, query_start_loc, state_indices, rule)
    real = int(query_start_loc[-1])
    out = torch.zeros(x_TN.shape[0], weights.value_dim, dtype=x_TN.dtype, device=x_TN.device)
    out[:real] = rms_norm_gated_ref(o[:real], z[:real], weights.norm_weight_E.to(dtype), weights.eps).flatten(1)
    rows = itertools.pairwise(query_start_loc.tolist())
    for (first, end), slot in zip(rows, state_indices.tolist(), strict=True):
        if slot == PAD_STATE_SLOT:
            out[first:end] = 0
    return out
