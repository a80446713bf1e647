# SPDX-License-Identifier: Apache-2.0
"""The norms in Triton against their twins in fp64, among NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drawn import given, st

from vllm.kernels import reference
from vllm.kernels.reference_gdn import rms_norm_gated_ref

pytest.importorskip("triton")
from row_cases import DTYPES, NAN, around, assert_close, few, nan_rows, randn, wide_rows

from vllm.kernels.triton import fused_add_rms_norm, norms, rms_norm, rms_norm_gated

SIZES = (st.integers(1, 9), st.sampled_from([1, 7, 48, 130]), st.sampled_from(DTYPES))


def check_rms_norm(T: int, H: int, D: int, dtype: torch.dtype, wide_weight: bool, place: str, device: Any) -> None:
    """H = 0: two dimensions. The first row is NaN. ``place`` of the result: new, in x, or beside NaN."""
    x_cpu = randn(T, max(H, 1) * D).to(dtype)
    x_cpu[0] = NAN
    weight_cpu = randn(D, seed=1).to(torch.float32 if wide_weight else dtype)
    rows, weight = wide_rows(x_cpu, device), weight_cpu.to(device)
    view = (T, H, D) if H else (T, D)
    x = rows.unflatten(1, (H, D)) if H else rows
    out_rows = {"new": None, "x": rows, "beside": nan_rows(T, max(H, 1) * D, dtype, device)}[place]
    out = out_rows.unflatten(1, (H, D)) if H and out_rows is not None else out_rows
    before = rows.clone()
    got = rms_norm(x, weight, 1e-5, out)
    assert out is None or got is out
    assert got.shape == view
    assert got.dtype is dtype
    want = reference.rms_norm(x_cpu.double().view(view), weight_cpu.double(), 1e-5)
    narrow = not wide_weight and dtype is not torch.float32
    assert_close(got[1:], want[1:], 2 * want[1:].abs(), roundings=2 if narrow else 1)
    assert not got[0].isfinite().any()
    assert around(rows)
    assert out_rows is None or around(out_rows)
    assert place == "x" or torch.equal(rows[1:], before[1:])


@few
@given(st.sampled_from([0, 1, 3]), *SIZES, st.booleans(), st.sampled_from(["new", "x", "beside"]))
def test_rms_norm(nan_poison, H, T, D, dtype, wide_weight, place):
    check_rms_norm(T, H, D, dtype, wide_weight, place, "cpu")


def test_rms_norm_rounds_before_a_narrow_weight():
    """As transformers: seen in float16, which the interpreter rounds to the nearest."""
    x, weight = randn(4, 96).half(), randn(96, seed=1).half()
    want = reference.rms_norm(x, weight, 1e-6)
    once = reference.rms_norm(x, weight.float(), 1e-6)
    got = rms_norm(x, weight, 1e-6)
    assert (got != want).float().mean() < 0.02 < (got != once).float().mean()


@pytest.mark.parametrize("D", [7, 48])
def test_a_row_does_not_depend_on_the_others(D):
    x, weight = randn(130, D), randn(D, seed=1)
    together = rms_norm(x, weight, 1e-6)
    assert torch.equal(torch.cat([rms_norm(x[i : i + 1], weight, 1e-6) for i in (0, 77, 129)]), together[[0, 77, 129]])


def check_fused_add(T: int, D: int, dtype: torch.dtype, wide_weight: bool, in_x: bool, device: Any) -> None:
    x_cpu, residual_cpu = randn(T, D).to(dtype), randn(T, D, seed=2).to(dtype)
    x_cpu[0] = NAN
    weight_cpu = randn(D, seed=1).to(torch.float32 if wide_weight else dtype)
    x, residual = wide_rows(x_cpu, device), wide_rows(residual_cpu, device)
    out = x if in_x else nan_rows(T, D, dtype, device)
    got, got_residual = fused_add_rms_norm(x, residual, weight_cpu.to(device), 1e-5, out)
    assert got is out
    assert got_residual is residual
    assert_close(residual[1:], (x_cpu.double() + residual_cpu.double())[1:])
    want = reference.rms_norm(residual.cpu().double(), weight_cpu.double(), 1e-5)[1:]
    narrow = not wide_weight and dtype is not torch.float32
    assert_close(got[1:], want, 2 * want.abs(), roundings=2 if narrow else 1)
    assert not residual[0].isfinite().any()
    assert around(x)
    assert around(residual)
    assert around(out)


@few
@given(*SIZES, st.booleans(), st.booleans())
def test_fused_add_rms_norm(nan_poison, T, D, dtype, wide_weight, in_x):
    check_fused_add(T, D, dtype, wide_weight, in_x, "cpu")


def check_gated(T: int, H: int, D: int, x_dtype: torch.dtype, dtype: torch.dtype, place: str, device: Any) -> None:
    x_cpu, z_cpu, weight = randn(T, H * D).to(x_dtype), 4 * randn(T, H * D, seed=2).to(dtype), randn(D, seed=1)
    z_cpu[0] = NAN
    x, z = wide_rows(x_cpu, device), wide_rows(z_cpu, device)
    out = {"x": x, "z": z, "beside": nan_rows(T, H * D, dtype, device)}[place]
    got = rms_norm_gated(*(part.unflatten(1, (H, D)) for part in (x, z)), weight.to(device), 1e-6, out.view(T, H, D))
    want = rms_norm_gated_ref(*(part.double().view(T, H, D) for part in (x_cpu, z_cpu)), weight.double(), 1e-6)
    assert_close(got[1:], want[1:], 4 * want[1:].abs())
    assert not got[0].isfinite().any()
    assert all(around(part) for part in (x, z, out))


@few
@given(st.integers(1, 3), *SIZES, st.sampled_from(DTYPES), st.sampled_from(["x", "z", "beside"]))
def test_rms_norm_gated(nan_poison, H, T, D, x_dtype, dtype, place):
    check_gated(T, H, D, x_dtype, dtype, place, "cpu")


def test_what_is_out_of_range_is_refused_before_anything_is_written():
    x, residual = torch.randn(1, norms._MOST_COLUMNS + 1), torch.zeros(1, norms._MOST_COLUMNS + 1)
    with pytest.raises(NotImplementedError, match=rf"{norms._MOST_COLUMNS + 1}.*{norms._MOST_COLUMNS}"):
        fused_add_rms_norm(x, residual, torch.ones(norms._MOST_COLUMNS + 1), 1e-6)
    with pytest.raises(NotImplementedError, match="float64"):
        fused_add_rms_norm(x[:, :3].double(), residual[:, :3].double(), torch.ones(3), 1e-6)
    assert residual.eq(0).all()
    with pytest.raises(AssertionError, match=r"\(2,\).*needed \(3,\)"):
        rms_norm(x[:, :3], torch.ones(2), 1e-6)
    assert rms_norm(x[:0, :3], torch.ones(3), 1e-6).shape == (0, 3)
