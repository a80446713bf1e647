# SPDX-License-Identifier: Apache-2.0
"""Law 2 for quantised activations: what a row of padding holds sets no real row's scale, wherever one is taken."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import vllm
from vllm.kernels import ops, quantized, reference
from vllm.kernels.activation_scales import activation_scale, amax_of_real_rows
from vllm.kernels.quantized import QuantizedWeight

NAN = float("nan")
PADS = [NAN, float("inf"), 1e30, -0.0]


@pytest.mark.parametrize("pad", PADS)
@pytest.mark.parametrize("count", [0, 1, 3, 4, torch.tensor(3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_rows_alone_say_how_large_activations_are(pad: float, count: Any, dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, -2.0], [0.0, 0.5], [-8.0, 4.0], [3.0, 3.0]], dtype=dtype)
    right = [2.0, 0.5, 8.0, 3.0][: int(count)]
    x[int(count) :] = pad
    each = amax_of_real_rows(x, count, per_token=True)
    assert each.flatten().tolist() == right + [0.0] * (4 - int(count))
    amax = amax_of_real_rows(x, count)
    assert amax.shape == ()
    assert amax.dtype is torch.float32
    assert float(amax) == max(right, default=0.0)
    for per_token in (True, False):
        scale = activation_scale(x, 448.0, count, per_token)
        assert scale.isfinite().all()
        assert (scale > 0).all()
    assert amax_of_real_rows(x[:0], 0).tolist() == 0
    if len(right):
        x[0, 1] = NAN
        assert amax_of_real_rows(x, count).isnan(), "a NaN of a real row is seen"


def test_without_a_count_all_rows_are_real() -> None:
    x = torch.tensor([[1.0, -2.0], [NAN, 0.5]])
    assert amax_of_real_rows(x).isnan()
    torch.testing.assert_close(amax_of_real_rows(x, per_token=True), torch.tensor([[2.0], [NAN]]), equal_nan=True)


# Functions of vllm/ that take the largest magnitude of activations, and those that take one of weights or of errors.
OF_ACTIVATIONS = {"kernels/activation_scales.py:amax_of_real_rows"}
OF_OTHER_THINGS = {
    "kernels/quantized.py:quantize",
    "kernels/cpu/quantized.py:pack_quantized_weight",
    "kernels/xpu.py:_passes",
}


def test_nothing_else_takes_a_maximum_of_magnitudes() -> None:
    """A new place that quantises asks the helper, or says here what it takes the maximum of."""
    root, found = Path(vllm.__file__).parent, set()
    for path in root.rglob("*.py"):
        function = ""
        for line in path.read_text().splitlines():
            if definition := re.match(r" *def (\w+)", line):
                function = definition[1]
            if re.search(r"\.(amax|aminmax|abs\(\)\.max)\(", line):
                found.add(f"{path.relative_to(root)}:{function}")
    assert found - OF_OTHER_THINGS == OF_ACTIVATIONS


def int8_weight(experts: int | None, N: int, K: int, to: str | None, gated: bool = False) -> QuantizedWeight:
    shape = (N, K) if experts is None else (experts, N, K)
    g = torch.Generator().manual_seed(N)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=g)
    scales = torch.rand(*shape[:-1], 1, generator=g) / 100
    return QuantizedWeight("int8", N, K, K, torch.float32, codes, scales, activations=to, gated=gated)


@pytest.mark.parametrize("to", ["int8", "fp8", None])
@pytest.mark.parametrize(
    ("of", "pad"), [*((of, pad) for of in ("chosen", "reference") for pad in PADS), ("triton", NAN), ("triton", 1e30)]
)
def test_rows_of_padding_change_no_product(of: str, to: str | None, pad: float) -> None:
    """Each operator that rounds its inputs, as the CPU's choice, in plain torch and in Triton: real rows are those of a
    step without padding, but for the order of sums."""
    module: Any = {"chosen": ops, "reference": reference}.get(of) or pytest.importorskip("vllm.kernels.triton")
    x = torch.randn(40, 64)
    x[29:] = pad
    weight = int8_weight(None, 48, 64, to)
    packed = ops.pack_quantized_weight(weight) if module is ops else weight
    padded, alone = module.quantized_linear(x, packed), module.quantized_linear(x[:29].clone(), packed)
    assert padded[:29].isfinite().all()
    torch.testing.assert_close(padded[:29], alone, rtol=1e-4, atol=1e-4)
    w13, w2 = int8_weight(4, 64, 64, to, gated=True), int8_weight(4, 64, 32, to)
    if module is ops:
        w13, w2 = ops.pack_quantized_weight(w13), ops.pack_quantized_weight(w2)
    ids, shares = torch.randint(0, 4, (40, 2)), torch.rand(40, 2)
    ids[29:], shares[29:] = -1, NAN
    experts = ops.fused_experts if module is ops else module.quantized_experts
    padded, alone = experts(x, w13, w2, ids, shares), experts(x[:29].clone(), w13, w2, ids[:29], shares[:29])
    torch.testing.assert_close(padded[:29], alone, rtol=1e-4, atol=1e-4)
    assert padded[29:].eq(0).all()


@pytest.mark.parametrize("to", ["int8", "fp8"])
def test_each_row_is_rounded_on_its_own_grid(to: str) -> None:
    x = torch.randn(5, 64)
    alone = [quantized.round_activations(row[None], to) for row in x]
    x[3] = NAN
    together = quantized.round_activations(x, to)
    for row in (0, 1, 2, 4):
        assert torch.equal(together[row], alone[row][0])
