# SPDX-License-Identifier: Apache-2.0
"""Quantised weights in the layouts of vllm-xpu-kernels, multiplied by stand-ins of its kernels, against the twins."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xpu_stand_ins
from torch import Tensor

from vllm.kernels import ops, quantized, reference, table, xpu
from vllm.kernels.quantized import FORMATS, QuantizedWeight

NAN, BF16 = float("nan"), torch.bfloat16


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(xpu, "kernel_package", lambda module: object())
    monkeypatch.setattr(xpu, "_trials", {})
    with xpu_stand_ins.installed():
        yield


def make(
    form: str, *shape: int, group: int = 0, dtype: torch.dtype = BF16, rows: int = 1, **fields: Any
) -> QuantizedWeight:
    """[(E,) N, K]; ``rows`` neighbouring rows have the same scales, 0: all of an expert."""
    (*some, N, K), (name, _, zeros) = shape, form.partition(" ")
    generator = torch.Generator().manual_seed(sum(shape) + group)
    group = group or K
    codes = torch.randint(256, (*some, N, K // FORMATS[name].columns), generator=generator, dtype=torch.uint8)
    if name == "fp8":
        codes[(codes & 127) == 127] = 3
    same = rows or N
    scales = torch.rand(*some, N // same, K // group, generator=generator).mul(4).repeat_interleave(same, -2) + 0.1
    scales = torch.exp2(scales.round() - 3) if name == "mxfp4" else scales.to(dtype)
    of_zeros = torch.randint(16, scales.shape, generator=generator, dtype=torch.uint8) if zeros else None
    return QuantizedWeight(name, N, K, group, dtype, codes, scales, of_zeros, **fields)


def randn(*size: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size))).to(dtype)


def close(got: Tensor, right: Tensor) -> None:
    assert got.dtype is right.dtype
    size = 1.0 if not right.isfinite().any() else float(right[right.isfinite()].float().abs().max())
    torch.testing.assert_close(got, right, rtol=2e-2, atol=2e-2 * size, equal_nan=True)


LINEAR = {
    "int4": {"group": 32},
    "int4 zeros": {"group": 32},
    "int4 of rows": {},
    "int4 in the order of activations": {"group": 32, "input_order": torch.randperm(256)},
    "fp8 of rows": {},
    "fp8 of a tensor": {"rows": 0},
    "fp8 of blocks": {"group": 128, "rows": 128},
    "fp8 of rows, rounded": {"activations": "fp8"},
    "fp8 of blocks, rounded": {"group": 128, "rows": 128, "activations": "fp8"},
    "fp8 ordered": {"input_order": torch.randperm(256)},
}


def linear_weight(name: str, dtype: torch.dtype = BF16) -> QuantizedWeight:
    form = "int4 zeros" if "zeros" in name else name.split(maxsplit=1)[0]
    return make(form, 384, 256, dtype=dtype, **LINEAR[name])


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.usefixtures("nan_poison")
def test_linear(name: str, dtype: torch.dtype) -> None:
    weight = linear_weight(name, dtype)
    packed = xpu.pack_quantized_weight(weight)
    assert packed.kind == "xpu"
    again = xpu.unpack_quantized_weight(packed)
    assert torch.equal(quantized.dequantize(again), quantized.dequantize(weight))
    x = torch.full((5, 300), NAN, dtype=dtype)[:, :256].copy_(randn(5, 256, dtype=dtype) / 8)
    x[2] = NAN
    for T in (0, 1, 5):
        for bias in (None, randn(384, dtype=dtype)):
            right = reference.quantized_linear(x[:T], weight, bias)
            close(xpu.quantized_linear(x[:T], packed, bias), right)
            out = torch.full((T, 400), NAN, dtype=dtype)[:, :384]
            assert xpu.quantized_linear(x[:T], packed, bias, out) is out
            close(out, right)


EXPERTS = {
    "int4": {"group": 32},
    "int4 of rows": {},
    "mxfp4": {"group": 32},
    "fp8 of blocks": {"group": 128, "rows": 128},
    "fp8 of a tensor": {"rows": 0},
}


@pytest.mark.parametrize("S", [2, 3])
@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.usefixtures("nan_poison")
def test_experts_skip_minus_one(name: str, S: int) -> None:
    E, I, D, form = 3, 128, 256, name.split(maxsplit=1)[0]
    w13 = make(form, E, 2 * I, D, gated=True, **EXPERTS[name])
    w2 = make(form, E, D, I, **EXPERTS[name])
    w13, w2 = (dataclasses.replace(w, scales=w.scales / 64) for w in (w13, w2))
    zeros = torch.full(w2.scales.shape, 8, dtype=torch.uint8) if form == "int4" else None  # which it implies
    packed = [xpu.pack_quantized_weight(w) for w in (w13, dataclasses.replace(w2, zeros=zeros))]
    assert [w.kind for w in packed] == ["xpu", "xpu"]
    for own, weight in zip(packed, (w13, w2), strict=True):
        assert torch.equal(quantized.dequantize(xpu.unpack_quantized_weight(own)), quantized.dequantize(weight))
    x, shares = randn(6, D), torch.rand(6, S)
    ids = torch.tensor([[0, 1, 2], [2, -1, 0], [-1, -1, 2], [1, 1, 1], [-1, -1, -1], [-1, -1, -1]])[:, :S].contiguous()
    shares[ids < 0] = NAN
    x[4:] = NAN
    right = reference.quantized_experts(x, w13, w2, ids, shares)
    for kind in (torch.int32, torch.int64):
        got = ops.fused_experts(x, *packed, ids.to(kind), shares)
        close(got, right)
        assert got[4:].count_nonzero() == 0
        assert ops.fused_experts(x.clone(), *packed, ids.to(kind), shares, x.clone()).equal(got)


@pytest.mark.parametrize(
    "weight",
    [
        make("int4", 16, 64, group=32, dtype=torch.float32),
        make("int4", 12, 64, group=32),
        make("int4", 16, 64, group=32, activations="int8"),
        make("int8", 16, 64),
        make("fp8", 256, 256, group=128),  # each row has scales of its own
        make("fp8", 256, 256, group=64, rows=64),
        make("fp8", 192, 256, group=128, rows=64),
        make("mxfp4", 16, 64, group=32),
        make("int4 zeros", 2, 16, 64, group=32),
        make("int4", 2, 16, 64, group=16),
        make("int4", 2, 16, 64, group=32, activations="int8"),
        make("int4", 2, 16, 64, group=32, input_order=torch.arange(64)),
        make("fp8", 2, 16, 64),  # a scale for each row, the kernel has one an expert
        dataclasses.replace(make("int4", 2, 16, 64, group=32), format="mxfp4"),  # scales that are no powers of two
        dataclasses.replace(make("int4 zeros", 16, 64, group=32), zeros=torch.full((16, 2), 16, dtype=torch.uint8)),
        dataclasses.replace(make("int4", 16, 64, group=32, dtype=torch.float16), scales=torch.full((16, 2), 1e-9)),
    ],
    ids=lambda weight: f"{weight.format}-{weight.codes.dim()}-{weight.group_size}",
)
def test_what_the_kernels_have_nothing_for_stays_plain(weight: QuantizedWeight) -> None:
    assert xpu.pack_quantized_weight(weight) is weight
    if weight.codes.dim() == 2:
        with pytest.raises(NotImplementedError, match="of kind plain"):
            xpu.quantized_linear(randn(2, weight.K), weight)


@pytest.mark.parametrize("fault", ["wrong", "raises"])
@pytest.mark.parametrize("experts", [False, True])
def test_a_kernel_that_fails_with_the_first_weight_gets_none(
    fault: str, experts: bool, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    def kernel(*args: Any) -> Tensor:
        if fault == "raises":
            raise RuntimeError("could not create a primitive")
        if experts:
            return args[5].fill_(1.0)
        return torch.ones(len(args[0]), args[1].shape[1], dtype=args[0].dtype)

    name = "cutlass_grouped_gemm_interface" if experts else "int4_gemm_w4a16"
    monkeypatch.setattr(xpu.torch.ops._xpu_C, name, kernel)
    weight = make("int4", 2, 16, 64, group=32) if experts else make("int4", 16, 64, group=32)
    for _ in range(2):
        assert xpu.pack_quantized_weight(weight) is weight
    told = [record.getMessage() for record in log.records if "fails its trial" in record.getMessage()]
    assert len(told) == 1
    assert ("could not create" if fault == "raises" else "is off by") in told[0]


def test_what_packed_a_weight_reads_it_and_what_it_refuses_is_unpacked(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    """Rows, float32 sums, and more experts to a token than there are kernels for come from plain weights again."""
    weight = linear_weight("int4 zeros")
    packed = xpu.pack_quantized_weight(weight)
    x, rows = randn(3, 256), torch.tensor([3, 0, 383])
    close(ops.linear(x, packed), reference.quantized_linear(x, weight))
    assert torch.equal(ops.embedding(rows, packed), reference.quantized_embedding(rows, weight))
    sums = torch.empty(3, 384)
    ops.linear(x, packed, None, sums)
    assert torch.equal(sums, reference.quantized_linear(x, weight, None, torch.empty(3, 384)))
    chosen = table.choose("cpu")["quantized_linear"]
    by_xpu = dataclasses.replace(chosen, implementation="xpu", module=xpu, function=xpu.quantized_linear)
    monkeypatch.setattr(ops, "choose", lambda device: {**table.choose("cpu"), "quantized_linear": by_xpu})
    ops.linear(x, packed, None, sums)
    assert "quantized_linear by xpu: sums in torch.float32" in log.text
    w13, w2 = make("int4", 12, 64, 64, group=32, gated=True), make("int4", 12, 64, 32, group=32)
    both = [xpu.pack_quantized_weight(w) for w in (w13, w2)]
    ids, shares = torch.arange(11).expand(2, 11), torch.rand(2, 11)
    got = ops.fused_experts(randn(2, 64), *both, ids, shares)
    assert torch.equal(got, reference.quantized_experts(randn(2, 64), w13, w2, ids, shares))


@pytest.mark.parametrize("plain", [0, 1])
def test_experts_of_which_only_one_matrix_has_a_kernel(plain: int) -> None:
    pair = [make("int4", 3, 64, 64, group=32, gated=True), make("int4", 3, 64, 32, group=32)]
    both = [xpu.pack_quantized_weight(weight) for weight in pair]
    both[plain] = pair[plain]
    ids, shares = torch.tensor([[0, 2], [-1, 1]]), torch.rand(2, 2)
    got = ops.fused_experts(randn(2, 64), *both, ids, shares)
    assert torch.equal(got, reference.quantized_experts(randn(2, 64), *pair, ids, shares))


def test_the_layers_weights_are_packed_by_the_chosen_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "choose", lambda device: dict.fromkeys(table.TABLE, SimpleNamespace(module=xpu)))
    assert ops.pack_quantized_weight(linear_weight("int4")).kind == "xpu"
    assert ops.pack_quantized_weight(make("int4", 2, 16, 64, group=32)).kind == "xpu"


def test_the_host_asks_the_device_for_nothing() -> None:
    """Tensors without values: whatever reads one raises."""

    def on_meta(weight: QuantizedWeight) -> QuantizedWeight:
        packed = xpu.pack_quantized_weight(weight)
        names = ("codes", "scales", "zeros", "input_order")
        moved = {n: torch.empty_like(x, device="meta") for n in names if (x := getattr(packed, n)) is not None}
        return dataclasses.replace(packed, **moved)

    for name in LINEAR:
        weight = on_meta(linear_weight(name))
        xpu.quantized_linear(torch.empty(5, 256, dtype=BF16, device="meta"), weight)
    for name, fields in EXPERTS.items():
        w13 = on_meta(make(name.split(maxsplit=1)[0], 3, 256, 256, gated=True, **fields))
        w2 = on_meta(make(name.split(maxsplit=1)[0], 3, 256, 128, **fields))
        with torch.device("meta"):
            ids, shares = torch.empty(5, 3, dtype=torch.int32), torch.empty(5, 3)
            assert xpu.quantized_experts(torch.empty(5, 256, dtype=BF16), w13, w2, ids, shares).shape == (5, 256)
