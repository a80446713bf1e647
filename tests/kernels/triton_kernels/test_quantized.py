# SPDX-License-Identifier: Apache-2.0
"""Products with quantised weights against their twins in fp64, in the interpreter and on a device. Codes that nobody
may read are 0xFF, scales NaN."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import given, settings, st
from row_cases import NAN, assert_close, few, randn, wide_rows
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vllm.kernels import ops, quantized, reference, table
from vllm.kernels.quantized import FORMATS, QuantizedWeight

pytest.importorskip("triton.language", reason="triton is not installed")
from vllm.kernels import triton as kernels
from vllm.kernels.triton import quantized as family
from vllm.kernels.triton.experts import Tiles

BF16, FP32 = torch.bfloat16, torch.float32
FORMS = ("int4", "int4 zeros", "int8", "int8 zeros", "fp8", "mxfp4")


def among(x: Tensor, poison: float) -> Tensor:
    """The same values in wider memory, whose rest holds ``poison``."""
    wide = x.new_full((*x.shape[:-2], x.shape[-2] + 1, x.shape[-1] + 16), poison)
    wide[..., :-1, :-16] = x
    return wide[..., :-1, :-16]


def make(
    form: str, *shape: int, group: int = 0, dtype: torch.dtype = BF16, seed: int = 0, **fields: Any
) -> QuantizedWeight:
    """A random weight of ``shape`` [(E,) N, K]; group 0: one for the whole row."""
    (*some, K), (name, _, zeros) = shape, form.partition(" ")
    generator = torch.Generator().manual_seed(seed + sum(shape))
    group, step = group or K, FORMATS[name]
    groups = -(-K // group)
    codes = torch.randint(256, (*some, -(-K // step.columns)), generator=generator, dtype=torch.uint8)
    if name == "fp8":
        codes[(codes & 127) == 127] = 3  # NaN
    scales = (torch.rand(*some, groups, generator=generator) + 0.2).to(dtype)
    low, high = (0, 16) if name == "int4" else (-20, 20)
    of_zeros = torch.randint(low, high, (*some, groups), generator=generator).to(
        torch.uint8 if name == "int4" else torch.int8
    )
    return QuantizedWeight(
        name, shape[-2], K, group, dtype, among(codes, 255), among(scales, NAN),
        among(of_zeros, 77) if zeros else None, **fields,
    )  # fmt: skip


def exact(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(the product, the sum of the magnitudes) in fp64."""
    w, x = quantized.dequantize(weight).double(), quantized.round_activations(x, weight.activations).double()
    y, magnitude = x @ w.T, x.abs() @ w.abs().T
    return (y, magnitude) if bias is None else (y + bias.double(), magnitude + bias.double().abs())


def small(columns: int, depth: int) -> Any:
    """Tiles of which small shapes have several in each direction."""
    return lambda weight, *_: Tiles(4, columns, family._depth(weight, depth), 1, 2)


@pytest.fixture(params=[False, True], ids=["bits", "fp8"])
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A card without the type float8e4nv, and one with it."""
    monkeypatch.setattr(family, "has_fp8", lambda _: request.param)
    return request.param


def by_hand(weight: QuantizedWeight) -> Tensor:
    """Number by number, as the formats are defined."""
    rows = []
    for n in range(weight.N):
        row = []
        for k in range(weight.K):
            byte = int(weight.codes[n, k // FORMATS[weight.format].columns])
            if weight.format in ("int4", "mxfp4"):
                code = byte // 16 if k % 2 else byte % 16
                value = code - 8.0
                if weight.format == "mxfp4":
                    value = [0, 0.5, 1, 1.5, 2, 3, 4, 6][code % 8] * (-1) ** (code // 8)
            elif weight.format == "int8":
                value = (byte + 128) % 256 - 128
            else:
                exponent, mantissa = byte // 8 % 16, byte % 8
                value = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
                value *= (-1) ** (byte // 128)
            group = k // weight.group_size
            if weight.zeros is not None:
                value += (8 if weight.format == "int4" else 0) - int(weight.zeros[n, group])
            row.append(value * float(weight.scales[n, group]))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("nan_poison", "card")
def test_what_the_codes_mean(form: str) -> None:
    weight = make(form, 3, 32, group=16, dtype=FP32)
    right = by_hand(weight)
    x = randn(2, 32)
    assert_close(family.quantized_linear(x, weight), x.double() @ right.T, x.double().abs() @ right.abs().T)
    assert_close(family.quantized_embedding(torch.tensor([2, 0]), weight), right[[2, 0]], roundings=2)


def test_every_code(card: bool) -> None:
    """But NaN, where the card's own type decodes: the interpreter takes it for 480."""
    codes = torch.arange(256, dtype=torch.uint8)[None]
    for name in FORMATS:
        if name in family.KNOWN and FORMATS[name].scaled:
            K = 256 * FORMATS[name].columns
            weight = QuantizedWeight(name, 1, K, K, FP32, codes, torch.ones(1, 1))
            got = family.quantized_embedding(torch.tensor([0]), weight)
            right = quantized.dequantize(weight)
            got = torch.where(right.isnan(), right, got) if card else got
            torch.testing.assert_close(got, right, rtol=0, atol=0, equal_nan=True)


