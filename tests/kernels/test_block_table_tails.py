# SPDX-License-Identifier: Apache-2.0
"""A row of the block table past a request's own blocks may name any block: the device's table keeps there what an
earlier step wrote, and a captured step is given whole rows."""

from __future__ import annotations

import importlib
from contextlib import nullcontext

import pytest
import torch
import xpu_stand_ins

from vllm.kernels import table, xpu
from vllm.kernels.padding import NULL_BLOCK

J, H, D, BLOCK, BLOCKS = 1, 2, 128, 16, 9
# Requests of 1, 20, 5 and no rows over 33, 20, 64 and no tokens; two pad rows.
LENGTHS, CONTEXTS, PADS = [1, 20, 5, 0], [33, 20, 64, 0], 2
OWN = [[3, 1, 5], [8, 2], [4, 6, 7, 1], []]
OF_NAN = 0


def attention(implementation: str, tails: list[int], window: int) -> torch.Tensor:
    """``tails``: the block of each request's columns past its own; block 0 is NaN, as are unwritten slots."""
    generator = torch.Generator().manual_seed(1)
    module = importlib.import_module(f"vllm.kernels.{implementation}")
    make = getattr(module, "zeroed_cache", torch.zeros)
    caches = []
    for _ in range(2):
        cache = make((BLOCKS, J, BLOCK, D), dtype=torch.bfloat16)
        cache.copy_(torch.randn(cache.shape, generator=generator))
        cache[OF_NAN], cache[5, :, 1:], cache[2, :, 4:] = (torch.nan,) * 3
        caches.append(cache)
    block_table = torch.tensor([own + [tail] * (6 - len(own)) for own, tail in zip(OWN, tails, strict=True)]).int()
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    lens = torch.tensor(CONTEXTS, dtype=torch.int32)
    q = torch.randn(sum(LENGTHS) + PADS, H, D, generator=generator).bfloat16()
    q[-PADS:] = torch.nan
    out = torch.full_like(q, torch.nan)
    module.paged_attention(
        q, *caches, block_table, starts, lens, D**-0.5, out, window, query_start_loc_cpu=starts, seq_lens_cpu=lens
    )
    return out


# By Triton's interpreter, in rows that are not stored.
@pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("implementation", ["reference", "cpu", "triton", "xpu"])
def test_columns_past_a_requests_blocks_are_not_read(
    implementation: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_ins = implementation == "xpu"
    if not stand_ins and (missing := table.why_not(implementation, "cpu")) is not None:
        pytest.skip(missing)
    monkeypatch.setattr(xpu, "kernel_package", lambda module: object())
    with xpu_stand_ins.installed() if stand_ins else nullcontext():
        right = attention(implementation, [NULL_BLOCK] * 4, window)
        assert right.isfinite().all()
        assert right[-PADS:].count_nonzero() == 0
        for tails in ([OF_NAN] * 4, [7, 4, 8, 3]):
            assert torch.equal(attention(implementation, tails, window), right), tails
