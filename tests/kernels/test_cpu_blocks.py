# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels for GGUF's blocks: what ``test_cpu_quantized`` asks of the other formats."""

from __future__ import annotations

import dataclasses

import poison
import pytest
import torch
from gguf_blocks import FORMS, normal_blocks, random_blocks
from test_cpu_quantized import DTYPES, NAN, SUM, check, pack, steps, wide_rows
from torch import Tensor

from vllm.kernels import ops as operators
from vllm.kernels import quantized, reference
from vllm.kernels.blocks import UNITS
from vllm.kernels.quantized import QuantizedWeight

pytestmark = pytest.mark.usefixtures("cpu_kernels")


def expected(x: Tensor, weight: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """(fp64 products, by how much a kernel's may differ): sums of scales times codes, and of minima, cancel."""
    w = quantized.dequantize(weight).double()
    bound = 4 * SUM * (x.double().abs().sum(1, keepdim=True) * w.abs().amax(1)) + 1e-30
    if weight.dtype is not torch.float32 and weight.N >= 128:
        bound += 1.001 * (steps(x, 64 if weight.format.endswith("k") else 32) @ w.abs().T)
    return x.double() @ w.T, bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMS)
def test_linear_against_fp64(format, dtype):
    for N, K in ((7, 256), (130, 768), (257, 512)):
        weight = random_blocks(format, N, K, dtype=dtype)
        packed, bias = pack(weight), torch.randn(N).to(dtype)
        for T in (0, 1, 2, 3, 5, 9, 33):
            x = wide_rows(T, K, dtype)
            want, bound = expected(x, weight)
            check(operators.linear(x, packed), want, bound)
            check(operators.linear(x, packed, bias), want + bias.double(), bound + SUM * bias.double().abs())


@pytest.mark.parametrize("format", FORMS)
def test_rows_and_columns_as_views(format):
    weight = random_blocks(format, 300, 1024)
    part = weight.rows(slice(37, 237)).columns(slice(256, 768))
    assert torch.equal(quantized.dequantize(part), quantized.dequantize(weight)[37:237, 256:768])
    x = torch.randn(3, 512)
    check(operators.linear(x, pack(part)), *expected(x, part))
    with pytest.raises(ValueError, match=r"columns 16 to 512 of 1024 cut a group of (32|256)"):
        weight.columns(slice(16, 512))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMS)
def test_embedding_rows_are_exact(format, dtype):
    weight = random_blocks(format, 70, 512, dtype=dtype)
    rows = torch.tensor([3, 69, 0, 31, 3])
    assert torch.equal(operators.embedding(rows, pack(weight)), quantized.dequantize(weight)[rows].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", FORMS)
def test_row_is_bitwise_its_own(format, dtype):
    packed, x = pack(random_blocks(format, 300, 512, dtype=dtype)), torch.randn(40, 512).to(dtype)
    alone = torch.cat([operators.linear(row, packed) for row in x.split(1)])
    for M in (*range(1, 16), 40):
        assert torch.equal(operators.linear(x[:M], packed), alone[:M]), M
    x[11, 5], x[12, 511], x[13] = NAN, float("inf"), NAN
    got, rows = operators.linear(x, packed), (torch.arange(40) < 11) | (torch.arange(40) > 13)
    assert not got[~rows].isfinite().any()
    assert torch.equal(got[rows], alone[rows])


@pytest.mark.parametrize("code", [0, 0xFF, 0x7F, 0x80])
@pytest.mark.parametrize("format", FORMS)
def test_the_largest_sums_fit(format, code):
    """Codes, factors and inputs at the ends of their grids, where a sum in too few bits wraps."""
    weight = random_blocks(format, 130, 512, dtype=torch.bfloat16)
    units = weight.codes.unflatten(-1, (-1, quantized.FORMATS[format].bytes)).clone()
    weight.codes.fill_(code)
    for at in UNITS[format]:
        weight.codes.unflatten(-1, (-1, units.shape[-1]))[..., at : at + 2] = units[..., at : at + 2]
    for x in (torch.ones(5, 512).bfloat16(), -torch.ones(5, 512).bfloat16()):
        check(operators.linear(x, pack(weight), out=torch.empty(5, 130)), *expected(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("of_w13", "of_w2"), [("q4_k", "q6_k"), ("q5_k", "q5_k"), ("q4_1", "q5_0"), ("q5_1", "q4_k")])
def test_experts(of_w13, of_w2, dtype):
    """Of two formats, as mixtures are released; -1 skipped, each row bitwise its own, NaN alone."""
    E, I, D, S = 4, 256, 256, 2
    w13 = normal_blocks(of_w13, E, 2 * I, D, dtype=dtype, gated=True)
    w2 = normal_blocks(of_w2, E, D, I, dtype=dtype)
    packed = pack(w13), pack(w2)
    x, weights = torch.randn(21, D).to(dtype), torch.rand(21, S)
    ids = torch.rand(21, E - 1).topk(S).indices
    ids[torch.rand(21, S) < 0.2] = -1
    want = reference.quantized_experts(x, w13, w2, ids, weights.masked_fill(ids < 0, 0)).double()
    weights[ids < 0] = NAN
    x[(ids < 0).all(1)] = NAN
    got = operators.fused_experts(x, *packed, ids, weights)
    real = (ids >= 0).any(1)
    assert got[~real].eq(0).all()
    off = (got.double() - want).abs().amax(1)[real] / want.abs().amax(1)[real]
    assert off.max() < (2e-5 if dtype is torch.float32 else 0.04)
    alone = [operators.fused_experts(x[t : t + 1], *packed, ids[t : t + 1], weights[t : t + 1]) for t in range(21)]
    assert torch.equal(got, torch.cat(alone))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pattern", poison.PATTERNS, ids=hex)
def test_nothing_uninitialised_is_read(dtype, pattern, request):
    poison.start(pattern)
    request.addfinalizer(poison.stop)
    for format in FORMS:
        for N in (150, 20):
            weight = random_blocks(format, N, 256, dtype=dtype)
            for T in (1, 21):
                x = torch.randn(T, 256).to(dtype)
                check(operators.linear(x, pack(weight), out=torch.empty(T, N)), *expected(x, weight))


@pytest.mark.parametrize("format", FORMS)
def test_coarse_grids_move_little(format):
    """The contract's bound for 16-bit inputs, where a kernel has made use of it."""
    weight, x = normal_blocks(format, 512, 512, dtype=torch.bfloat16), torch.randn(200, 512).bfloat16()
    want, got = expected(x, weight)[0], operators.linear(x, pack(weight), out=torch.empty(200, 512)).double()
    off = (got - want).abs().amax(1) / want.abs().amax(1)
    assert 1e-5 < off.max() < 2**-6


def test_what_has_no_panels_stays_plain():
    weight = dataclasses.replace(random_blocks("q4_k", 130, 256), activations="int8")
    assert operators.pack_quantized_weight(weight) is weight