@few
@given(
    form=st.sampled_from(FORMS),
    N=st.integers(1, 20),
    K=st.integers(1, 70),
    T=st.integers(0, 9),
    group=st.sampled_from([0, 0, 16, 32, 48]),
    dtype=st.sampled_from([FP32, BF16, torch.float16]),
    tiles=st.sampled_from([small(8, 16), small(16, 32)]),
    activations=st.sampled_from([None, None, "int8", "fp8"]),
    fp8=st.booleans(),
    wide=st.booleans(),
    ordered=st.booleans(),
)
def test_products_of_any_shape(
    form, N, K, T, group, dtype, tiles, activations, fp8, wide, ordered, monkeypatch, nan_poison
):
    monkeypatch.setattr(family, "_tiles", tiles)
    monkeypatch.setattr(family, "has_fp8", lambda _: fp8)
    order = torch.randperm(K, generator=torch.Generator().manual_seed(K)) if ordered else None
    weight = make(form, N, K, group=group, dtype=dtype, activations=activations, input_order=order)
    x = wide_rows(randn(T, K).to(dtype), "cpu")
    bias = randn(N, seed=1).to(dtype) if N % 2 else None
    out = torch.full((T, N), NAN, dtype=FP32 if wide else dtype) if T % 2 else None
    got = family.quantized_linear(x, weight, bias, out)
    assert out is None or got is out
    assert got.dtype is (dtype if out is None else out.dtype)
    assert_close(got, *exact(x, weight, bias))


@pytest.mark.parametrize("activations", [None, "int8", "fp8"])
@pytest.mark.parametrize("form", ["int8", "fp8", "int4 zeros"])
@pytest.mark.usefixtures("nan_poison", "card")
def test_a_row_is_its_own(form: str, activations: str | None) -> None:
    """A row of NaN or with an infinity is not a number in any column, one of zeros exactly zero, and the others are
    bitwise what they are alone."""
    weight = make(form, 9, 64, group=32, activations=activations)
    x = randn(5, 64).to(BF16)
    x[1, 7], x[2], x[3, 5] = NAN, 0, torch.inf
    got = family.quantized_linear(x, weight)
    assert got[1].isnan().all()
    assert not got[3].isfinite().any()
    assert got[2].eq(0).all()
    x[[1, 3]] = 0
    assert torch.equal(family.quantized_linear(x, weight)[[0, 4]], got[[0, 4]])


