# SPDX-License-Identifier: Apache-2.0
"""The choice of experts in Triton against its twin, with pad rows of NaN, which choose none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drawn import given, st
from padding_slots import slots

from vllm.kernels import ops, reference
from vllm.model_executor.layers.fused_moe import Router

pytest.importorskip("triton")
from row_cases import DTYPES, NAN, few, interpreted, randn, wide_rows

from vllm.kernels import triton as operators


def scores_of(logits: torch.Tensor, sigmoid: bool, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return logits.to(dtype).sigmoid() if sigmoid else logits.to(dtype).softmax(-1)


def check(
    rows: tuple[int, int],
    E: int,
    K: int,
    scoring: str,
    renormalize: bool,
    dtype: torch.dtype,
    device: Any,
) -> None:
    """``rows``: real ones and pads. Scores are off by 1e-6, so those of the chosen may be that much below the best."""
    real, pads = rows
    logits = 2 * randn(real + pads, E).to(dtype)
    logits[real:] = NAN
    bias = 0.3 * randn(E, seed=1) if scoring == "sigmoid with bias" else None
    args = (wide_rows(logits, device), K, renormalize, slots(real, real + pads, device))
    sigmoid = scoring != "softmax"
    if sigmoid:
        weights, ids = operators.topk_sigmoid(*args, None if bias is None else bias.to(device))
        by_twin, _ = reference.topk_sigmoid(logits, K, renormalize, slots(real, real + pads), bias)
    else:
        weights, ids = operators.topk_softmax(*args)
        by_twin, _ = reference.topk_softmax(logits, K, renormalize, slots(real, real + pads))
    weights, ids = weights.cpu(), ids.cpu()
    assert weights.dtype is torch.float32
    assert ids.dtype is torch.int32
    assert ids[real:].eq(-1).all()
    assert weights[real:].eq(0).all()
    ids, weights = ids[:real].long(), weights[:real].double()
    assert all(len(set(row)) == K and set(row) <= set(range(E)) for row in ids.tolist())
    scores = scores_of(logits[:real], sigmoid)
    keys = scores if bias is None else scores + bias.double()
    chosen = keys.gather(1, ids)
    torch.testing.assert_close(chosen, keys.topk(K).values, rtol=1e-6, atol=1e-6)
    want = scores.gather(1, ids)
    if renormalize:
        want /= want.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, want, rtol=4e-6, atol=1e-12)
    if bias is None:
        torch.testing.assert_close(weights, by_twin[:real].double(), rtol=4e-6, atol=1e-12)


@few
@given(
    st.tuples(st.integers(0, 5), st.integers(0, 3)),
    st.sampled_from([(1, 1), (5, 3), (8, 8), (24, 4)]),
    st.sampled_from(["softmax", "sigmoid", "sigmoid with bias"]),
    st.booleans(),
    st.sampled_from(DTYPES),
)
def test_topk(nan_poison, rows, sizes, scoring, renormalize, dtype):
    check(rows, *sizes, scoring, renormalize, dtype, "cpu")


@pytest.mark.parametrize("scoring", ["topk_softmax", "topk_sigmoid"])
def test_of_equal_experts_the_lowest_is_taken(scoring):
    logits = torch.randint(0, 3, (6, 24), generator=torch.Generator().manual_seed(0)).float()
    logits[-1] = 40.0  # the sigmoid's largest value
    _, ids = getattr(operators, scoring)(logits, 5, False, slots(6, 6))
    in_order = scores_of(logits, scoring == "topk_sigmoid", torch.float32).sort(dim=-1, descending=True, stable=True)
    assert torch.equal(ids.long(), in_order.indices[:, :5])


@interpreted("invalid value encountered in subtract")
@pytest.mark.parametrize("scoring", ["topk_softmax", "topk_sigmoid"])
def test_a_real_row_of_nan_names_experts_that_exist_and_stays_nan(scoring):
    logits = randn(3, 6)
    logits[1] = NAN
    weights, ids = getattr(operators, scoring)(logits, 3, True, slots(3, 3))
    assert weights[1].isnan().all()
    assert ids[1].tolist() == [0, 1, 2]
    assert weights[[0, 2]].isfinite().all()


def test_a_row_does_not_depend_on_the_others():
    logits = randn(70, 24)
    weights, ids = operators.topk_softmax(logits, 4, True, slots(70, 70))
    for i in (0, 41, 69):
        alone = operators.topk_softmax(logits[i : i + 1], 4, True, slots(1, 1))
        assert torch.equal(alone[0][0], weights[i])
        assert torch.equal(alone[1][0], ids[i])


def test_sigmoid_equals_transformers():
    from transformers.models.minimax_m2.configuration_minimax_m2 import MiniMaxM2Config
    from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter

    router = MiniMaxM2TopKRouter(MiniMaxM2Config(hidden_size=16, num_local_experts=8, num_experts_per_tok=3))
    router.weight.data, x, bias = randn(8, 16), randn(5, 16, seed=2), 0.3 * randn(8, seed=3)
    logits, want, want_ids = router(x, bias)
    for implementation in (operators.topk_sigmoid, reference.topk_sigmoid, ops.topk_sigmoid):
        weights, ids = implementation(logits, 3, True, slots(5, 5), bias)
        for row in range(5):
            got = dict(zip(ids[row].tolist(), weights[row].tolist(), strict=True))
            assert got == pytest.approx(dict(zip(want_ids[row].tolist(), want[row].tolist(), strict=True)), rel=1e-5)


@few
@given(
    st.tuples(st.integers(0, 5), st.integers(0, 3)),
    st.sampled_from([(8, 4, 2, 3), (24, 3, 1, 2), (12, 6, 3, 6), (6, 6, 5, 4)]),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(DTYPES),
)
def test_groups(nan_poison, rows, sizes, group_top, sigmoid, renormalize, dtype):
    """By hand: the groups' worth in fp64, the experts of the best of them, the best of these. Scores are off by 1e-6,
    no two sums are as close."""
    (real, pads), (E, G, kept, K) = rows, sizes
    logits = 2 * randn(real + pads, E).to(dtype)
    logits[real:] = NAN
    bias, group_top = (0.3 * randn(E, seed=1) - 0.4 if sigmoid else None), min(group_top, E // G)
    scores = scores_of(logits[:real], sigmoid)
    keys = scores if bias is None else scores + bias.double()
    for implementation in (operators.grouped_topk, reference.grouped_topk):
        args = wide_rows(logits, "cpu"), K, renormalize, slots(real, real + pads), G, kept, group_top, sigmoid, bias
        weights, ids = implementation(*args)
        assert weights.dtype is torch.float32
        assert ids.dtype is torch.int32
        assert ids[real:].eq(-1).all()
        assert weights[real:].eq(0).all()
        for key, score, chosen, weight in zip(keys.tolist(), scores, ids.tolist(), weights, strict=False):
            each = E // G
            worth = [sum(sorted(key[g * each : (g + 1) * each])[-group_top:]) for g in range(G)]
            best = sorted(range(G), key=worth.__getitem__)[-kept:]
            allowed = [e for e in range(E) if e // each in best]
            assert chosen == sorted(allowed, key=key.__getitem__)[: -K - 1 : -1]
            want = score[chosen]
            want = want / want.sum() if renormalize else want
            torch.testing.assert_close(weight.double(), want, rtol=4e-6, atol=1e-12)


def test_groups_equal_transformers():
    """DeepSeek-V3's: all experts of the groups that were not kept have keys above some of the kept ones'."""
    from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 16}
    sizes |= {"num_experts_per_tok": 6, "n_group": 4, "topk_group": 2}
    v3 = DeepseekV3TopkRouter(DeepseekV3Config(**sizes, routed_scaling_factor=2.5, norm_topk_prob=True))
    v2 = DeepseekV2TopkRouter(
        DeepseekV2Config(**sizes, routed_scaling_factor=2.0, topk_method="group_limited_greedy", norm_topk_prob=False)
    )
    x = randn(5, 16, seed=2)
    for router, group_top, scale in ((v3, 2, 2.5), (v2, 1, 2.0)):
        router.weight.data = randn(16, 16)
        bias = None
        if router is v3:
            bias = router.e_score_correction_bias = randn(16, seed=3) - 1
        logits, want, want_ids = router(x)
        own = Router(16, 6, router is v3, "sigmoid" if router is v3 else "softmax", scale, None, 4, 2, group_top)
        own.bias = bias
        for implementation in (operators.grouped_topk, reference.grouped_topk, None):
            args = logits, 6, router is v3, slots(5, 5), 4, 2, group_top, router is v3, bias
            weights, ids = own(logits, slots(5, 5)) if implementation is None else implementation(*args)
            for row in range(5):
                got = dict(zip(ids[row].tolist(), weights[row].tolist(), strict=True))
                factor = 1 if implementation is None else 1 / scale
                right = dict(zip(want_ids[row].tolist(), (want[row] * factor).tolist(), strict=True))
                assert got == pytest.approx(right, rel=1e-5)


def test_the_softmax_of_the_chosen_is_the_renormalised_one_of_all():
    logits = 4 * randn(7, 12)
    want = logits.double().topk(4)
    weights, ids = Router(12, 4, True)(logits, slots(7, 7))
    assert torch.equal(ids.long(), want.indices)
    torch.testing.assert_close(weights.double(), want.values.softmax(-1), rtol=2e-6, atol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, 9, True), "num_experts_per_tok=9 of 8 experts"),
        ((8, 2, True, "tanh"), "scoring_func='tanh'"),
        ((8, 2, True, "sigmoid", 1.0, None, 3, 1), "n_group=3, topk_group=1 of 8 experts"),
        ((8, 2, True, "sigmoid", 1.0, None, 4, 5), "n_group=4, topk_group=5 of 8 experts"),
        ((8, 5, True, "sigmoid", 1.0, None, 4, 2), "num_experts_per_tok=5 of the 4 experts in 2 groups"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Router(*arguments)


def test_misuse_is_named():
    with pytest.raises(AssertionError, match="9 of 8 experts"):
        operators.topk_softmax(torch.zeros(2, 8), 9, True, slots(2, 2))
    with pytest.raises(NotImplementedError, match="5000 experts, the most is 4096"):
        operators.topk_softmax(torch.zeros(2, 5000), 9, True, slots(2, 2))
    with pytest.raises(AssertionError, match="slot_mapping"):
        operators.topk_softmax(torch.zeros(2, 8), 2, True, slots(2, 3))
    assert operators.topk_softmax(torch.zeros(0, 8), 2, True, slots(0, 0))[1].shape == (0, 2)
