# SPDX-License-Identifier: Apache-2.0
"""Rows of an embedding: exact, and 0 for ids of another rank's part of the vocabulary, in all implementations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drawn import given, st

from vllm.kernels import ops, weights
from vllm.kernels.cpu import ops as cpu_ops

pytest.importorskip("triton")
from row_cases import DTYPES, NAN, few, randn, wide_rows

from vllm.kernels.triton import embedding


def check(vocab: int, parts: int, K: int, T: int, dtype: torch.dtype, device: Any) -> None:
    """Each part has a row of NaN more than it needs, and the last may have no id at all."""
    whole, size = randn(vocab, K).to(dtype), -(-vocab // parts)
    ids = torch.randint(0, vocab, (T,), generator=torch.Generator().manual_seed(T))
    ids[: min(T, 2)] = torch.tensor([vocab - 1, 0])[:T]
    for part in range(parts):
        first = min(part * size, vocab)
        last = min(first + size, vocab)
        held = torch.full((size + 1, K), NAN, dtype=dtype)
        held[: last - first] = whole[first:last]
        got = embedding(ids.to(device), weights.pack_linear_weight(wide_rows(held, device)), (first, last))
        mine = (ids >= first) & (ids < last)
        assert torch.equal(got.cpu()[mine], whole[ids[mine]])
        assert got.cpu()[~mine].eq(0).all()
    assert torch.equal(embedding(ids.to(device), weights.pack_linear_weight(whole.to(device))).cpu(), whole[ids])


@few
@given(st.integers(1, 3), st.integers(1, 5), st.sampled_from([1, 7, 40]), st.integers(1, 6), st.sampled_from(DTYPES))
def test_embedding(nan_poison, parts, vocab, K, T, dtype):
    check(vocab, parts, K, T, dtype, "cpu")


def test_wide_rows_take_several_programs(nan_poison):
    check(6, 2, 2500, 2, torch.float32, "cpu")


@pytest.mark.parametrize("implementation", ["reference", "cpu", "triton"])
def test_a_range_by_every_implementation(monkeypatch, implementation):
    monkeypatch.setenv("VLLM_KERNELS", f"{implementation},linear={'cpu' if implementation == 'cpu' else 'reference'}")
    weight, ids = randn(5, 8), torch.tensor([6, 5, 0, 7, 8, 9, 31])
    got = ops.embedding(ids, ops.pack_linear_weight(weight), (6, 9))
    want = torch.zeros(7, 8)
    want[0], want[3], want[4] = weight[0], weight[1], weight[2]
    assert torch.equal(got, want)
    assert ops.embedding(ids, ops.pack_linear_weight(weight), (3, 3)).eq(0).all()


def test_misuse_is_named():
    packed = weights.pack_linear_weight(torch.zeros(4, 8))
    with pytest.raises(AssertionError, match="from 3 to 8 do not fit 4 rows"):
        embedding(torch.zeros(1, dtype=torch.int64), packed, (3, 8))
    with pytest.raises(NotImplementedError, match="panels"):
        embedding(torch.zeros(1, dtype=torch.int64), cpu_ops.pack_linear_weight(torch.zeros(4, 8)))
    assert embedding(torch.zeros(0, dtype=torch.int64), packed).shape == (0, 8)