@pytest.mark.parametrize("to", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.usefixtures("nan_poison", "card")
def test_activations_are_rounded_as_torch_does(to: str, dtype: torch.dtype, card: bool) -> None:
    """Ties, subnormal numbers and the largest; a row of many sizes."""
    x = randn(6, 1100) * torch.logspace(-6, 2, 1100)
    x[0, :9] = torch.tensor([448.0, 17, 19, 1.0625, 1.1875, 2**-10, 3 * 2**-10, 5 * 2**-10, 2**-11])
    x[0, 9:], x[1] = x[0, 9:].clamp(-448, 448), 0
    x[2] = (torch.arange(1100) % 255 - 127) / 2
    x[2, 0] = 127
    x = wide_rows(x.to(dtype), "cpu")
    rounded, scales = family._rounded(x, to, card)
    assert rounded.dtype is (torch.int8 if to == "int8" else torch.float8_e4m3fn if card else dtype)
    assert torch.equal(rounded.float() * scales[:, None], quantized.round_activations(x, to))


# --- experts ----------------------------------------------------------------------------------------------------------


def of_experts(form: str, E: int, I: int, D: int, **fields: Any) -> tuple[QuantizedWeight, QuantizedWeight]:
    w13 = make(form, E, 2 * I, D, gated=True, **fields)
    w2 = make(form, E, D, I, seed=1, **fields)
    scaled = [dataclasses.replace(w, scales=w.scales / (8 * w.K**0.5)) for w in (w13, w2)]
    return scaled[0], scaled[1]


def _on(device: Any, weight: QuantizedWeight) -> QuantizedWeight:
    names = ("codes", "scales", "zeros", "input_order")
    moved = {name: x.to(device) for name in names if (x := getattr(weight, name)) is not None}
    return dataclasses.replace(weight, **moved)


def check_experts(form: str, ids: Tensor, E: int, I: int, D: int, dtype: torch.dtype, **fields: Any) -> Tensor:
    (T, S), device = ids.shape, ids.device
    w13, w2 = of_experts(form, E, I, D, dtype=dtype, **fields)
    host = ids.cpu()
    x, shares = randn(T, D).to(dtype), torch.rand(T, S, generator=torch.Generator().manual_seed(T)) - 0.3
    right = reference.quantized_experts(x.double(), w13, w2, host, shares.double())
    shares[host < 0] = NAN
    x[(host < 0).all(dim=1)] = NAN
    for weight in (w13, w2):
        unused = [e for e in range(E) if not host.eq(e).any()]
        weight.codes[unused], weight.scales[unused] = 255, NAN
    there = [_on(device, weight) for weight in (w13, w2)]
    x = wide_rows(x, device)
    got = family.quantized_experts(x, *there, ids, shares.to(device))
    assert got[(ids < 0).all(dim=1)].eq(0).all()
    off = (got.cpu().double() - right).abs()
    # Rounded: gate and up, h, y, the sum; where h is rounded to a grid, a number at an edge may take the next step.
    bound = (0.03 if fields.get("activations") else 8 * torch.finfo(dtype).eps + 4e-6) * right.square().mean().sqrt()
    assert (off <= 4 * bound).all(), f"off by {float((off / bound).max()):.1f} times the rounding"
    return got


@settings(few, max_examples=15)
@given(
    data=st.data(),
    form=st.sampled_from(FORMS),
    E=st.integers(1, 4),
    I=st.integers(1, 40),
    D=st.integers(1, 40),
    S=st.integers(1, 3),
    group=st.sampled_from([0, 16, 32]),
    dtype=st.sampled_from([FP32, BF16]),
    activations=st.sampled_from([None, None, "int8", "fp8"]),
)
def test_experts_of_any_shape(data, form, E, I, D, S, group, dtype, activations, monkeypatch, nan_poison):
    monkeypatch.setattr(family, "_tiles", small(16, 16))
    rows = data.draw(st.lists(st.lists(st.integers(-1, E - 1), min_size=S, max_size=S), max_size=9))
    ids = torch.tensor(rows, dtype=torch.int32).view(-1, S)
    check_experts(form, ids, E, I, D, dtype, group=group, activations=activations)


@pytest.mark.parametrize("load", ["one", "none", "no experts", "beyond"])
@pytest.mark.parametrize("form", ["int4 zeros", "fp8"])
def test_experts_under_uneven_loads(load: str, form: str, nan_poison: None) -> None:
    E = 0 if load == "no experts" else 3
    ids = torch.full((5, 2), -1)
    if load == "one":
        ids[:] = 2
    w13, w2 = of_experts(form, E, 16, 32, group=16)
    if load == "beyond":  # an id that is no expert of this rank, which reads nobody's weights
        ids[:, 0] = 3
        got = family.quantized_experts(randn(5, 32).to(BF16), w13, w2, ids, torch.rand(5, 2))
    else:
        got = check_experts(form, ids, E, 16, 32, BF16, group=16)
    assert (load == "one") == bool(got.any())


@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
def test_experts_with_biases(activation: str, nan_poison: None) -> None:
    """gpt-oss's: gate and up past the bounds of its activation."""
    E, I, D = 3, 20, 32
    w13, w2 = of_experts("mxfp4", E, I, D, dtype=FP32)
    w13 = dataclasses.replace(w13, scales=w13.scales * 30)
    ids, shares, x = torch.tensor([[2, 0], [1, -1], [-1, -1]]), torch.rand(3, 2), randn(3, D)
    biases = randn(E, 2 * I, seed=1) * 4, randn(E, D, seed=2)
    got = family.quantized_experts(x, w13, w2, ids, shares, None, *biases, activation)
    right = reference.quantized_experts(x.double(), w13, w2, ids, shares.double(), None, *biases, activation)
    torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-5 * float(right.abs().max()))
    assert got[2].eq(0).all()


