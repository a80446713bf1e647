# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels for quantised weights against fp64 products with the matrix that the weight means.

Where a kernel rounds inputs (and e4m3 codes) to int8, each by at most half a step of its block's grid, what that
moves a result by at most is computed from the inputs, and added to float32's summation.
"""

from __future__ import annotations

import dataclasses

import poison
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm.kernels import ops as operators
from vllm.kernels import quantized, reference
from vllm.kernels.quantized import FORMATS, QuantizedWeight

pytestmark = pytest.mark.usefixtures("cpu_kernels")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SUM = 2e-6  # float32 summation, relative to the sum of magnitudes
NAN = float("nan")
E4M3_NAN = 0x7F


def weight_of(format, N, K, group, dtype, *, zeros=False, act=None, order=False, scales=None, experts=(), gated=False):
    columns, size, _, _ = FORMATS[format]
    codes = torch.randint(0, 256, (*experts, N, -(-K // columns) * size), dtype=torch.uint8)
    if format == "fp8":
        codes[(codes & 0x7F) == E4M3_NAN] = 0
    groups = -(-K // group)
    unit = {"int4": 1 / 8, "int8": 1 / 100, "fp8": 1 / 100, "mxfp4": 1 / 4}[format]
    return QuantizedWeight(
        format, N, K, group, dtype, codes, ((torch.rand(*experts, N, groups) + 0.5) * unit).to(scales or dtype),
        torch.randint(0, 16, (*experts, N, groups), dtype=torch.uint8) if zeros else None,
        act, torch.randperm(K) if order else None, gated,
    )  # fmt: skip


def pack(weight: QuantizedWeight, exact: bool = False) -> QuantizedWeight:
    packed = operators.pack_quantized_weight(weight, exact)
    assert packed.kind == "panels", f"{weight.format} {weight.N} x {weight.K} by {weight.group_size} was not packed"
    return packed


def steps(x: Tensor, block: int) -> Tensor:
    """Half a step of the int8 grid of each element's block, [T, K]."""
    blocks = torch.nn.functional.pad(x.double(), (0, -x.shape[1] % block)).unflatten(1, (-1, block))
    return (blocks.abs().amax(-1, keepdim=True) / 254).expand_as(blocks).flatten(1)[:, : x.shape[1]]


def expected(x: Tensor, weight: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """(fp64 products, by how much a kernel's may differ before they are rounded to a dtype)."""
    w = quantized.dequantize(weight).double()
    rounded = quantized.round_activations(x, weight.activations).double()
    bound = SUM * (rounded.abs() @ w.abs().T) + 1e-30
    if weight.dtype is not torch.float32 and weight.activations != "int8":
        order = torch.arange(weight.K) if weight.input_order is None else weight.input_order
        fp8 = weight.format == "fp8"
        block = 32 if fp8 else next((b for b in (64, 32, 16) if weight.group_size % b == 0), 64)
        block = 64 if weight.group_size >= weight.K and not fp8 else block
        step = steps(rounded[:, order], block)
        bound += 1.001 * (step @ w[:, order].abs().T)
        if fp8:
            step_w = 1.01 * steps(w[:, order], 32)
            bound += 1.001 * ((rounded[:, order].abs() + step) @ step_w.T)
    return rounded @ w.T, bound


def check(got: Tensor, want: Tensor, bound: Tensor) -> None:
    assert got.shape == want.shape
    bound = bound + torch.finfo(got.dtype).eps * (want.abs() + bound) + torch.finfo(got.dtype).tiny
    excess = ((got.double() - want).abs() - bound).max() if got.numel() else torch.tensor(0.0)
    assert excess <= 0, f"off by {excess} more than the bound"


def wide_rows(T: int, width: int, dtype: torch.dtype) -> Tensor:
    """[T, width] as a view into wider rows whose other elements are NaN."""
    return torch.cat((torch.randn(T, width), torch.full((T, 5), NAN)), dim=1).to(dtype)[:, :width]


FORMS = [("int4", False), ("int4", True), ("int8", False), ("int8", True), ("fp8", False), ("mxfp4", False)]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_linear_against_fp64(data):
    draw = data.draw
    format, zeros = draw(st.sampled_from(FORMS))
    dtype, act = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([None, None, "int8", "fp8"]))
    group = draw(st.sampled_from([16, 32, 64, 128, 0]))
    K = draw(st.integers(1, 5)) * group or 2 * draw(st.integers(1, 150))
    N, T = draw(st.sampled_from([1, 7, 33, 130, 150, 257])), draw(st.sampled_from([0, 1, 2, 3, 4, 5, 9, 33, 70]))
    torch.manual_seed(draw(st.integers(0, 1000)))
    weight = weight_of(
        format, N, K, group or K, dtype, zeros=zeros, act=act, order=draw(st.booleans()),
        scales=draw(st.sampled_from([None, torch.float32])),
    )  # fmt: skip
    packed, x, bias = pack(weight), wide_rows(T, K, dtype), torch.randn(N).to(dtype)
    want, bound = expected(x, weight)
    check(operators.linear(x, packed), want, bound)
    check(operators.linear(x, packed, bias), want + bias.double(), bound + SUM * bias.double().abs())
    out = torch.full((T, N + 3), NAN, dtype=torch.float32 if draw(st.booleans()) else dtype)
    operators.linear(x, packed, out=out[:, :N])
    check(out[:, :N], want, bound)
    assert out[:, N:].isnan().all()


