# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: PT018
"""The choice of experts by the C++ kernel, with the contracts of ``kernels.ops``. Of experts with equal scores the one
with the lowest number is taken."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from vllm.kernels.cpu.ops import _CODE, _at, _kernels, _slots, _threads
from vllm.kernels.routers import routers

_i16_f = struct.Struct("16qd").pack


def _route(
    logits_TE: Tensor,
    top_k: int,
    renormalize: bool,
    slot_mapping_T: Tensor,
    sigmoid: bool,
    bias_E: Tensor | None,
    scale: float,
    groups: tuple[int, int, int],
) -> tuple[Tensor, Tensor]:
    (T, E), (l0, l1), (num_groups, topk_groups, group_top) = logits_TE.shape, logits_TE.stride(), groups
    assert 0 < top_k <= E, f"{top_k} of {E} experts"
    assert E % num_groups == 0, f"{num_groups} groups of {E} experts"
    assert group_top <= E // num_groups and topk_groups <= num_groups and top_k <= topk_groups * (E // num_groups), (
        f"{top_k} experts of {topk_groups} groups of {E // num_groups} each, by their best {group_top}"
    )
    assert l1 == 1 or E == 1, f"last stride of the logits is {l1}, needed 1"
    bias = 0
    if bias_E is not None:
        bias_E = bias_E.float().contiguous()
        assert bias_E.shape == (E,), f"bias is {bias_E.shape}, needed {(E,)}"
        bias = _at(bias_E)
    weights = logits_TE.new_empty(T, top_k, dtype=torch.float32)
    ids = logits_TE.new_empty(T, top_k, dtype=torch.int32)
    _kernels().vc_route(
        _i16_f(
            _CODE[logits_TE.dtype], T, E, top_k, sigmoid, renormalize, num_groups, topk_groups, group_top,
            _at(logits_TE), l0, bias, _slots(slot_mapping_T, T), _at(weights), _at(ids), _threads(), scale,
        )
    )  # fmt: skip
    return weights, ids


topk_softmax, topk_sigmoid, grouped_topk = routers(_route)
