# SPDX-License-Identifier: Apache-2.0
"""What the row-wise operators share: which dtypes they take, where rows lie, and how many of them a program takes.

A program's tile follows from the rows' width alone, so that a row's sums do not depend on the rows around it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def refuse_other_dtypes(*tensors: Tensor) -> None:
    """Raises NotImplementedError for a tensor of none of ``DTYPES``."""
    for x in tensors:
        if x.dtype not in DTYPES:
            raise NotImplementedError(f"{x.dtype} is none of {', '.join(str(dtype)[6:] for dtype in DTYPES)}")


def fits(name: str, x: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Asserts x's shape and dtype, and that its last dimension is contiguous."""
    needed = f"needed {tuple(shape)} {' or '.join(str(dtype)[6:] for dtype in dtypes)}, last stride 1"
    contiguous = x.stride(-1) == 1 or shape[-1] <= 1
    assert x.shape == shape, f"{name} is {tuple(x.shape)}, {needed}"
    assert x.dtype in dtypes, f"{name} is {x.dtype}, {needed}"
    assert contiguous, f"{name} has strides {x.stride()}, {needed}"


def rows_of(x: Tensor) -> tuple[int, int, int, int]:
    """(T, H, their strides) of [T, H, D] or, with H = 1, of [T, D]."""
    assert x.dim() in (2, 3), f"x is {tuple(x.shape)}, needed 2 or 3 dimensions"
    H, x1 = (1, 0) if x.dim() == 2 else (x.shape[1], x.stride(1))
    return x.shape[0], H, x.stride(0), x1


def tile(width: int, most_columns: int, elements: int = 1024) -> dict[str, Any]:
    """ROWS x COLUMNS of a program, both powers of two: about ``elements``, or one row where that has more."""
    columns = min(triton.next_power_of_2(width), most_columns)
    rows = max(elements // columns, 1)
    return {"ROWS": rows, "COLUMNS": columns, "num_warps": min(max(rows * columns // 512, 4), 16)}
