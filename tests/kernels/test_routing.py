# SPDX-License-Identifier: Apache-2.0
"""Routing: probabilities in fp32 whatever the model's dtype, and nothing that a pad row holds reaches an expert."""

from __future__ import annotations

import pytest
import torch
from padding_slots import slots

from vllm.kernels.ops import topk_softmax


@pytest.mark.parametrize("renormalize", [False, True])
def test_weights_are_those_of_an_fp32_softmax_of_bf16_logits(renormalize: bool) -> None:
    """A softmax rounded to bf16 is off by up to 2^-9 of each weight; in fp32 1e-6."""
    logits = (4 * torch.randn(64, 128, generator=torch.Generator().manual_seed(0))).bfloat16()
    weights, ids = topk_softmax(logits, 8, renormalize, slots(64, 64))
    exact = logits.double().softmax(-1).gather(1, ids.long())
    if renormalize:
        exact /= exact.sum(-1, keepdim=True)
    assert weights.dtype is torch.float32
    assert ids.dtype is torch.int32
    torch.testing.assert_close(weights.double(), exact, rtol=1e-5, atol=0)
    assert torch.equal(weights.sort(-1, descending=True).values, weights)


def test_rows_past_the_real_ones_go_nowhere() -> None:
    logits = torch.randn(6, 8)
    logits[4:] = torch.nan
    weights, ids = topk_softmax(logits, 2, True, slots(4, 6))
    assert (ids[4:] == -1).all()
    assert (weights[4:] == 0).all()
    assert (ids[:4] >= 0).all()
