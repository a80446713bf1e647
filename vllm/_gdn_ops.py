# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: PT018
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

import ctypes
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm import _cpu_ops, _xpu_ops

PAD_STATE_SLOT = 0
_CHUNK = 64
_L2_EPS = 1e-6


@dataclass(frozen=True)
class GDNWeights:
    """One layer's small weights on one rank, all fp32 and contiguous.

    conv_weight_KC: taps, oldest first. decay_rate_H: exp(A_log). dt_bias_H. norm_weight_E with ``eps``.
    """

    conv_weight_KC: Tensor
    decay_rate_H: Tensor
    dt_bias_H: Tensor
    norm_weight_E: Tensor
    eps: float
    num_k_heads: int
    head_k_dim: int

    @property
    def num_v_heads(self) -> int:
        return self.decay_rate_H.shape[0]

    @property
    def head_v_dim(self) -> int:
        return self.norm_weight_E.shape[0]

    @property
    def conv_dim(self) -> int:
        return self.conv_weight_KC.shape[1]

    @property
    def value_dim(self) -> int:
        return self.num_v_heads * self.head_v_dim

    def split(self, x_TN: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Views of the projection: convolution input [T, C], z [T, H, E], b [T, H], a [T, H]."""
        H = self.num_v_heads
        mixed, z, b, a = x_TN.split([self.conv_dim, self.value_dim, H, H], dim=-1)
        return mixed, z.unflatten(-1, (H, self.head_v_dim)), b, a


# ---------------------------------------------------------------------------------------------------------------------
# Plain torch: what is right, and what runs where no kernel can


def _requests(query_start_loc: Tensor, state_indices: Tensor) -> Iterator[tuple[int, int, int]]:
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
    for first, end, slot in _requests(query_start_loc, state_indices):
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
    for first, end, slot in _requests(query_start_loc, state_indices):
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
    rule: DeltaRule | None = delta_rule_recurrent,
) -> Tensor:
    """Twin of ``gated_delta_net``, computed in ``dtype``; ``rule`` None takes the Triton kernels of fla-core."""
    mixed, z, b, a = weights.split(x_TN)
    G, H, D = weights.num_k_heads, weights.num_v_heads, weights.head_k_dim
    y = causal_conv1d_ref(mixed, weights.conv_weight_KC.to(dtype), conv_state, query_start_loc, state_indices)
    q, k, v = y.split([G * D, G * D, weights.value_dim], dim=-1)
    g = -weights.decay_rate_H.to(dtype) * F.softplus(a.to(dtype) + weights.dt_bias_H.to(dtype))
    args = (q.unflatten(-1, (G, D)), k.unflatten(-1, (G, D)), v.unflatten(-1, (H, -1)), g, b.to(dtype).sigmoid())
    if rule is None:
        o = gated_delta_rule_fla(*args, recurrent_state, query_start_loc, state_indices)
    else:
        o = gated_delta_rule_ref(*args, recurrent_state, query_start_loc, state_indices, rule)
    real = int(query_start_loc[-1])
    out = torch.zeros(x_TN.shape[0], weights.value_dim, dtype=x_TN.dtype, device=x_TN.device)
    out[:real] = rms_norm_gated_ref(o[:real], z[:real], weights.norm_weight_E.to(dtype), weights.eps).flatten(1)
    rows = itertools.pairwise(query_start_loc.tolist())
    for (first, end), slot in zip(rows, state_indices.tolist(), strict=True):
        if slot == PAD_STATE_SLOT:
            out[first:end] = 0
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Triton kernels of fla-core (CUDA, XPU)


def _fla() -> object | None:
    return _xpu_ops.kernel_package("fla.ops.gated_delta_rule")


def gated_delta_rule_fla(
    q_TGD: Tensor,
    k_TGD: Tensor,
    v_THE: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    state: Tensor,
    query_start_loc: Tensor,
    state_indices: Tensor,
) -> Tensor:
    """As ``gated_delta_rule_ref``. The kernels get the real rows and requests only, so none of theirs can be pads."""
    fla = _fla()
    assert fla is not None, "fla-core is not installed"
    H = v_THE.shape[1]
    out = torch.zeros_like(v_THE)
    kept = list(_requests(query_start_loc, state_indices))
    if not kept:
        return out
    real = kept[-1][1]
    assert [first for first, _, _ in kept[1:]] + [real] == [end for _, end, _ in kept], f"gaps between requests: {kept}"
    cu_seqlens = torch.tensor([0, *(end for _, end, _ in kept)], dtype=torch.int64, device=v_THE.device)
    slots = torch.tensor([slot for _, _, slot in kept], dtype=torch.int64, device=v_THE.device)
    only_decodes = real == len(kept)
    run = fla.fused_recurrent_gated_delta_rule if only_decodes else fla.chunk_gated_delta_rule  # type: ignore[attr-defined]
    q, k = (x[:real].repeat_interleave(H // x.shape[1], 1).contiguous()[None] for x in (q_TGD, k_TGD))
    o, final = run(
        q,
        k,
        v_THE[None, :real].contiguous(),
        g=g_TH[None, :real].float().contiguous(),
        beta=beta_TH[None, :real].contiguous(),
        scale=q_TGD.shape[-1] ** -0.5,
        initial_state=state[slots],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=cu_seqlens,
    )
    out[:real] = o[0]
    state[slots] = final
    return out


# ---------------------------------------------------------------------------------------------------------------------
# The C++ kernel


@functools.cache
def _cpu_kernel() -> Callable[..., int] | None:
    library = _cpu_ops._kernels()
    if library is None:
        return None
    i, n, f, p = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
    library.vc_gated_delta_net.argtypes = [i, *[n] * 7, p, n, p, p, p, p, f, p, p, n, p, p, p, n, i]
    return library.vc_gated_delta_net


def _gated_delta_net_cpu(
    kernel: Callable[..., int],
    x_TN: Tensor,
    weights: GDNWeights,
    conv_state: Tensor,
    recurrent_state: Tensor,
    query_start_loc: Tensor,
    state_indices: Tensor,
) -> Tensor:
    T, R = x_TN.shape[0], state_indices.shape[0]
    H, D, E = weights.num_v_heads, weights.head_k_dim, weights.head_v_dim
    (K, C), slots = weights.conv_weight_KC.shape, conv_state.shape[0]
    assert x_TN.shape[1] == C + H * E + 2 * H and x_TN.stride(1) == 1, (
        f"x is {x_TN.shape} {x_TN.stride()}, needed [T, {C + H * E + 2 * H}]"
    )
    assert conv_state.shape == (slots, K - 1, C) and recurrent_state.shape == (slots, H, D, E), (
        f"states are {conv_state.shape}, {recurrent_state.shape}, needed {(slots, K - 1, C)}, {(slots, H, D, E)}"
    )
    assert conv_state.dtype is x_TN.dtype and recurrent_state.dtype is torch.float32, (
        f"x is {x_TN.dtype}, states are {conv_state.dtype}, {recurrent_state.dtype}"
    )
    assert conv_state.is_contiguous() and recurrent_state.is_contiguous(), "the state pools must be contiguous"
    assert query_start_loc.shape == (R + 1,) and query_start_loc.dtype is state_indices.dtype is torch.int32, (
        f"tables are {query_start_loc.shape} {query_start_loc.dtype}, {state_indices.shape} {state_indices.dtype}"
    )
    out, at = x_TN.new_empty(T, H * E), _cpu_ops._at
    bad = kernel(
        _cpu_ops._CODE[x_TN.dtype], T, R, weights.num_k_heads, H, D, E, K, at(x_TN), x_TN.stride(0),
        at(weights.conv_weight_KC), at(weights.decay_rate_H), at(weights.dt_bias_H),
        at(weights.norm_weight_E), weights.eps, at(conv_state), at(recurrent_state), slots,
        at(query_start_loc), at(state_indices), at(out), out.stride(0), torch.get_num_threads(),
    )  # fmt: skip
    assert not bad, (
        f"{T} rows and {slots} slots do not fit query_start_loc {query_start_loc.tolist()}, slots "
        f"{state_indices.tolist()}"
    )
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Dispatch


def gated_delta_net(
    x_TN: Tensor,
    weights: GDNWeights,
    conv_state: Tensor,
    recurrent_state: Tensor,
    query_start_loc: Tensor,
    state_indices: Tensor,
    query_start_loc_cpu: Tensor | None = None,
) -> Tensor:
    """Everything between the projections: [T, H·E] of x's dtype, prefill and decode mixed.

    Args:
        x_TN: [T, N], the projection's rows q | k | v | z | b | a.
        conv_state: [S, K − 1, C] of x's dtype; recurrent_state: [S, H, D, E] fp32. Slots of the step's requests are
            updated, no other byte is touched.
        query_start_loc: int32 [R + 1], rising from 0; ``query_start_loc_cpu`` is the same on the host, where given.
        state_indices: int32 [R], each in [0, S).

    A request's result depends neither on the batch around it nor, with the C++ kernel, on how its tokens are cut into
    steps: bitwise.
    """
    args = (x_TN, weights, conv_state, recurrent_state, query_start_loc, state_indices)
    if x_TN.is_cpu and (kernel := _cpu_kernel()) is not None:
        return _gated_delta_net_cpu(kernel, *args)
    if _xpu_ops.has_gdn_attention(x_TN.device):
        host = query_start_loc.cpu() if query_start_loc_cpu is None else query_start_loc_cpu
        return _xpu_ops.gated_delta_net(*args, host)
    use_fla = not x_TN.is_cpu and _fla() is not None
    return gated_delta_net_ref(*args, dtype=torch.float32, rule=None if use_fla else delta_rule_chunked)