@pytest.mark.parametrize("act", [None, "fp8"])
@pytest.mark.parametrize(("format", "zeros"), FORMS)
def test_coarse_grids_move_little(format, zeros, act):
    """The contract's bound for 16-bit inputs, where a kernel has made use of it."""
    weight = weight_of(format, 576, 576, 64, torch.bfloat16, zeros=zeros, act=act)
    x = torch.randn(200, 576).bfloat16()
    want, _ = expected(x, weight)
    got = operators.linear(x, pack(weight), out=torch.empty(200, 576)).double()
    off = (got - want).abs().amax(1) / want.abs().amax(1)
    assert off.max() < 2**-6
    assert off.max() > 1e-5, "nothing was rounded: then the kernels are not the fast ones"


@pytest.mark.parametrize("format", ["int4", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_activations_are_exact(format, dtype):
    """Integers all the way: with scales that are powers of two each result is the exact one, rounded once."""
    for K, group in ((576, 64), (4096, 4096), (100, 100)):
        weight = weight_of(format, 150, K, group, dtype, act="int8")
        weight = dataclasses.replace(weight, scales=torch.full_like(weight.scales, 2.0**-10))
        x = torch.randint(-127, 128, (5, K)).to(dtype)
        x[:, 0] = 127  # so the grid is that of the integers
        want = x.double() @ quantized.dequantize(weight).double().T
        assert torch.equal(operators.linear(x, pack(weight), out=torch.empty(5, 150)).double(), want.float().double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("format", "zeros"), FORMS)
def test_row_is_bitwise_its_own(format, zeros, dtype, threads):
    """Alone, in any batch, at any place, on any number of threads; and a NaN or infinite one stays alone."""
    for act in (None, "int8"):
        weight = weight_of(format, 300, 192, 64, dtype, zeros=zeros, act=act, scales=torch.float32)
        packed, x = pack(weight), torch.randn(130, 192).to(dtype)
        torch.set_num_threads(1)
        alone = torch.cat([operators.linear(row, packed) for row in x.split(1)])
        torch.set_num_threads(threads)
        for M in (*range(1, 16), 97, 130):
            assert torch.equal(operators.linear(x[:M], packed), alone[:M]), M
        order = torch.randperm(130)
        assert torch.equal(operators.linear(x[order], packed), alone[order])
        x[11, 5], x[12, 191], x[13] = NAN, float("inf"), NAN
        got = operators.linear(x, packed)
        assert got[[11, 13]].isnan().all()
        assert not got[12].isfinite().any()
        rows = (torch.arange(130) < 11) | (torch.arange(130) > 13)
        assert torch.equal(got[rows], alone[rows])


@pytest.mark.parametrize("bits", [0x7FC0, 0x7FC1, 0x7F81, 0x7FFF, -1, -127, 0x7F80, -128])
def test_no_nan_becomes_a_number(bits):
    """Of any payload, and infinities."""
    x = torch.randn(3, 128).bfloat16()
    x.view(torch.int16)[1, 70] = bits
    for format, zeros in FORMS:
        for act in (None, "int8", "fp8"):
            got = operators.linear(x, pack(weight_of(format, 130, 128, 32, torch.bfloat16, zeros=zeros, act=act)))
            assert not got[1].isfinite().any()
            assert got[[0, 2]].isfinite().all()


@pytest.mark.parametrize("act", [None, "int8"])
@pytest.mark.parametrize(
    ("format", "code"),
    [("int4", 0xFF), ("int4", 0), ("int8", 0x80), ("int8", 0x7F), ("mxfp4", 0x77), ("mxfp4", 0xFF), ("fp8", 0x7E)],
)
def test_the_largest_sums_fit(format, code, act):
    """All codes and all inputs at the end of their grids, where a sum in too few bits wraps."""
    weight = weight_of(format, 130, 512, 256, torch.bfloat16, act=act)
    weight.codes.fill_(code)
    for x in (torch.ones(5, 512).bfloat16(), -torch.ones(5, 512).bfloat16()):
        check(operators.linear(x, pack(weight), out=torch.empty(5, 130)), *expected(x, weight))


@pytest.mark.parametrize("size", [1e-38, 1e-20, 1e20])
def test_small_and_large_inputs(size):
    x = (torch.randn(4, 128) * size).bfloat16()
    for format in FORMATS.keys() & {"int4", "int8", "fp8", "mxfp4"}:
        weight = weight_of(format, 130, 128, 32, torch.bfloat16)
        want = (x.double() @ quantized.dequantize(weight).double().T) if size > 1e-37 else torch.zeros(4, 130)
        got = operators.linear(x, pack(weight), out=torch.empty(4, 130)).double()
        assert ((got - want).abs() <= 2**-6 * want.abs().amax(1, keepdim=True) + 1e-36).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_show(dtype):
    """A scale that is NaN, or a code that is, makes its row of the weight NaN and no other."""
    for format, zeros in FORMS:
        for N in (5, 150):
            weight = weight_of(format, N, 128, 64, dtype, zeros=zeros)
            weight.scales[3, 1] = NAN
            if format == "fp8":
                weight.codes[1, 70] = E4M3_NAN | 128
            for T in (1, 6):
                got = operators.linear(torch.randn(T, 128).to(dtype), pack(weight))
                bad = torch.tensor([1, 3] if format == "fp8" else [3])
                assert got[:, bad].isnan().all()
                assert got.isnan().sum() == T * len(bad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("format", "zeros"), FORMS)
def test_embedding_gives_the_rows_that_the_weight_means(format, zeros, dtype, threads):
    for N in (100, 200):
        weight = weight_of(format, N, 160, 32, dtype, zeros=zeros, order=True, scales=torch.float32)
        packed, ids = pack(weight, exact=True), torch.randint(0, N, (57,))
        want = quantized.dequantize(weight)
        assert torch.equal(operators.embedding(ids, packed), want.to(dtype)[ids])
        assert operators.embedding(ids[:0], packed).shape == (0, 160)
        shared = operators.embedding(torch.tensor([3, 7, N + 6, N + 7]), packed, (7, N + 7))
        assert torch.equal(shared[1:3], operators.embedding(torch.tensor([0, N - 1]), packed))
        assert shared[[0, 3]].eq(0).all()
        for bad in (N, -1):
            with pytest.raises(AssertionError, match=rf"{bad}.* {N} rows"):
                operators.embedding(torch.tensor([3, bad]), packed)


def test_slices_of_a_larger_weight():
    """Rows and columns as views, as a sharded layer has them."""
    weight = weight_of("int4", 300, 256, 32, torch.float32, zeros=True)
    part = weight.rows(slice(37, 237)).columns(slice(64, 192))
    x = torch.randn(3, 128)
    check(operators.linear(x, pack(part)), *expected(x, part))


def test_what_has_no_panels_stays_plain():
    weight = weight_of("int4", 130, 40, 20, torch.bfloat16)
    assert operators.pack_quantized_weight(weight) is weight
    x = torch.randn(3, 40).bfloat16()
    assert torch.equal(operators.linear(x, weight), reference.quantized_linear(x, weight))
    packed = pack(weight_of("int4", 130, 64, 32, torch.bfloat16))
    assert operators.pack_quantized_weight(packed) is packed


def test_misuse_names_both_sides():
    packed = pack(weight_of("int8", 8, 16, 16, torch.float32))
    with pytest.raises(AssertionError, match=r"15 .* 16"):
        operators.linear(torch.randn(2, 15), packed)
    with pytest.raises(AssertionError, match=r"bfloat16.*float32"):
        operators.linear(torch.randn(2, 16).bfloat16(), packed)


# ---------------------------------------------------------------------------------------------------------------------
# Experts


def experts_of(format, dtype, act=None, E=5, I=144, D=160, zeros=False):
    make = {"zeros": zeros, "act": act, "experts": (E,), "scales": torch.float32}
    w13 = weight_of(format, 2 * I, D, 32, dtype, gated=True, **make)
    w2 = weight_of(format, D, I, 16, dtype, **make)
    return tuple(dataclasses.replace(w, scales=w.scales / 12) for w in (w13, w2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("format", "zeros"), FORMS)
def test_experts(format, zeros, dtype, threads):
    """The reference's results, up to roundings; -1 skipped; each row bitwise its own; out may be x."""
    E, S = 5, 2
    plain = experts_of(format, dtype, zeros=zeros)
    packed = tuple(map(pack, plain))
    near = 2e-5 if dtype is torch.float32 else 0.06
    torch.manual_seed(1)
    for T in (0, 1, 3, 40):
        x, weights = torch.randn(T, 160).to(dtype), torch.rand(T, S)
        ids = torch.rand(T, E - 1).topk(S).indices  # the last expert has no rows
        ids[torch.rand(T, S) < 0.2] = -1
        want = reference.quantized_experts(x, *plain, ids, weights.masked_fill(ids < 0, 0)).double()
        weights[ids < 0] = NAN
        x[(ids < 0).all(1)] = NAN
        got = operators.fused_experts(x, *packed, ids, weights)
        if T:
            real = (ids >= 0).any(1)
            assert got[~real].eq(0).all()
            off = (got.double() - want).abs().amax(1)[real] / want.abs().amax(1)[real]
            assert off.numel() == 0 or off.max() < near
        alone = [operators.fused_experts(x[t : t + 1], *packed, ids[t : t + 1], weights[t : t + 1]) for t in range(T)]
        assert T == 0 or torch.equal(got, torch.cat(alone))
        assert operators.fused_experts(x, *packed, ids.int(), weights, out=x) is x
        assert torch.equal(x, got)


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_in_the_order_of_activations(dtype, threads):
    """Each expert has its own, of w13's columns and of w2's: by fp64 products with what they mean."""
    w13, w2 = (
        dataclasses.replace(w, input_order=torch.stack([torch.randperm(w.K) for _ in range(w.E)]))
        for w in experts_of("int4", dtype, zeros=True)
    )
    x, ids = torch.randn(9, 160).to(dtype), torch.rand(9, 5).topk(2).indices
    shares = torch.rand(9, 2)
    want = reference.quantized_experts(x, w13, w2, ids, shares).double()
    for e in range(5):  # the twin itself: column k of the codes is column order[k] of the matrix
        codes = quantized.dequantize(dataclasses.replace(w13.rows(e), input_order=None))
        assert torch.equal(quantized.dequantize(w13)[e][:, w13.input_order[e]], codes)
    got = operators.fused_experts(x, pack(w13), pack(w2), ids, shares)
    off = (got.double() - want).abs().amax(1) / want.abs().amax(1)
    assert off.max() < (2e-5 if dtype is torch.float32 else 0.04)


def test_experts_misuse():
    packed = tuple(map(pack, experts_of("int4", torch.float32)))
    x, weights = torch.randn(2, 160), torch.rand(2, 1)
    for bad in (5, -2):
        with pytest.raises(AssertionError, match=f"{bad}.* 5 experts"):
            operators.fused_experts(x, *packed, torch.tensor([[0], [bad]]), weights)


# ---------------------------------------------------------------------------------------------------------------------
# Poison, other processors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", poison.PATTERNS, ids=hex)
def test_nothing_uninitialised_is_read(dtype, pattern, request):
    poison.start(pattern)
    request.addfinalizer(poison.stop)
    for format, zeros in FORMS:
        for act in (None, "int8", "fp8"):
            for N, K, group in ((150, 72, 72), (20, 96, 32)):
                weight = weight_of(format, N, K, group, dtype, zeros=zeros, act=act, order=True)
                packed = pack(weight)
                for T in (1, 21):
                    x = torch.randn(T, K).to(dtype)
                    check(operators.linear(x, packed, out=torch.empty(T, N)), *expected(x, weight))
                assert operators.embedding(torch.arange(N), packed).isfinite().all()
        ids, x = torch.randint(-1, 5, (21, 2)), torch.randn(21, 160).to(dtype)
        assert (
            operators.fused_experts(x, *map(pack, experts_of(format, dtype)), ids, torch.rand(21, 2)).isfinite().all()
        )
