# SPDX-License-Identifier: Apache-2.0
"""The rotary embedding in Triton against its definition in fp64, both styles, among NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drawn import given, st

from vllm.kernels import ops, reference

pytest.importorskip("triton")
from row_cases import DTYPES, NAN, around, assert_close, few, randn, wide_rows

from vllm.kernels.triton import rotary_embedding


def table(P: int, rot_dim: int) -> torch.Tensor:
    angles = 3 * randn(P, rot_dim // 2, seed=3)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def check(
    T: int, H: int, J: int, D: int, rot_dim: int, interleaved: bool, dtype: torch.dtype, device: Any, P: int = 9
) -> None:
    """Heads of a fused row; v, beside them, and the first row are NaN."""
    before = randn(T, (H + 2 * J) * D).to(dtype)
    before[:, (H + J) * D :] = NAN
    before[0] = NAN
    qkv = wide_rows(before, device)
    cache, positions = table(P, rot_dim), torch.randint(0, P, (T,), generator=torch.Generator().manual_seed(T))
    q, k, _ = (part.unflatten(1, (-1, D)) for part in qkv.split((H * D, J * D, J * D), dim=1))
    rotary_embedding(positions.to(device), q, k, cache.to(device), interleaved)
    got, x = (rows.cpu()[1:, : (H + J) * D].unflatten(1, (-1, D)) for rows in (qkv, before))
    assert torch.equal(got[..., rot_dim:], x[..., rot_dim:])
    # As complex numbers: (a + ib) * (cos + i sin)
    half = rot_dim // 2
    numbers = x[..., :rot_dim].double().unflatten(-1, (half, 2) if interleaved else (2, half))
    numbers = torch.complex(*numbers.unbind(-1 if interleaved else -2))
    turned = numbers * torch.complex(*cache[positions[1:]].double().unsqueeze(1).chunk(2, dim=-1))
    want = torch.stack((turned.real, turned.imag), dim=-1 if interleaved else -2).flatten(-2)
    size = (numbers.real.abs() + numbers.imag.abs()).unsqueeze(-1 if interleaved else -2)
    magnitude = size.expand(*want.shape[:-1], *((half, 2) if interleaved else (2, half))).flatten(-2)
    assert_close(got[..., :rot_dim], want, magnitude)
    assert qkv[:, (H + J) * D :].isnan().all()
    assert around(qkv)


@few
@given(
    st.integers(1, 5),
    st.sampled_from([(4, 2), (3, 1), (1, 1)]),
    st.sampled_from([(16, 16), (16, 8), (10, 6), (7, 2)]),
    st.booleans(),
    st.sampled_from(DTYPES),
)
def test_rotary_embedding(nan_poison, T, heads, sizes, interleaved, dtype):
    check(T, *heads, *sizes, interleaved, dtype, "cpu")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_both_styles_of_the_other_implementations(monkeypatch, implementation, interleaved):
    """By the one definition above; the fastest on the CPU included, at sizes that fill its registers or do not."""
    monkeypatch.setenv("VLLM_KERNELS", implementation)
    monkeypatch.setitem(globals(), "rotary_embedding", ops.rotary_embedding)
    for dtype in DTYPES:
        for D, rot_dim in ((64, 64), (80, 40), (10, 6)):
            check(7, 3, 2, D, rot_dim, interleaved, dtype, "cpu")


def test_pairs_equal_transformers():
    """Its function leaves the pairs apart, as halves: scores are the same, elements have moved."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave

    q, k = randn(5, 2, 16), randn(5, 1, 16, seed=1)
    angles = torch.arange(5)[:, None] * 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    both = torch.cat((angles, angles), dim=1)
    by_head = (x[None].transpose(1, 2) for x in (q, k))
    wanted = apply_rotary_pos_emb_interleave(*by_head, both.cos()[None], both.sin()[None])
    rotary_embedding(torch.arange(5), q, k, torch.cat((angles.cos(), angles.sin()), dim=1), interleaved=True)
    for got, want in zip((q, k), wanted, strict=True):
        halves = torch.cat((got[..., 0::2], got[..., 1::2]), dim=-1)
        torch.testing.assert_close(halves, want[0].transpose(0, 1), atol=1e-6, rtol=1e-6)


def test_what_is_out_of_range_is_refused_before_anything_is_written():
    q, k = torch.ones(1, 300, 256), torch.ones(1, 1, 256)
    with pytest.raises(NotImplementedError, match=r"300 heads with 256"):
        rotary_embedding(torch.zeros(1, dtype=torch.int64), q, k, table(2, 256))
    with pytest.raises(NotImplementedError, match="float64"):
        rotary_embedding(torch.zeros(1, dtype=torch.int64), q[:, :1].double(), k.double(), table(2, 256))
    with pytest.raises(AssertionError, match=r"rot_dim is 258.*256"):
        rotary_embedding(torch.zeros(1, dtype=torch.int64), q[:, :1], k, table(2, 258))
    assert q.eq(1).all()
    rotary_embedding(torch.zeros(0, dtype=torch.int64), q[:0, :1], k[:0], table(2, 256))


def test_twin_reads_what_it_has_not_yet_written():
    q, k = randn(3, 2, 8), randn(3, 1, 8)
    """Halves and pairs overlap nothing that the other element of a pair still needs."""
    for interleaved in (False, True):
        mine, twins = (q.clone(), k.clone()), (q.clone(), k.clone())
        rotary_embedding(torch.arange(3), *mine, table(3, 8), interleaved)
        reference.rotary_embedding(torch.arange(3), *twins, table(3, 8), interleaved)
        torch.testing.assert_close(mine, twins)
