# SPDX-License-Identifier: Apache-2.0
"""The gated activations in Triton against their twins in fp64, among NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drawn import given, st

from vllm.kernels import reference

pytest.importorskip("triton")
from row_cases import DTYPES, NAN, SUM, around, assert_close, few, interpreted, nan_rows, randn, wide_rows

from vllm.kernels import triton as operators
from vllm.kernels.triton import silu_and_mul

NAMES = ["silu_and_mul", "gelu_tanh_and_mul"]


def check(T: int, D: int, dtype: torch.dtype, in_x: bool, device: Any, name: str) -> None:
    """The first row is NaN."""
    x_cpu = (4 * randn(T, 2 * D)).to(dtype)
    x_cpu[-1, : min(4, D)] = torch.tensor([-100.0, 100.0, -0.0, 88.0])[: min(4, D)]
    x_cpu[0] = NAN
    x = wide_rows(x_cpu, device)
    out = x[:, :D] if in_x else nan_rows(T, D, dtype, device)
    assert getattr(operators, name)(x, out) is out
    # Both are x times a sigmoid: of x, or of a polynomial that is rounded four times. Far below 0 the sigmoid is an
    # exponential, which multiplies the relative error of its argument by the argument; 1 + tanh has no digits left
    # there, in fp64 either.
    gate, up = x_cpu[1:].double().chunk(2, dim=-1)
    argument = gate if name == "silu_and_mul" else 1.5957691216057308 * (gate + 0.044715 * gate**3)
    want = gate * argument.sigmoid() * up
    below_range = torch.finfo(torch.float32).tiny / SUM * (gate * up).abs()  # of a sigmoid that float32 takes for 0
    assert_close(out[1:], want, (4 + argument.clamp(max=0).abs() / 4) * want.abs() + below_range)
    twins = getattr(reference, name)(x_cpu[1:].double())
    torch.testing.assert_close(twins, want, rtol=1e-13, atol=1e-13)
    assert not out[0].isfinite().any()
    assert torch.equal(x[1:, D:].cpu(), x_cpu[1:, D:])
    assert around(x)
    assert in_x or around(out)


@interpreted("overflow encountered in exp")  # of what a sigmoid makes 0
@few
@given(
    st.integers(1, 9), st.sampled_from([1, 7, 48, 1030]), st.sampled_from(DTYPES), st.booleans(), st.sampled_from(NAMES)
)
def test_against_the_twin(nan_poison, T, D, dtype, in_x, name):
    check(T, D, dtype, in_x, "cpu", name)


def test_new_memory_is_written_everywhere(nan_poison):
    x = randn(37, 2 * 48)
    got = silu_and_mul(x)
    want = reference.silu_and_mul(x.double())
    assert_close(got, want, 4 * want.abs())
    assert silu_and_mul(x[:0]).shape == (0, 48)


def test_misuse_is_named():
    with pytest.raises(AssertionError, match=r"\(2, 5\).*needed \(2, 4\)"):
        silu_and_mul(torch.randn(2, 5))
    with pytest.raises(AssertionError, match=r"bfloat16, needed \(2, 2\) float32"):
        silu_and_mul(torch.randn(2, 4), torch.empty(2, 2).bfloat16())
    with pytest.raises(NotImplementedError, match="float64"):
        silu_and_mul(torch.randn(2, 4).double())
