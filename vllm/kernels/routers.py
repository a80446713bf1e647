# SPDX-License-Identifier: Apache-2.0
"""The operators that choose experts, of the one kernel that does; contracts in ``kernels.ops``."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Chosen = tuple[Tensor, Tensor]


def routers(route: Callable[..., Chosen]) -> tuple[Callable[..., Chosen], Callable[..., Chosen], Callable[..., Chosen]]:
    """``topk_softmax``, ``topk_sigmoid`` and ``grouped_topk``. ``route`` takes logits [T, E], top_k, renormalize, slots
    [T], whether scores are sigmoids, the bias [E] or None, the scale, and (groups, groups to choose, the best experts
    that judge a group)."""

    def topk_softmax(
        router_logits_TE: Tensor, top_k: int, renormalize: bool, slot_mapping_T: Tensor, scale: float = 1.0
    ) -> Chosen:
        return route(router_logits_TE, top_k, renormalize, slot_mapping_T, False, None, scale, (1, 1, 1))

    def topk_sigmoid(
        router_logits_TE: Tensor,
        top_k: int,
        renormalize: bool,
        slot_mapping_T: Tensor,
        bias_E: Tensor | None = None,
        scale: float = 1.0,
    ) -> Chosen:
        return route(router_logits_TE, top_k, renormalize, slot_mapping_T, True, bias_E, scale, (1, 1, 1))

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
    ) -> Chosen:
        groups = num_groups, topk_groups, group_top
        return route(router_logits_TE, top_k, renormalize, slot_mapping_T, sigmoid, bias_E, scale, groups)

    return topk_softmax, topk_sigmoid, grouped_topk