@pytest.mark.parametrize("activations", [None, "int8"])
def test_experts_whose_columns_are_in_the_order_of_activations(activations: str | None, nan_poison: None) -> None:
    """Each expert's in its own."""
    generator = torch.Generator().manual_seed(3)
    order = torch.stack([torch.randperm(32, generator=generator) for _ in range(2)])
    ids, shares, x = torch.tensor([[0, 1], [1, -1], [-1, -1]]), torch.rand(3, 2), randn(3, 32)
    w13, w2 = of_experts("int4", 2, 48, 32, dtype=FP32, group=16, activations=activations)
    w13 = dataclasses.replace(w13, input_order=order)
    got = family.quantized_experts(x, w13, w2, ids, shares)
    right = reference.quantized_experts(x.double(), w13, w2, ids, shares.double())
    torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-5 * float(right.abs().max()))
    with pytest.raises(NotImplementedError, match="order of their own"):
        family.quantized_experts(
            x, w13, dataclasses.replace(w2, input_order=torch.arange(48).repeat(2, 1)), ids, shares
        )


# --- rows -------------------------------------------------------------------------------------------------------------


@few
@given(
    form=st.sampled_from(FORMS),
    ids=st.lists(st.integers(-3, 25), max_size=9),
    K=st.integers(1, 70),
    group=st.sampled_from([0, 16, 48]),
    dtype=st.sampled_from([FP32, BF16]),
    ranged=st.booleans(),
)
def test_rows_of_any_weight(form, ids, K, group, dtype, ranged, nan_poison):
    weight = make(form, 9, K, group=group, dtype=dtype)
    rows = torch.tensor(ids, dtype=torch.int64)
    vocab_range = (11, 19) if ranged else None
    rows = rows if ranged else rows.clamp(0, 8)
    got = family.quantized_embedding(rows, weight, vocab_range)
    held = (rows >= 11) & (rows < 19) if ranged else torch.ones_like(rows, dtype=torch.bool)
    right = torch.zeros(len(ids), K, dtype=torch.float64)
    right[held] = quantized.dequantize(weight).double()[rows[held] - 11 if ranged else rows]
    assert got.dtype is dtype
    assert_close(got, right)
    assert got[~held].eq(0).all()


# --- what it asks and refuses -----------------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_the_host_asks_the_device_nothing() -> None:
    w13, w2 = of_experts("int4 zeros", 3, 16, 32, group=16, activations="int8")
    weight = make("fp8", 8, 32, activations="fp8", input_order=torch.arange(32))
    x = randn(4, 32).to(BF16)
    with Calls() as calls:
        family.quantized_experts(x, w13, w2, torch.randint(-1, 3, (4, 2)), torch.rand(4, 2))
        family.quantized_linear(x, weight)
        family.quantized_embedding(torch.tensor([1, 2]), w2.rows(1), (0, 2))
    waits = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "_to_copy", "bincount"}
    assert not calls.seen & waits, calls.seen


