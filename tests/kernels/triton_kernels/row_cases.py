# SPDX-License-Identifier: Apache-2.0
"""What the tests of the row-wise kernels share: each comparison runs in the interpreter at small sizes, and on a
device at real ones (``tests/devices/test_device_kernels.py``).

The interpreter cuts bfloat16 off where hardware rounds it, so a rounding is bounded by a whole unit in the last place.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drawn import HealthCheck, Phase, settings
from torch import Tensor

NAN, UNTOUCHED = float("nan"), 7.0
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SUM = 2e-6  # float32 summation and functions, relative to the sum of magnitudes

few = settings(
    max_examples=30,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def interpreted(*warnings: str) -> Any:
    """Marks a test in whose NaN or largest numbers numpy finds these; a device says nothing of them."""
    return pytest.mark.filterwarnings(*(f"ignore:{w}:RuntimeWarning:triton.runtime.interpreter" for w in warnings))


def randn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def wide_rows(x: Tensor, device: Any) -> Tensor:
    """A copy of [T, N] as a view into rows that are NaN beside it, between two rows that no operator may touch."""
    whole = torch.full((len(x) + 2, x.shape[1] + 16), NAN, dtype=x.dtype)
    whole[[0, -1]] = UNTOUCHED
    whole[1:-1, 8:-8] = x
    return whole.to(device)[1:-1, 8:-8]


def nan_rows(T: int, width: int, dtype: torch.dtype, device: Any) -> Tensor:
    """[T, width] of NaN among the same."""
    return wide_rows(torch.full((T, width), NAN, dtype=dtype), device)


def around(x: Tensor) -> bool:
    """Whether all that lies around what ``wide_rows`` gave is as it was."""
    width = x.stride(0)
    whole = x.as_strided((len(x) + 2, width), (width, 1), x.storage_offset() - 8 - width)
    beside = torch.cat((whole[1:-1, :8], whole[1:-1, -8:]), dim=1)
    return bool(beside.isnan().all() and (whole[[0, -1]] == UNTOUCHED).all())


def assert_close(got: Tensor, want: Tensor, magnitude: Tensor | None = None, roundings: int = 1) -> None:
    """``want`` in fp64; ``magnitude``: the sum of the magnitudes that were summed up."""
    assert got.shape == want.shape
    got, info = got.cpu(), torch.finfo(got.dtype)
    bound = roundings * info.eps * want.abs() + SUM * (want.abs() if magnitude is None else magnitude) + info.tiny
    excess = (got.double() - want).abs() - bound
    assert (excess <= 0).all(), f"off by {excess.nan_to_num(torch.inf).max()} more than the bound"
