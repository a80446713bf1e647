# SPDX-License-Identifier: Apache-2.0
"""The C++ choice of experts, gates and pad rows against fp64, with NaN in all that is padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from padding_slots import slots
from torch import Tensor

from vllm.kernels import cpu, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAN = float("nan")
# operator, sigmoid, with a bias, (groups, kept, judged by their best)
CHOICES: dict[str, tuple[str, bool, bool, tuple[int, ...]]] = {
    "softmax": ("topk_softmax", False, False, (1, 1, 1)),
    "sigmoid": ("topk_sigmoid", True, False, (1, 1, 1)),
    "sigmoid with bias": ("topk_sigmoid", True, True, (1, 1, 1)),
    "groups by softmax": ("grouped_topk", False, False, (4, 2, 1)),
    "groups by sigmoid": ("grouped_topk", True, True, (4, 2, 2)),
    "all groups": ("grouped_topk", True, True, (4, 4, 2)),
}


def rows_of(T: int, E: int, dtype: torch.dtype) -> Tensor:
    """Logits [T, E] as a view into wider rows of NaN; those of a row are no two close, so that there is one order."""
    g = torch.Generator().manual_seed(T + E)
    whole = torch.full((T, E + 3), NAN, dtype=dtype)
    for row in whole:
        row[:E] = torch.randperm(E, generator=g) * (8.0 / E) - 4.0
    return whole[:, :E]


def by_hand(logits: Tensor, K: int, sigmoid: bool, bias: Tensor | None, groups: tuple[int, ...]) -> tuple[Any, Tensor]:
    """(ids [T, K], their scores) in fp64."""
    scores = logits.double().sigmoid() if sigmoid else logits.double().softmax(-1)
    keys = (scores if bias is None else scores + bias.double()).unflatten(1, (groups[0], -1))
    worth = keys.topk(groups[2]).values.sum(-1)
    for row, best in zip(keys, worth.topk(groups[1]).indices.tolist(), strict=True):
        row[[g for g in range(groups[0]) if g not in best]] = -torch.inf
    ids = keys.flatten(1).topk(K).indices
    return ids, scores.gather(1, ids)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.usefixtures("nan_poison")
def test_experts_are_those_of_fp64(choice: str, dtype: torch.dtype) -> None:
    operator, sigmoid, biased, groups = CHOICES[choice]
    for E, K in ((8, 2), (60, 4), (256, 8)):
        bias = torch.randperm(E, generator=torch.Generator().manual_seed(E)) * (0.9 / E) - 0.4 if biased else None
        rest = (*groups, sigmoid) if operator == "grouped_topk" else ()
        rest = (*rest, bias) if sigmoid else rest
        for T, real, renormalize in ((1, 1, True), (7, 4, False), (5, 0, True), (0, 0, True), (300, 290, True)):
            logits = rows_of(T, E, dtype)
            logits[real:] = NAN
            args = logits, K, renormalize, slots(real, T), *rest
            weights, ids = getattr(cpu, operator)(*args, scale=2.5)
            right_ids, right = by_hand(logits[:real], K, sigmoid, bias, groups)
            right = 2.5 * (right / right.sum(-1, keepdim=True) if renormalize else right)
            assert weights.dtype is torch.float32
            assert ids.dtype is torch.int32
            assert torch.equal(ids[:real].long(), right_ids)
            torch.testing.assert_close(weights[:real].double(), right, rtol=2e-6, atol=1e-12)
            assert ids[real:].eq(-1).all()
            assert weights[real:].eq(0).all()
            by_twin, its_ids = getattr(reference, operator)(*args, scale=2.5)
            assert torch.equal(ids, its_ids)
            torch.testing.assert_close(weights, by_twin, rtol=2e-6, atol=1e-12)


def test_padding_is_where_its_slot_says() -> None:
    """Not only behind the real rows."""
    logits, at = rows_of(6, 16, torch.float32), torch.tensor([7, -1, 0, 3, -1, 9])
    logits[at < 0] = NAN
    weights, ids = cpu.topk_softmax(logits, 3, True, at)
    for implementation in (cpu, reference):
        again, its_ids = implementation.topk_softmax(logits, 3, True, at)
        assert torch.equal(its_ids, ids)
        torch.testing.assert_close(again, weights)
    assert (ids < 0).all(1).tolist() == (at < 0).tolist()
    assert weights[at < 0].eq(0).all()


@pytest.mark.parametrize("choice", CHOICES)
def test_of_equal_experts_the_lowest_is_taken(choice: str) -> None:
    operator, sigmoid, biased, groups = CHOICES[choice]
    rest = (*groups, sigmoid) if operator == "grouped_topk" else ()
    rest = (*rest, torch.zeros(24)) if biased else rest
    kept = groups[1] * 24 // groups[0]
    logits = torch.randint(0, 3, (6, 24), generator=torch.Generator().manual_seed(0)).float()
    logits[-1] = 40.0  # the sigmoid's largest value
    logits[:, :kept] += 0.0 if groups[0] == groups[1] else 10.0  # which groups are kept
    _, ids = getattr(cpu, operator)(logits, 5, False, slots(6, 6), *rest)
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    order = scores[:, :kept].sort(dim=-1, descending=True, stable=True).indices
    assert torch.equal(ids.long(), order[:, :5])


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_a_real_row_of_nan_names_experts_that_exist_once_each_and_stays_nan(choice: str, bad: float) -> None:
    operator, sigmoid, _, groups = CHOICES[choice]
    rest = (*groups, sigmoid) if operator == "grouped_topk" else ()
    logits = rows_of(3, 16, torch.float32)
    clean, _ = getattr(cpu, operator)(logits, 3, True, slots(3, 3), *rest)
    logits[1] = bad
    weights, ids = getattr(cpu, operator)(logits, 3, True, slots(3, 3), *rest)
    assert sorted(set(ids[1].tolist())) == sorted(ids[1].tolist())
    assert set(ids[1].tolist()) <= set(range(16))
    assert weights[1].isnan().all() or (sigmoid and bad == float("inf"))
    assert torch.equal(weights[[0, 2]], clean[[0, 2]])


def test_a_row_is_bitwise_its_own() -> None:
    logits = rows_of(300, 60, torch.bfloat16)
    weights, ids = cpu.topk_softmax(logits, 4, True, slots(300, 300))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    for i in (0, 41, 299):
        alone = cpu.topk_softmax(logits[i : i + 1], 4, True, slots(1, 1))
        assert torch.equal(alone[0][0], weights[i])
        assert torch.equal(alone[1][0], ids[i])
    torch.set_num_threads(before)


def test_misuse_is_named() -> None:
    for args, message in (
        ((torch.zeros(2, 8), 9, True, slots(2, 2)), "9 of 8 experts"),
        ((torch.zeros(2, 8), 2, True, slots(2, 3)), "slots are"),
        ((torch.zeros(8, 2).T, 2, True, slots(2, 2)), "last stride"),
    ):
        with pytest.raises(AssertionError, match=message):
            cpu.topk_softmax(*args)
    with pytest.raises(AssertionError, match="5 experts of 2 groups of 2 each"):
        cpu.grouped_topk(torch.zeros(2, 8), 5, True, slots(2, 2), 4, 2, 2, True)
    with pytest.raises(AssertionError, match="the gate is"):
        cpu.sigmoid_gate(torch.zeros(2, 8), torch.zeros(2, 4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("nan_poison")
def test_gates_of_elements_and_of_rows(dtype: torch.dtype) -> None:
    """Queries and gates lie head after head in one row, as a projection of both puts them out."""
    g = torch.Generator().manual_seed(0)
    for T, H, D in ((1, 4, 64), (5, 3, 10), (0, 2, 8), (70, 2, 128)):
        queries, gate = (4 * torch.randn(T, H, 2, D, generator=g)).to(dtype).unbind(2)
        x, shared = torch.randn(T, H, D, generator=g).to(dtype), torch.randn(T, D, generator=g).to(dtype)
        one = gate[:, 0, :1]
        for rows, its_gate in ((x, gate), (shared, one), (x[:, 0], gate[:, 0]), (queries, gate[..., :1])):
            before = rows.double()
            by_twin = rows.clone()
            reference.sigmoid_gate(by_twin, its_gate)
            cpu.sigmoid_gate(rows, its_gate)
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(rows.double(), before * its_gate.double().sigmoid(), rtol=2 * eps, atol=1e-7)
            torch.testing.assert_close(rows, by_twin, rtol=2 * eps, atol=1e-7)
    x = torch.randn(3, 8).to(dtype)
    gate = torch.randn(3, 1).to(dtype)
    gate[1] = NAN
    cpu.sigmoid_gate(x, gate)
    assert x.isnan().all(1).tolist() == [False, True, False]
    assert not x[[0, 2]].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_pad_rows_become_zero_and_no_other_is_touched(dtype: torch.dtype) -> None:
    at = torch.tensor([5, -1, 0, -1])
    for shape in ((4, 7), (4, 3, 5), (4, 1)):
        for implementation in (cpu, reference):
            whole = torch.full((4, 2, *shape[1:]), 3.0, dtype=dtype)
            x = whole[:, 1]
            x[at < 0] = NAN
            implementation.zero_padding_rows(x, at)
            assert x[at < 0].eq(0).all()
            assert x[at >= 0].eq(3).all()
            assert whole[:, 0].eq(3).all()
        empty = torch.empty(0, *shape[1:], dtype=dtype)
        cpu.zero_padding_rows(empty, at[:0])
