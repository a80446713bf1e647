# SPDX-License-Identifier: Apache-2.0
"""The path over fla-core's kernels, with stand-ins that compute fla's documented contract in plain torch.

The kind of fault: states that are not those of the request. Slots are out of order, one has never run, one is padding.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from vllm.kernels import fla, packages, reference_gdn, table


def naive(q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float, initial_state: Any, cu_seqlens: Any) -> Any:
    """The gated delta rule, token by token, in fp64 (Yang et al. 2024): [1, T, H, E], states [N, H, D, E]."""
    q, k = (torch.nn.functional.normalize(x.double(), dim=-1) for x in (q, k))
    out, states = torch.empty_like(v, dtype=torch.float64), []
    for n, (first, last) in enumerate(zip(cu_seqlens.tolist()[:-1], cu_seqlens.tolist()[1:], strict=True)):
        s = initial_state[n].double().clone()
        for t in range(first, last):
            s = s * g[0, t].double().exp()[:, None, None]
            read = torch.einsum("hde,hd->he", s, k[0, t])
            update = (v[0, t].double() - read) * beta[0, t].double()[:, None]
            s = s + torch.einsum("hd,he->hde", k[0, t], update)
            out[0, t] = torch.einsum("hde,hd->he", s, q[0, t] * scale)
        states.append(s)
    return out.to(v.dtype), torch.stack(states).float()


@pytest.fixture
def fla_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []

    def kernel(name: str) -> Any:
        def run(q: Any, k: Any, v: Any, *, output_final_state: bool, use_qk_l2norm_in_kernel: bool, **rest: Any) -> Any:
            assert output_final_state
            assert use_qk_l2norm_in_kernel
            calls.append(name)
            return naive(q, k, v, **rest)

        return run

    names = ("fused_recurrent_gated_delta_rule", "chunk_gated_delta_rule")
    stand_in = types.SimpleNamespace(**{name: kernel(name) for name in names})
    monkeypatch.setattr(fla, "kernel_package", lambda module: stand_in)
    return calls


def inputs(lengths: list[int], heads: tuple[int, int] = (2, 4), size: int = 8) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(sum(lengths))
    T, (G, H) = sum(lengths), heads

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return noise(T, G, size), noise(T, G, size), noise(T, H, size), -noise(T, H).exp(), noise(T, H).sigmoid()


@pytest.mark.parametrize(
    ("lengths", "kernel"),
    [([5, 1, 7], "chunk_gated_delta_rule"), ([1, 1, 1], "fused_recurrent_gated_delta_rule")],
)
def test_each_request_gets_and_leaves_its_own_state(lengths: list[int], kernel: str, fla_calls: list[str]) -> None:
    slots = [4, 1, 3]
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    args = inputs(lengths)
    state = torch.randn(6, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    before = state.clone()
    out = fla.gated_delta_rule(
        *args, state, torch.tensor(starts, dtype=torch.int32), torch.tensor(slots, dtype=torch.int32)
    )
    assert fla_calls == [kernel]
    for i, slot in enumerate(slots):
        rows = slice(starts[i], starts[i + 1])
        q, k, v, g, beta = (x[None, rows] for x in args)
        q, k = (x.repeat_interleave(2, 2) for x in (q, k))
        expected, final = naive(q, k, v, g, beta, 8**-0.5, before[slot : slot + 1], torch.tensor([0, lengths[i]]))
        torch.testing.assert_close(out[rows], expected[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(state[slot], final[0], rtol=1e-5, atol=1e-6)
    for slot in (0, 2, 5):
        assert torch.equal(state[slot], before[slot]), f"slot {slot} belongs to nobody in this step"


def test_pad_rows_and_pad_requests_reach_no_kernel(fla_calls: list[str]) -> None:
    q, k, v, g, beta = (torch.cat([x, torch.full_like(x[:2], torch.nan)]) for x in inputs([3]))
    state = torch.randn(3, 4, 8, 8)
    before = state.clone()
    out = fla.gated_delta_rule(
        q, k, v, g, beta, state,
        torch.tensor([0, 3, 3], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32),
    )  # fmt: skip
    assert out.isfinite().all()
    assert (out[3:] == 0).all()
    assert torch.equal(state[:2], before[:2])
    assert not torch.equal(state[2], before[2])


def test_the_twins_leave_the_pad_slot_alone() -> None:
    """A pad request may have rows, where a kernel wants its padding as a sequence: slot 0 keeps its bytes."""
    q, k, v, g, beta = inputs([3, 2])
    starts, slots = torch.tensor([0, 3, 5], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32)
    state, conv_state = torch.full((3, 4, 8, 8), torch.nan), torch.full((3, 3, 6), torch.nan)
    state[2], conv_state[2] = 0, 0
    out = reference_gdn.gated_delta_rule_ref(q, k, v, g, beta, state, starts, slots)
    y = reference_gdn.causal_conv1d_ref(torch.randn(5, 6), torch.randn(4, 6), conv_state, starts, slots)
    for rows, states in ((out, state), (y, conv_state)):
        assert rows[:3].isfinite().all()
        assert (rows[3:] == 0).all()
        assert states[:2].isnan().all()
        assert states[2].isfinite().all()


@pytest.mark.parametrize("error", [ImportError("libsycl.so.9: no such file"), OSError("bad ELF header")])
def test_a_missing_or_broken_kernel_package_is_told_once(
    error: Exception, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    tried: list[str] = []

    def fail(name: str) -> Any:
        tried.append(name)
        raise error

    monkeypatch.setattr(packages.importlib, "import_module", fail)
    packages.kernel_package.cache_clear()
    try:
        for _ in range(30):
            assert table.why_not("xpu", "xpu") is not None
            assert table.why_not("fla", "cuda") is not None
    finally:
        packages.kernel_package.cache_clear()
    assert tried == ["vllm_xpu_kernels._xpu_C", "fla.ops.gated_delta_rule"]
    assert [str(error) in record.getMessage() for record in log.records] == [True, True]
