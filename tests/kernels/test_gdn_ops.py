# SPDX-License-Identifier: Apache-2.0
"""The gated delta net against its definition in fp64, and what it must leave alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from vllm.kernels import ops, padding
from vllm.kernels import reference_gdn as ref
from vllm.kernels.weights import GDNWeights

# key heads, value heads, key head size, value head size, convolution taps
SHAPES = [
    (2, 4, 16, 16, 4),
    (1, 3, 32, 32, 4),
    (2, 4, 64, 64, 4),
    (4, 8, 128, 128, 4),
    (2, 2, 20, 40, 3),
    (1, 2, 7, 5, 2),
]
LENGTHS = (1, 70, 3, 1, 129, 33)
SLOTS = 10


@dataclass(frozen=True)
class Case:
    """A mixed batch with pad requests before its pad rows; pad rows and foreign slots are NaN."""

    x: torch.Tensor
    weights: GDNWeights
    conv_state: torch.Tensor
    state: torch.Tensor
    query_start_loc: torch.Tensor
    slots: torch.Tensor

    def fresh(self, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
        return (
            self.x,
            self.weights,
            self.conv_state.clone(),
            self.state.to(dtype, copy=True),
            self.query_start_loc,
            self.slots,
        )


def make_case(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, lengths: tuple[int, ...] = LENGTHS, num_pads: int = 5
) -> Case:
    G, H, D, E, K = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    C = 2 * G * D + H * E
    conv_weight = (0.5 * randn(K, C)).to(dtype).float()  # as a checkpoint of that dtype holds it
    weights = GDNWeights(conv_weight, randn(H).exp(), randn(H), randn(E), 1e-6, G, D)
    real = sum(lengths)
    x = torch.full((real + num_pads, C + H * E + 2 * H), float("nan"), dtype=dtype)
    x[:real] = randn(real, x.shape[1])
    slots = torch.tensor([*range(2, 2 + len(lengths)), 0, 0], dtype=torch.int32)
    conv_state = torch.full((SLOTS, K - 1, C), float("nan"), dtype=dtype)
    state = torch.full((SLOTS, H, D, E), float("nan"))
    own = slots[: len(lengths)]
    conv_state[own], state[own] = randn(len(lengths), K - 1, C).to(dtype), 0.3 * randn(len(lengths), H, D, E)
    query_start_loc = torch.tensor([0, *lengths, 0, 0]).cumsum(0).to(torch.int32)
    return Case(x, weights, conv_state, state, query_start_loc, slots)


def run_chunked(*args: Any) -> torch.Tensor:
    return ref.gated_delta_net_ref(*args, dtype=torch.float32, rule=ref.delta_rule_chunked)


IMPLEMENTATIONS = {"kernel": ops.gated_delta_net, "chunked": run_chunked}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # relative to 1 + |value|: a rounding


def close(actual: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    error = ((actual.double() - exact.double()).abs() / (1 + exact.double().abs())).max().item()
    assert error <= tolerance, f"relative error {error:.2e}, allowed {tolerance:.0e}"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", IMPLEMENTATIONS)
@pytest.mark.usefixtures("nan_poison")
def test_against_the_definition(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    case = make_case(shape, dtype)
    real, own = int(case.query_start_loc[-1]), case.slots[: len(LENGTHS)]
    exact_args, args = case.fresh(torch.float64), case.fresh()
    exact = ref.gated_delta_net_ref(*exact_args)
    out = IMPLEMENTATIONS[kind](*args)
    assert out.dtype is dtype
    close(out[:real], exact[:real], TOLERANCE[dtype] * (2 if kind == "chunked" else 1))
    assert out[real:].count_nonzero() == 0
    close(args[3][own], exact_args[3][own], 1e-5)
    assert torch.equal(args[2][own], exact_args[2][own]), "convolution states are copies of inputs"
    foreign = [slot for slot in range(SLOTS) if slot not in own.tolist()]
    assert args[2][foreign].isnan().all()
    assert args[3][foreign].isnan().all()


def test_the_definition_is_transformers_recurrence() -> None:
    G, H, D, E, K = 2, 4, 16, 24, 4
    case = make_case((G, H, D, E, K), lengths=(40,), num_pads=0)
    w = replace(case.weights, norm_weight_E=torch.ones(E))
    conv_state, state = torch.zeros_like(case.conv_state), torch.zeros_like(case.state, dtype=torch.float64)
    ref.gated_delta_net_ref(case.x, w, conv_state, state, case.query_start_loc, case.slots)
    mixed, _, b, a = w.split(case.x)
    y = F.silu(F.conv1d(mixed.T[None], w.conv_weight_KC.T[:, None], padding=K - 1, groups=w.conv_dim)[0, :, :40]).T
    q, k, v = y.split([G * D, G * D, H * E], dim=-1)
    g = -w.decay_rate_H * F.softplus(a + w.dt_bias_H)
    heads = [part.unflatten(-1, (n, -1))[None] for part, n in ((q, G), (k, G), (v, H))]
    _, final = theirs.torch_recurrent_gated_delta_rule(
        *heads, g=g[None], beta=b.sigmoid()[None], output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    close(final[0], state[2], 1e-5)
    assert torch.equal(conv_state[2], mixed[-(K - 1) :])


@pytest.mark.parametrize("chunk", [1, 3, 64, 65])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_kernel_is_bitwise_the_same_however_tokens_are_cut(dtype: torch.dtype, chunk: int) -> None:
    case = make_case((2, 4, 64, 72, 4), dtype, lengths=(150,), num_pads=0)
    whole_args, args = case.fresh(), case.fresh()
    whole = ops.gated_delta_net(*whole_args)
    slots = case.slots[:1]
    parts = [
        ops.gated_delta_net(rows, *args[1:4], torch.tensor([0, len(rows)], dtype=torch.int32), slots)
        for rows in case.x.split(chunk)
    ]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(args[2][2], whole_args[2][2])
    assert torch.equal(args[3][2], whole_args[3][2])


def test_kernel_is_bitwise_the_same_in_any_batch_and_on_any_threads() -> None:
    case = make_case((2, 4, 32, 32, 4), torch.bfloat16)
    mixed = ops.gated_delta_net(*case.fresh())
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(ops.gated_delta_net(*case.fresh()), mixed)
    finally:
        torch.set_num_threads(threads)
    starts = case.query_start_loc.tolist()
    args = case.fresh()
    for r in reversed(range(len(LENGTHS))):
        rows = case.x[starts[r] : starts[r + 1]]
        start = torch.tensor([0, len(rows)], dtype=torch.int32)
        alone = ops.gated_delta_net(rows, *args[1:4], start, case.slots[r : r + 1])
        assert torch.equal(alone, mixed[starts[r] : starts[r + 1]])


@pytest.mark.parametrize(("actual", "padded"), [(1, 4), (3, 4), (5, 8)])
@pytest.mark.parametrize("kind", IMPLEMENTATIONS)
@pytest.mark.usefixtures("nan_poison")
def test_case_20_right_prefix_and_zero_tail(kind: str, actual: int, padded: int) -> None:
    """Decodes and one prefill, outputs NaN before the call."""
    for lengths in ((1,) * actual, (actual,)):
        case = make_case((2, 4, 16, 16, 4), lengths=lengths, num_pads=padded - actual)
        exact = ref.gated_delta_net_ref(*case.fresh(torch.float64))
        out = IMPLEMENTATIONS[kind](*case.fresh())
        close(out[:actual], exact[:actual], 2e-5)
        assert out.shape[0] == padded
        assert out[actual:].count_nonzero() == 0


@pytest.mark.parametrize("kind", ["kernel", "chunked"])
def test_an_explicit_pad_sequence_is_skipped(kind: str) -> None:
    """Pad rows as a sequence of their own on the pad slot, for kernels that want query_start_loc to cover all rows."""
    case = make_case((2, 4, 16, 16, 4), lengths=(7, 4), num_pads=0)
    slots = case.slots.clone()
    slots[1] = padding.PAD_STATE_SLOT
    args = (*case.fresh()[:5], slots)
    out = IMPLEMENTATIONS[kind](*args)
    assert out[7:].count_nonzero() == 0
    assert out[:7].isfinite().all()
    assert args[3][0].isnan().all()
    assert torch.equal(args[3][3], case.state[3])


def test_no_requests_at_all() -> None:
    """A dummy step: pad requests only."""
    case = make_case((2, 4, 16, 16, 4), lengths=(), num_pads=4)
    for kind in ("kernel", "chunked"):
        args = case.fresh()
        assert IMPLEMENTATIONS[kind](*args).count_nonzero() == 0
        assert args[2].isnan().all()
        assert args[3].isnan().all()


def test_extreme_gates_and_inputs() -> None:
    """Decay from 1 to underflow, steps from 0 to 1, inputs up to 1e4 and exactly 0: finite, and the definition's."""
    case = make_case((2, 4, 32, 32, 4), lengths=(100, 1), num_pads=0)
    H = case.weights.num_v_heads
    case.x[:, -2 * H :] = torch.tensor([-100.0, -5.0, 5.0, 100.0]).repeat(2)
    case.x[10:20] *= 1e4
    case.x[20:30] = 0
    weights = replace(case.weights, decay_rate_H=torch.tensor([1e-4, 1.0, 16.0, 1.0]))
    case = replace(case, weights=weights)
    exact_args, args = case.fresh(torch.float64), case.fresh()
    exact, out = ref.gated_delta_net_ref(*exact_args), ops.gated_delta_net(*args)
    assert out.isfinite().all()
    close(out, exact, 1e-4)
    close(args[3][2:4], exact_args[3][2:4], 1e-4)


@pytest.mark.parametrize(
    ("starts", "slots"),
    [([0, 5, 4], [1, 2]), ([0, 5, 9], [1, 2]), ([0, 5, 8], [1, SLOTS]), ([0, 5, 8], [-1, 2]), ([1, 5, 8], [1, 2])],
)
def test_tables_that_do_not_fit_are_refused(starts: list[int], slots: list[int]) -> None:
    case = make_case((2, 4, 16, 16, 4), lengths=(5, 3), num_pads=0)
    tables = torch.tensor(starts, dtype=torch.int32), torch.tensor(slots, dtype=torch.int32)
    with pytest.raises(AssertionError, match="do not fit"):
        ops.gated_delta_net(*case.fresh()[:4], *tables)
