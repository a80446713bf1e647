# SPDX-License-Identifier: Apache-2.0
"""The gated delta net with the chunked Triton kernel of fla-core (CUDA, XPU), by the contract of ``kernels.ops``.

Nothing in this file has run on a device; its tests put a stand-in with the kernel's documented habits in its place.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.kernels.packages import kernel_package
from vllm.kernels.padding import with_rows
from vllm.kernels.weights import GDNWeights

_CHUNK = 64


def gated_delta_rule(
    q_TGD: Tensor,
    k_TGD: Tensor,
    v_THE: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    state: Tensor,
    query_start_loc: Tensor,
    state_indices: Tensor,
    num_chunks: int,
) -> Tensor:
    """As ``gated_delta_rule_ref``, for requests that all have rows and cover all of them, but the rows of the pad slot
    are what memory held. ``num_chunks``: of 64 rows, each request's last one begun; the host must know it."""
    fla = kernel_package("fla.ops.gated_delta_rule")
    assert fla is not None, "fla-core is not installed"
    H = v_THE.shape[1]
    # A tensor of its own: fla-core keeps what it derived from the last one that it was given, by identity.
    starts = query_start_loc.to(torch.int64, copy=True)
    chunks = (starts.diff() + _CHUNK - 1) // _CHUNK
    ends, chunk = chunks.cumsum(0), torch.arange(num_chunks, device=starts.device)
    request = torch.searchsorted(ends, chunk, right=True)
    slots = state_indices.long()
    before = state[slots]
    q, k = (x.repeat_interleave(H // x.shape[1], 1).contiguous()[None] for x in (q_TGD, k_TGD))
    out, after = fla.chunk_gated_delta_rule(  # type: ignore[attr-defined]
        q,
        k,
        v_THE.contiguous()[None],
        g=g_TH[None],
        beta=beta_TH[None],
        scale=q_TGD.shape[-1] ** -0.5,
        initial_state=before,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=starts,
        chunk_indices=torch.stack([request, chunk - (ends - chunks)[request]], 1),
    )
    state[slots] = torch.where((slots > 0)[:, None, None, None], after, before)
    return out[0]


def gated_delta_net(
    x_TN: Tensor,
    weights: GDNWeights,
    conv_state: Tensor,
    recurrent_state: Tensor,
    query_start_loc: Tensor,
    state_indices: Tensor,
    query_start_loc_cpu: Tensor | None = None,
) -> Tensor:
    """Steps with prompts; those of decodes alone, or without the host's copy of query_start_loc, are ``triton``'s."""
    from vllm.kernels.triton import gdn, norms

    lengths = query_start_loc_cpu.diff() if query_start_loc_cpu is not None else torch.zeros(0)
    if not bool((lengths > 1).any()):
        return gdn.gated_delta_net(
            x_TN, weights, conv_state, recurrent_state, query_start_loc, state_indices, query_start_loc_cpu
        )
    assert query_start_loc_cpu is not None
    real = int(query_start_loc_cpu[-1])
    starts, slots = with_rows(query_start_loc_cpu, query_start_loc, state_indices)
    G, D, H = weights.num_k_heads, weights.head_k_dim, weights.num_v_heads
    mixed, z, b, a = weights.split(x_TN[:real])
    y = gdn.causal_conv1d(mixed, weights.conv_weight_KC, conv_state, starts, slots, x_TN.dtype)
    q, k, v = y.split([G * D, G * D, weights.value_dim], dim=-1)
    o = gated_delta_rule(
        q.unflatten(-1, (G, D)),
        k.unflatten(-1, (G, D)),
        v.unflatten(-1, (H, -1)),
        -weights.decay_rate_H * F.softplus(a.float() + weights.dt_bias_H),
        b.float().sigmoid(),
        recurrent_state,
        starts,
        slots,
        int(((lengths + _CHUNK - 1) // _CHUNK).sum()),
    )
    live = (slots > 0).repeat_interleave(starts.diff(), output_size=real)
    out = x_TN.new_zeros(x_TN.shape[0], weights.value_dim)
    normed = norms.rms_norm_gated(o, z, weights.norm_weight_E, weights.eps).flatten(1)
    out[:real] = torch.where(live[:, None], normed, 0)
    return out
