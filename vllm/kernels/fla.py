# SPDX-License-Identifier: Apache-2.0
"""Thin wrappers over the Triton kernels of fla-core (CUDA, XPU). Contracts are those of ``kernels.ops``.

Nothing in this file has run on a device; its tests put a stand-in with the kernels' documented habits in their place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.kernels.packages import kernel_package
from vllm.kernels.reference_gdn import gated_delta_net_ref, requests
from vllm.kernels.weights import GDNWeights


def gated_delta_rule(
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
    fla = kernel_package("fla.ops.gated_delta_rule")
    assert fla is not None, "fla-core is not installed"
    H = v_THE.shape[1]
    out = torch.zeros_like(v_THE)
    kept = list(requests(query_start_loc, state_indices))
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
        x_TN,
        weights,
        conv_state,
        recurrent_state,
        query_start_loc,
        state_indices,
        torch.float32,
        over_requests=gated_delta_rule,
    )
