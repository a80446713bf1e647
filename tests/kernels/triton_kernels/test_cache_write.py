# SPDX-License-Identifier: Apache-2.0
"""The write into the paged cache in Triton: exact, in its slots only, among NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drawn import given, st

pytest.importorskip("triton")
from row_cases import DTYPES, NAN, few, randn, wide_rows

from vllm.kernels.triton import reshape_and_cache, zero_padding_rows


def check(
    T: int, J: int, D: int, block_size: int, dtype: torch.dtype, skipped: float, device: Any, blocks: int = 3
) -> None:
    """A block lies before and one behind the caches, for what a slot -1 that wraps would write to."""
    generator = torch.Generator().manual_seed(T)
    slots = torch.randperm(blocks * block_size, generator=generator)[:T]
    slots[torch.rand(T, generator=generator) < skipped] = -1
    fused = randn(T, 2 * J * D).to(dtype)
    fused[slots < 0] = NAN  # a skipped token holds anything
    k_cpu, v_cpu = (part.unflatten(1, (J, D)) for part in fused.chunk(2, dim=1))
    k, v = (part.unflatten(1, (J, D)) for part in wide_rows(fused, device).chunk(2, dim=1))
    memory = torch.full((2, blocks + 2, J, block_size, D), NAN, dtype=dtype, device=device)
    keys, values = memory[:, 1:-1].unbind()
    reshape_and_cache(k, v, keys, values, slots.to(device))
    want = torch.full(memory.shape, NAN, dtype=dtype)
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            want[0, 1 + block, :, offset], want[1, 1 + block, :, offset] = k_cpu[t], v_cpu[t]
    torch.testing.assert_close(memory.cpu(), want, rtol=0, atol=0, equal_nan=True)


@few
@given(
    st.integers(1, 6),
    st.sampled_from([(2, 16), (3, 7), (1, 40)]),
    st.sampled_from([4, 16]),
    st.sampled_from(DTYPES),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_reshape_and_cache(T, sizes, block_size, dtype, skipped):
    check(T, *sizes, block_size, dtype, skipped, "cpu")


def test_caches_of_any_strides():
    """A layer's part of memory that layers share, blocks first."""
    memory = torch.full((3, 2, 2, 4, 8), NAN)
    k, v = randn(3, 2, 8), randn(3, 2, 8, seed=1)
    reshape_and_cache(k, v, memory[:, 0], memory[:, 1], torch.tensor([9, -1, 0]))
    assert torch.equal(memory[2, :, :, 1], torch.stack((k[0], v[0])))
    assert torch.equal(memory[0, :, :, 0], torch.stack((k[2], v[2])))
    assert (~memory.isnan()).sum() == 2 * 2 * 16


@pytest.mark.parametrize("dtype", DTYPES)
def test_pad_rows_become_zero_and_no_other_is_touched(dtype):
    at = torch.tensor([5, -1, 0, -1])
    for shape in ((4, 7), (4, 3, 5), (4, 1100)):
        whole = torch.full((4, 2, *shape[1:]), 3.0, dtype=dtype)
        x = whole[:, 1]
        x[at < 0] = NAN
        zero_padding_rows(x, at)
        assert x[at < 0].eq(0).all()
        assert x[at >= 0].eq(3).all()
        assert whole[:, 0].eq(3).all()
    zero_padding_rows(torch.empty(0, 8, dtype=dtype), at[:0])
    with pytest.raises(AssertionError, match="needed contiguous ones"):
        zero_padding_rows(torch.zeros(4, 3, 2, dtype=dtype).mT, at)


def test_misuse_is_named():
    k, cache, slots = torch.zeros(1, 2, 8), torch.zeros(3, 2, 4, 8), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(AssertionError, match=r"\(3, 2, 4, 8\), needed \(3, 2, 4, 7\)"):
        reshape_and_cache(k[..., :7], k[..., :7], cache, cache, slots)
    with pytest.raises(AssertionError, match=r"float32, needed .* bfloat16"):
        reshape_and_cache(k.bfloat16(), k.bfloat16(), cache, cache, slots)
    with pytest.raises(NotImplementedError, match="1 heads of size 40000"):
        reshape_and_cache(*2 * (torch.zeros(1, 1, 40000),), *2 * (torch.zeros(1, 1, 1, 40000),), slots)
    reshape_and_cache(k[:0], k[:0], cache, cache, slots[:0])
