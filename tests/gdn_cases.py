# SPDX-License-Identifier: Apache-2.0
"""Batches for the gated delta net, and the check of what an implementation makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm.kernels.reference_gdn import gated_delta_net_ref
from vllm.kernels.weights import GDNWeights

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of 1 + |value|: the output's rounding


@dataclass(frozen=True)
class Case:
    x: torch.Tensor
    weights: GDNWeights
    conv_state: torch.Tensor
    state: torch.Tensor
    query_start_loc: torch.Tensor
    slots: torch.Tensor

    def fresh(self, device: Any = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
        names = ("conv_weight_KC", "decay_rate_H", "dt_bias_H", "norm_weight_E")
        weights = replace(self.weights, **{name: getattr(self.weights, name).to(device) for name in names})
        tables = self.query_start_loc.to(device), self.slots.to(device)
        states = self.conv_state.to(device, copy=True), self.state.to(device, dtype, copy=True)
        return self.x.to(device), weights, *states, *tables


def make_case(
    shape: tuple[int, ...], dtype: torch.dtype, lengths: list[int], slots: list[int], num_pads: int, seed: int = 0
) -> Case:
    """Requests of ``lengths`` in ``slots`` of 0 to len + 1. Pad rows at the end and foreign slots are NaN, the pad slot
    and the rows of its requests something else, so that a write shows."""
    G, H, D, E, K = shape
    generator = torch.Generator().manual_seed(seed)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    C, real, pool = 2 * G * D + H * E, sum(lengths), len(lengths) + 2
    weights = GDNWeights(0.5 * randn(K, C), randn(H).exp(), randn(H), randn(E), 1e-6, G, D)
    x = torch.full((real + num_pads, C + H * E + 2 * H + 3), float("nan"), dtype=dtype)[:, :-3]  # rows are not dense
    conv_state = torch.full((pool, K - 1, C), float("nan"), dtype=dtype)
    state = torch.full((pool, H, D, E), float("nan"))
    starts = [0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()]
    conv_state[0], state[0] = 7.0, 7.0
    for r, slot in enumerate(slots):
        x[starts[r] : starts[r + 1]] = randn(lengths[r], x.shape[1])
        if slot > 0:
            conv_state[slot], state[slot] = randn(K - 1, C), 0.3 * randn(H, D, E)
    tables = torch.tensor(starts, dtype=torch.int32), torch.tensor(slots, dtype=torch.int32)
    return Case(x, weights, conv_state, state, *tables)


def close(actual: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    error = ((actual.double() - exact).abs() / (1 + exact.abs())).max().item() if exact.numel() else 0.0
    assert error <= tolerance, f"relative error {error:.2e}, allowed {tolerance:.0e}"


def check(case: Case, run: Callable[..., torch.Tensor], device: Any = "cpu", roundings: int = 1) -> None:
    """Output and states are the definition's, pad rows 0, and no other byte of the pools changes.

    ``roundings``: how often ``run`` rounds to x's dtype on the way to the output, and to the states where more than 1.
    """
    dtype = case.x.dtype
    exact_args, args = case.fresh(dtype=torch.float64), case.fresh(device)
    exact = gated_delta_net_ref(*exact_args[:-1], case.slots.clamp(min=0))
    out = run(*args, case.query_start_loc)
    assert out.dtype is dtype
    close(out.cpu(), exact.double(), roundings * TOLERANCE[dtype])
    rows = torch.repeat_interleave(case.slots, case.query_start_loc.diff())
    dead = torch.ones(out.shape[0], dtype=torch.bool)
    dead[: len(rows)] = rows <= 0
    assert out.cpu()[dead].count_nonzero() == 0
    own = [
        slot
        for slot, n in zip(case.slots.tolist(), case.query_start_loc.diff().tolist(), strict=True)
        if n and slot > 0
    ]
    conv_state, state = args[2].cpu(), args[3].cpu()
    assert torch.equal(conv_state[own], exact_args[2][own]), "convolution states are copies of inputs"
    close(state[own], exact_args[3][own], 1e-5 if roundings == 1 else TOLERANCE[dtype])
    for slot in set(range(len(state))) - set(own):
        for pool, before in ((conv_state, case.conv_state), (state, case.state)):
            assert torch.equal(pool[slot].nan_to_num(-9.0), before[slot].nan_to_num(-9.0)), f"slot {slot} changed"