def test_what_the_kernels_refuse() -> None:
    good = make("int4", 8, 32, group=16)
    x = randn(2, 32).to(BF16)
    out = torch.full((2, 8), 7.0, dtype=BF16)
    for bad, told in (
        (dataclasses.replace(good, format="q3_k"), "plain q3_k"),
        (dataclasses.replace(good, kind="xpu"), "xpu int4"),
        (dataclasses.replace(good, group_size=8), "groups of 8 columns"),
        (dataclasses.replace(good, scales=good.scales.double()), "float64"),
        (dataclasses.replace(good, codes=good.codes.T.contiguous().T), "neighbours"),
        (dataclasses.replace(make("int4 zeros", 8, 32, group=16), format="mxfp4"), "with zeros"),
    ):
        for call in (
            lambda bad=bad: family.quantized_linear(x, bad, None, out),
            lambda bad=bad: family.quantized_embedding(torch.tensor([0]), bad),
            lambda bad=bad: family.quantized_experts(x, bad, bad, torch.zeros(2, 1).int(), torch.ones(2, 1)),
        ):
            with pytest.raises(NotImplementedError, match=told):
                call()
    assert out.eq(7).all()
    with pytest.raises(NotImplementedError, match="order of the inputs"):
        family.quantized_embedding(torch.tensor([0]), dataclasses.replace(good, input_order=torch.arange(32)))
    with pytest.raises(AssertionError, match=r"\(2, 31\), needed \(2, 32\)"):
        family.quantized_linear(x[:, :31], good)
    with pytest.raises(AssertionError, match="gated"):
        family.quantized_experts(x, *of_experts("int8", 2, 16, 32)[::-1], torch.zeros(2, 1).int(), torch.ones(2, 1))


def test_the_table_takes_the_kernels_and_their_refusals(monkeypatch: pytest.MonkeyPatch, log: Any) -> None:
    monkeypatch.setenv("VLLM_KERNELS", "triton")
    table.choose.cache_clear()
    choices = table.choose("cpu")
    for operator in ("quantized_linear", "quantized_experts", "quantized_embedding"):
        assert choices[operator].function is getattr(kernels, operator), "it failed the quick check"
        for row in table.TABLE[operator][1:]:
            assert "triton" in row.split()
    weight, x = make("int8", 8, 24, group=8, dtype=FP32), randn(3, 24)
    assert torch.equal(ops.linear(x, ops.pack_quantized_weight(weight)), reference.quantized_linear(x, weight))
    assert "groups of 8 columns" in log.text


# --- on a device ------------------------------------------------------------------------------------------------------


