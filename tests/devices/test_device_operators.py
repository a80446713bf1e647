# SPDX-License-Identifier: Apache-2.0
"""Every operator at real sizes against its exact result: the table's choice for the device and each other that runs
there. Pad rows, unwritten cache slots, unused state slots and the memory of results hold NaN."""

from __future__ import annotations

import device_suite as suite
import pytest
import torch
from device_cases import CASES, Place, exact, results

from vllm.kernels import checks, table, weights

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("nan_memory")]

OPERATORS = {name: operator for name, (operator, _) in CASES.items()}
# By a result's size: a few roundings of bfloat16; sums of fp32, where devices may take shortcuts. Quantised weights may
# meet 16-bit inputs on coarser grids, up to 2 ** -6 of a row's largest result, which is some three times its usual one.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 5e-4}
LOOSE = {"gated_delta_net": 2.5, "fused_experts": 2.5, "quantized_experts": 2.5, "paged_attention": 3.0}
LOOSE["quantized_linear"] = 2.5
DTYPES = (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])
def test_operator(implementation_of: tuple[str, str], dtype: torch.dtype, device: str) -> None:
    name, implementation = implementation_of
    operator, build = CASES[name]
    if (missing := suite.needs(operator, implementation)) is not None:
        pytest.skip(missing)
    module = table._module(implementation)
    packer = module if hasattr(module, "pack_linear_weight") else weights
    args = build(Place(suite.sizes(), device, dtype, packer))
    with torch.device(device):
        args = checks.in_order_of(module, args)
    try:
        out = getattr(module, operator)(*args)
    except NotImplementedError as refusal:
        if dtype is torch.bfloat16 and device != "cpu" and not (implementation == "xpu" and "int8" in name):
            raise  # the type and the shapes of the models that the cards are for
        pytest.skip(f"{implementation} refuses: {refusal}")
    compare(results(out, args), exact(name, suite.sizes(), dtype), TOLERANCE[dtype] * LOOSE.get(operator, 1))


def compare(ours: list[torch.Tensor], right: list[torch.Tensor], tolerance: float) -> None:
    assert len(ours) == len(right), f"{len(ours)} tensors, {len(right)} expected"
    for number, (x, y) in enumerate(zip(ours, right, strict=True)):
        if not y.is_floating_point():
            assert torch.equal(x.long(), y.long()), (
                f"tensor {number}: {int((x != y).sum())} of {y.numel()} ids are wrong"
            )
            continue
        real = y.isfinite()
        scale = float(y[real].square().mean().sqrt()) if real.any() else 0.0
        off = (x - y).abs() > tolerance * (scale + y.abs())
        wrong = torch.where(real, off | ~x.isfinite(), x.isfinite())
        if wrong.any():
            at = tuple(wrong.nonzero()[0].tolist())
            raise AssertionError(
                f"tensor {number} {tuple(y.shape)}: {int(wrong.sum())} elements are wrong, the first at {at}: "
                f"{float(x[at])}, right is {float(y[at])}, typical size {scale:.3g}; NaN: {int(x.isnan().sum())} "
                f"where {int(y.isnan().sum())} are right"
            )


def test_the_table_chooses_without_a_fault(device: str) -> None:
    """No kernel that is installed fails the quick check by which the table takes it."""
    faults = [
        f"{choice.operator}: {choice.reason}"
        for choice in table.choose(device).values()
        if "fails its check" in choice.reason
    ]
    assert not faults, "\n".join(faults)
