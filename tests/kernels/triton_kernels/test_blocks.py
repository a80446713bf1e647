# SPDX-License-Identifier: Apache-2.0
"""Products with GGUF's blocks against fp64, in the interpreter. Bytes that nobody may read are 0xFF, inputs NaN."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from gguf_blocks import FORMS, normal_blocks, random_blocks
from row_cases import NAN, assert_close, randn, wide_rows

from vllm.kernels import quantized, reference

pytest.importorskip("triton.language", reason="triton is not installed")
from vllm.kernels import triton as kernels
from vllm.kernels.quantized import QuantizedWeight
from vllm.kernels.triton import quantized as family
from vllm.kernels.triton.experts import Tiles

BF16, FP32 = torch.bfloat16, torch.float32


def among(weight: QuantizedWeight) -> QuantizedWeight:
    """The same blocks at odd addresses of wider memory."""
    codes = weight.codes
    wide = codes.new_full((*codes.shape[:-2], codes.shape[-2] + 1, codes.shape[-1] + 17), 255)
    wide[..., :-1, 1:-16] = codes
    return dataclasses.replace(weight, codes=wide[..., :-1, 1:-16])


def small(columns: int, depth: int) -> Any:
    return lambda weight, *_: Tiles(8, columns, family._depth(weight, depth), 1, 2)


@pytest.mark.parametrize("format", FORMS)
@pytest.mark.usefixtures("nan_poison")
def test_products(format, monkeypatch):
    """With any bits as codes and factors; rows of NaN and with an infinity stay alone."""
    for dtype, N, T, depth in ((FP32, 5, 4, 16), (BF16, 19, 6, 64)):
        monkeypatch.setattr(family, "_tiles", small(16, depth))
        weight, bias = among(random_blocks(format, N, 256, dtype=dtype)), randn(N, seed=1).to(dtype)
        x = wide_rows(randn(T, 256).to(dtype), "cpu")
        w = quantized.dequantize(weight).double()
        magnitude = x.double().abs().sum(1, keepdim=True) * (4 * w.abs().amax(1)) + bias.double().abs()
        assert_close(family.quantized_linear(x, weight, bias), x.double() @ w.T + bias.double(), magnitude)
        alone = family.quantized_linear(x, weight)
        x[1, 7], x[2] = torch.inf, NAN
        got = family.quantized_linear(x, weight)
        assert got[2].isnan().all()
        assert not got[1].isfinite().any()
        assert torch.equal(got[0], alone[0])
        assert torch.equal(got[3:], alone[3:])


@pytest.mark.parametrize("format", FORMS)
@pytest.mark.usefixtures("nan_poison")
def test_rows_are_exact(format):
    weight = among(random_blocks(format, 9, 512))
    right = quantized.dequantize(weight)
    ids = torch.tensor([8, 0, 3, 3])
    assert torch.equal(family.quantized_embedding(ids, weight), right[ids])
    ranged = family.quantized_embedding(torch.tensor([11, 2, 15, 40]), weight, (11, 16))
    assert torch.equal(ranged[[0, 2]], right[[0, 4]])
    assert ranged[[1, 3]].eq(0).all()


@pytest.mark.parametrize(("of_w13", "of_w2"), [("q4_k", "q6_k"), ("q5_k", "q5_0")])
@pytest.mark.usefixtures("nan_poison")
def test_experts(of_w13, of_w2):
    E, I, D = 3, 256, 256
    w13, w2 = normal_blocks(of_w13, E, 2 * I, D, gated=True), normal_blocks(of_w2, E, D, I)
    ids, shares, x = torch.tensor([[2, 0], [0, -1], [-1, -1]]), torch.rand(3, 2), randn(3, D)
    right = reference.quantized_experts(x.double(), w13, w2, ids, shares.masked_fill(ids < 0, 0).double())
    shares[ids < 0], x[2] = NAN, NAN
    w13.codes[1], w2.codes[1] = 255, 255  # an expert without rows
    got = kernels.quantized_experts(x, among(w13), among(w2), ids, shares)
    torch.testing.assert_close(got.double()[:2], right[:2], rtol=1e-5, atol=2e-5 * float(right.abs().max()))
    assert got[2].eq(0).all()


def check_real_sizes(device: Any, format: str, T: int) -> None:
    weight, x = random_blocks(format, 1024, 2048, dtype=BF16), randn(T, 2048).to(BF16)
    on_device = among(dataclasses.replace(weight, codes=weight.codes.to(device)))
    w = quantized.dequantize(weight).double()
    magnitude = x.double().abs().sum(1, keepdim=True) * (4 * w.abs().amax(1))
    assert_close(family.quantized_linear(wide_rows(x, device), on_device), x.double() @ w.T, magnitude)
    ids = torch.tensor([1023, 0, 7])
    assert torch.equal(family.quantized_embedding(ids.to(device), on_device).cpu().float(), w[ids].to(BF16).float())


def test_refusals():
    weight = random_blocks("q4_k", 4, 256, dtype=BF16)
    with pytest.raises(NotImplementedError, match="q4_k of 256 columns for inputs rounded to int8"):
        family.quantized_linear(randn(1, 256).to(BF16), dataclasses.replace(weight, activations="int8"))