def check_real_sizes(device: Any, form: str, T: int, activations: str | None) -> None:
    K = 2048
    weight = make(form, 1024, K, group=32 if form == "mxfp4" else 128, activations=activations)
    x = randn(T, K).to(BF16)
    got = family.quantized_linear(wide_rows(x, device), _on(device, weight))
    assert_close(got, *exact(x, weight))
    ids = torch.rand(T, 64, generator=torch.Generator().manual_seed(T)).topk(8).indices
    ids[T // 2 :: 3], ids[::5, 3] = -1, -1
    check_experts(form, ids.to(device), 64, 128, 256, BF16, group=32, activations=activations)


COMPILED = """
import sys, torch, compiling, dataclasses
from vllm.kernels.quantized import FORMATS, QuantizedWeight
from vllm.kernels.triton import quantized, experts

capability, shared = map(int, sys.argv[1:])
quantized.shared_memory = lambda device: shared
quantized.has_fp8 = lambda device: capability >= 89
compiling.TYPES |= {torch.int8: "*i8", torch.uint8: "*u8", torch.float8_e4m3fn: "*fp8e4nv"}
BF16 = torch.bfloat16

def weight(format, *shape, group, zeros=False, dtype=BF16, **fields):
    *some, K = shape
    new = lambda last, dtype: torch.empty(*some, last, dtype=dtype, device="meta")
    packed = FORMATS[format]
    codes = new(-(-K // packed.columns) * packed.bytes, torch.uint8)
    if not packed.scaled:
        return QuantizedWeight(format, shape[-2], K, packed.columns, dtype, codes, **fields)
    of_zeros = new(-(-K // group), torch.uint8) if zeros else None
    return QuantizedWeight(format, shape[-2], K, group, dtype, codes, new(-(-K // group), dtype), of_zeros, **fields)

def new(*shape, dtype=BF16):
    return torch.empty(*shape, dtype=dtype, device="meta")

def linear(T, format, group, dtype=BF16, **fields):
    w = weight(format, 2048, 4096, group=group, dtype=dtype, **fields)
    return lambda: quantized.quantized_linear(new(T, 4096, dtype=dtype), w, new(2048, dtype=dtype))

def grouped(T, format, group, **fields):
    w13 = weight(format, 64, 2 * 768, 2048, group=group, gated=True, **fields)
    w2 = weight(format, 64, 2048, 768, group=group, **fields)
    x, ids, shares = new(T, 2048), new(T, 8, dtype=torch.int32), new(T, 8, dtype=torch.float32)
    return lambda: quantized.quantized_experts(x, w13, w2, ids, shares)

cases = [
    (linear, 1, "int4", 128, dict(zeros=True)), (linear, 60, "int4", 32, {}), (linear, 2048, "int4", 128, {}),
    (linear, 2048, "mxfp4", 32, {}), (linear, 8, "fp8", 128, {}), (linear, 2048, "fp8", 128, dict(activations="fp8")),
    (linear, 8, "fp8", 4096, dict(activations="fp8")), (linear, 2048, "int8", 4096, dict(activations="int8")),
    (linear, 64, "int4", 16, dict(activations="int8")), (linear, 8, "int8", 128, dict(dtype=torch.float32)),
    (linear, 2048, "int8", 128, dict(activations="fp8", dtype=torch.float16)),
    (grouped, 8, "int4", 128, dict(zeros=True)), (grouped, 2048, "int4", 128, {}), (grouped, 2048, "mxfp4", 32, {}),
    *((linear, T, format, 0, {}) for T in (1, 60, 2048) for format in ("q5_1", "q5_k", "q6_k")),
    (grouped, 8, "q4_k", 0, {}), (grouped, 2048, "q6_k", 0, {}), (linear, 8, "q5_0", 0, dict(dtype=torch.float32)),
    (grouped, 300, "fp8", 128, dict(activations="fp8")), (grouped, 2048, "int8", 32, dict(activations="int8")),
]
for kind, T, format, group, fields in cases:
    call = kind(T, format, group, **fields)
    experts_kernels = [name for name in vars(experts) if name in ("_order", "_cut", "_combine")]
    kept = {name: getattr(experts, name) for name in experts_kernels}
    class Nothing:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: None
    for name in experts_kernels:
        setattr(experts, name, Nothing())
    try:
        launches = compiling.launches(quantized, call)
    finally:
        for name, kernel in kept.items():
            setattr(experts, name, kernel)
    for launch in launches:
        kernel = compiling.compile_launch(launch, capability)
        name, ptx = launch.kernel.__name__, kernel.asm["ptx"]
        told = (kind.__name__, T, format, group, fields, name, launch.options, kernel.metadata.shared)
        print(*told, "mma" in ptx, ptx.count("ld.local"), flush=True)
        assert kernel.metadata.shared <= shared, told
        if name == "_product" and fields.get("dtype") is not torch.float32:
            assert "mma" in ptx, told
            kinds = launch.arguments["PRODUCT"]
            assert {"int8": ".s8" in ptx, "fp8": "e4m3" in ptx, "values": True}[kinds], told
for format in ("fp8", "q4_1", "q5_k", "q6_k"):
    w = weight(format, 4096, 2048, group=128)
    (launch,) = compiling.launches(quantized, lambda: quantized.quantized_embedding(new(9, dtype=torch.int64), w))
    compiling.compile_launch(launch, capability)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "shared"), [(80, 163 << 10), (89, 99 << 10), (90, 227 << 10)])
def test_quantized_products_compile_for_cuda(capability: int, shared: int, tmp_path: Path) -> None:
    """Every kind of product fits a card's shared memory and uses its matrix unit, in its own type where it has it."""
    pytest.importorskip("triton.backends.nvidia.compiler")
    here = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": f"{here.parents[2]}:{here}", "TRITON_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-W", "ignore", "-c", COMPILED, str(capability), str(shared)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
