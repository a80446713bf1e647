# SPDX-License-Identifier: Apache-2.0
"""The choice of experts. It ran in Triton's interpreter, not yet on hardware.

Of experts with equal scores the one with the lowest index is taken (``torch.topk`` promises no order).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.routers import routers
from vllm.kernels.triton.rows import DTYPES, fits, refuse_other_dtypes, rows_of, tile

_MOST_EXPERTS = 4096


@triton.jit(do_not_specialize=["num_rows"])
def _topk_kernel(
    logits, l0, bias, weights, ids, slots, num_rows, scale,
    E: tl.constexpr, K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_TOP: tl.constexpr, BLOCK_G: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    e, k = tl.arange(0, COLUMNS)[None, :], tl.arange(0, BLOCK_K)[None, :]
    real = tl.load(slots + t, t < num_rows, -1) >= 0
    x = tl.load(logits + t * l0 + e, real & (e < E), 0).to(tl.float32)
    x = tl.where(e < E, x, float("-inf"))
    if SIGMOID:
        score = tl.sigmoid(x)
    else:
        score = tl.exp(x - tl.max(x, axis=1)[:, None])
        score = score / tl.sum(score, axis=1)[:, None]
    key = score
    if bias is not None:
        key += tl.load(bias + e, e < E, 0).to(tl.float32)
    # A row of NaN still chooses K experts that exist, once each.
    key = tl.where(key != key, float("inf"), key)  # noqa: PLR0124
    key = tl.where(e < E, key, float("-inf"))
    if TOP_GROUPS < GROUPS:
        group, g = e // (E // GROUPS), tl.arange(0, BLOCK_G)[None, :]
        worth = tl.full([ROWS, BLOCK_G], float("-inf"), tl.float32)
        for i in range(GROUPS):
            of_group, total = tl.where(group == i, key, float("-inf")), tl.zeros([ROWS, 1], tl.float32)
            for _ in range(GROUP_TOP):
                total += tl.max(of_group, axis=1)[:, None]
                best = tl.argmax(of_group, axis=1, tie_break_left=True)[:, None]
                of_group = tl.where(e == best, float("-inf"), of_group)
            worth = tl.where(g == i, total, worth)
        kept = tl.zeros([ROWS, COLUMNS], tl.int1)
        for _ in range(TOP_GROUPS):
            best = tl.argmax(worth, axis=1, tie_break_left=True)[:, None]
            kept = kept | (group == best)
            worth = tl.where(g == best, float("-inf"), worth)
        key = tl.where(kept, key, float("-inf"))
    weight = tl.zeros([ROWS, BLOCK_K], tl.float32)
    chosen = tl.full([ROWS, BLOCK_K], -1, tl.int32)
    total = tl.zeros([ROWS], tl.float32)
    for i in range(K):
        best = tl.argmax(key, axis=1, tie_break_left=True)[:, None]
        of_best = tl.sum(tl.where(e == best, score, 0), axis=1)
        key = tl.where(e == best, float("-inf"), key)
        weight = tl.where(k == i, of_best[:, None], weight)
        chosen = tl.where(k == i, best, chosen)
        total += of_best
    if RENORMALIZE:
        weight = weight / (total + (1e-20 if SIGMOID else 0.0))[:, None]
    live = (t < num_rows) & (k < K)
    tl.store(weights + t * K + k, tl.where(real, weight * scale, 0), live)
    tl.store(ids + t * K + k, tl.where(real, chosen, -1), live)


def _topk(
    logits_TE: Tensor,
    top_k: int,
    renormalize: bool,
    slot_mapping_T: Tensor,
    sigmoid: bool,
    bias_E: Tensor | None,
    scale: float,
    groups: tuple[int, int, int],
) -> tuple[Tensor, Tensor]:
    refuse_other_dtypes(logits_TE)
    T, E = logits_TE.shape
    if E > _MOST_EXPERTS:
        raise NotImplementedError(f"{E} experts, the most is {_MOST_EXPERTS}")
    assert 0 < top_k <= E, f"{top_k} of {E} experts"
    num_groups, topk_groups, group_top = groups
    assert E % num_groups == 0, f"{num_groups} groups of {E} experts"
    wanted = f"{top_k} experts of {topk_groups} groups of {E // num_groups} each, by their best {group_top}"
    assert group_top <= E // num_groups, wanted
    assert top_k <= topk_groups * (E // num_groups), wanted
    fits("router_logits", logits_TE, (T, E), logits_TE.dtype)
    if bias_E is not None:
        fits("bias", bias_E, (E,), *DTYPES)
    weights, ids = (logits_TE.new_empty(T, top_k, dtype=dtype) for dtype in (torch.float32, torch.int32))
    shape = tile(E, _MOST_EXPERTS)
    fits("slot_mapping", slot_mapping_T, (T,), torch.int64)
    if T:
        _topk_kernel[(triton.cdiv(T, shape["ROWS"]),)](
            logits_TE, rows_of(logits_TE)[2], bias_E, weights, ids, slot_mapping_T, T, float(scale),
            E, top_k, sigmoid, renormalize, triton.next_power_of_2(top_k),
            num_groups, topk_groups, group_top, triton.next_power_of_2(num_groups), **shape,
        )  # fmt: skip
    return weights, ids


topk_softmax, topk_sigmoid, grouped_topk = routers(_topk)
