# SPDX-License-Identifier: Apache-2.0
"""Rows of an embedding. It ran in Triton's interpreter, not yet on hardware."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.triton.rows import fits, tile
from vllm.kernels.weights import PackedWeight


@triton.jit(do_not_specialize=["T", "first", "last"])
def _embedding_kernel(ids, weight, w0, out, T, K, first, last, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    live = (t < T) & (d < K)
    row = tl.load(ids + t, t < T, 0).to(tl.int64)
    held = (row >= first) & (row < last)
    tl.store(out + t * K + d, tl.load(weight + (row - first) * w0 + d, live & held, 0), live)


def embedding(ids_T: Tensor, packed: PackedWeight, vocab_range: tuple[int, int] | None = None) -> Tensor:
    if packed.kind != "plain":
        raise NotImplementedError(f"Triton's kernels read plain weights, not {packed.kind}")
    weight_NK, (T,) = packed.data, ids_T.shape
    first, last = (0, packed.N) if vocab_range is None else vocab_range
    assert 0 <= last - first <= packed.N, f"ids from {first} to {last} do not fit {packed.N} rows"
    fits("ids", ids_T, (T,), torch.int64, torch.int32)
    fits("weight", weight_NK, (packed.N, packed.K), packed.dtype)
    out = weight_NK.new_empty(T, packed.K)
    if T:
        shape = tile(packed.K, 2048)
        grid = (triton.cdiv(T, shape["ROWS"]), triton.cdiv(packed.K, shape["COLUMNS"]))
        _embedding_kernel[grid](ids_T, weight_NK, weight_NK.stride(0), out, T, packed.K, first, last, **shape)
    return out
