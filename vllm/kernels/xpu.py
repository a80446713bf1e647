# SPDX-License-Identifier: Apache-2.0
"""Thin wrappers over the kernels of vllm-xpu-kernels, by the contracts of ``kernels.ops``. Each keeps law 2 around its
kernel: inputs narrowed to real rows and requests, and every row past them written here.

Nothing in this file has run on an XPU; its tests put a stand-in with the kernels' documented habits in their place.
"""

from __future__ import annotations

import torch

from vllm.kernels.packages import kernel_package
from vllm.kernels.reference_gdn import rms_norm_gated_ref
from vllm.kernels.weights import GDNWeights


def why_not(operator: str) -> str | None:
    """None where the installed kernels have ``operator``."""
    kernel_package("vllm_xpu_kernels._xpu_C")
    return None if hasattr(torch.ops._xpu_C, "gdn_attention") else f"this vllm-xpu-kernels has no kernel for {operator}"


def gdn_attention(
    x_TN: torch.Tensor,
    weights: GDNWeights,
    conv_state: torch.Tensor,
    recurrent_state: torch.Tensor,
    query_start_loc: torch.Tensor,
    state_indices: torch.Tensor,
    query_start_loc_cpu: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolution and delta rule: (core [T, H, E], z [T, H, E]), rows past the real ones exactly 0 in both.

    The kernel leaves rows that belong to no request as they were in core and writes garbage to them in z; given more
    rows than query_start_loc covers it counts them to the last request, whose convolution state it then overwrites.
    So it is given views that end with the last real row and the last request that has rows. Up to version 0.1.8 it
    asserts ``core.size(0) == num_actual_tokens``, which holds for these views.

    States were cleared when their requests began, so every request continues one (``has_initial_state`` all True).
    """
    lengths = query_start_loc_cpu.diff()
    num_reqs, real = int(torch.count_nonzero(lengths)), int(query_start_loc_cpu[-1])
    H, E = weights.num_v_heads, weights.head_v_dim
    core, z = (torch.empty(x_TN.shape[0], H, E, dtype=x_TN.dtype, device=x_TN.device) for _ in range(2))
    if num_reqs:
        only_decodes = real == num_reqs
        qkvz, ba = x_TN[:real].split([x_TN.shape[1] - 2 * H, 2 * H], dim=-1)
        torch.ops._xpu_C.gdn_attention(
            core[:real],
            z[:real],
            qkvz.contiguous(),
            ba.contiguous(),
            weights.num_k_heads,
            H,
            weights.head_k_dim,
            E,
            conv_state=conv_state,
            ssm_state=recurrent_state,
            conv_weights=weights.conv_weight_KC.T.to(x_TN.dtype).contiguous(),
            conv_bias=None,
            activation="silu",
            A_log=weights.decay_rate_H.log(),
            dt_bias=weights.dt_bias_H,
            num_prefills=0 if only_decodes else num_reqs,
            num_decodes=num_reqs if only_decodes else 0,
            num_spec_decodes=0,
            has_initial_state=torch.ones(num_reqs, dtype=torch.bool, device=x_TN.device),
            non_spec_query_start_loc=query_start_loc[: num_reqs + 1],
            non_spec_token_indx=None,
            non_spec_state_indices_tensor=state_indices[:num_reqs].contiguous(),
            spec_query_start_loc=None,
            spec_token_indx=None,
            spec_state_indices_tensor=None,
            num_accepted_tokens=None,
            num_actual_tokens=real,
            tp_size=1,
            reorder_input=True,
        )
    core[real:] = 0
    z[real:] = 0
    return core, z


def gated_delta_net(
    x_TN: torch.Tensor,
    weights: GDNWeights,
    conv_state: torch.Tensor,
    recurrent_state: torch.Tensor,
    query_start_loc: torch.Tensor,
    state_indices: torch.Tensor,
    query_start_loc_cpu: torch.Tensor | None = None,
) -> torch.Tensor:
    host = query_start_loc.cpu() if query_start_loc_cpu is None else query_start_loc_cpu
    core, z = gdn_attention(x_TN, weights, conv_state, recurrent_state, query_start_loc, state_indices, host)
    out = rms_norm_gated_ref(core.float(), z, weights.norm_weight_E, weights.eps)
    return out.to(x_TN.dtype).flatten(1)
