# SPDX-License-Identifier: Apache-2.0
"""The path over fla-core's kernel, with a stand-in that computes fla's documented contract in plain torch.

The kind of fault: states that are not those of the request. Slots are out of order, one has never run, one is padding.
"""

from __future__ import annotations

import itertools
import types
from typing import Any

import pytest
import torch
from gdn_cases import check, make_case

pytest.importorskip("triton")
from vllm.kernels import fla, packages, reference_gdn, table
from vllm.kernels.triton import gdn, norms


def naive(q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float, initial_state: Any, cu_seqlens: Any) -> Any:
    """The gated delta rule, token by token, in fp64 (Yang et al. 2024): [1, T, H, E], states [N, H, D, E]."""
    q, k = (torch.nn.functional.normalize(x.double(), dim=-1) for x in (q, k))
    out, states = torch.empty_like(v, dtype=torch.float64), []
    for n, (first, last) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
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
def fla_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The tensors of starts that the stand-in of the chunked kernel was given."""
    calls: list[Any] = []

    def chunk_gated_delta_rule(
        q: Any,
        k: Any,
        v: Any,
        *,
        output_final_state: bool,
        use_qk_l2norm_in_kernel: bool,
        chunk_indices: Any,
        **rest: Any,
    ) -> Any:
        assert output_final_state
        assert use_qk_l2norm_in_kernel
        assert q.dtype is k.dtype is v.dtype
        starts, rows = rest["cu_seqlens"], q.shape[1]
        assert int(starts[-1]) == rows == v.shape[1] == rest["g"].shape[1], "all rows are some request's"
        assert all(starts is not before for before in calls), (
            "what was derived from the last step's would be used again"
        )
        chunks = [(n, c) for n, length in enumerate(starts.diff().tolist()) for c in range(-(-length // 64))]
        assert [tuple(pair) for pair in chunk_indices.tolist()] == chunks
        calls.append(starts)
        return naive(q, k, v, **rest)

    stand_in = types.SimpleNamespace(chunk_gated_delta_rule=chunk_gated_delta_rule)
    monkeypatch.setattr(fla, "kernel_package", lambda module: stand_in)
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("lengths", "slots", "calls"),
    [
        ([5, 1, 70, 0, 0], [4, 1, 3, 0, 0], 1),
        ([3, 2], [2, 0], 1),
        ([2, 1, 3], [0, 3, 0], 1),
        ([0, 2, 0, 1], [1, 2, 0, 4], 1),
        ([1, 1, 1, 0], [4, 1, 3, 0], 0),
        ([], [], 0),
        ([0, 0], [0, 0], 0),
    ],
)
@pytest.mark.usefixtures("nan_poison")
def test_each_request_gets_and_leaves_its_own_state(
    lengths: list[int], slots: list[int], calls: int, dtype: torch.dtype, fla_calls: list[Any]
) -> None:
    """Prompts by the chunked kernel, decodes by the recurrent one; requests on the pad slot may have rows."""
    case = make_case((1, 2, 8, 4, 4), dtype, lengths, slots, num_pads=3)
    check(case, fla.gated_delta_net, roundings=2)
    assert len(fla_calls) == calls


def test_a_step_has_starts_of_its_own(fla_calls: list[Any]) -> None:
    case = make_case((1, 2, 4, 4, 4), torch.float32, [3], [1], num_pads=0)
    args = case.fresh()
    for _ in range(2):
        fla.gated_delta_net(*args, case.query_start_loc)
    assert len(fla_calls) == 2


def test_the_host_asks_the_device_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without values; only the host's copy of query_start_loc has some."""
    kernel = lambda q, k, v, initial_state, **_: (torch.empty_like(v), torch.empty_like(initial_state))  # noqa: E731
    monkeypatch.setattr(fla, "kernel_package", lambda _: types.SimpleNamespace(chunk_gated_delta_rule=kernel))
    monkeypatch.setattr(gdn, "causal_conv1d", lambda x, *_: torch.empty_like(x))
    monkeypatch.setattr(norms, "rms_norm_gated", lambda x, *_: torch.empty_like(x))
    case = make_case((1, 2, 4, 4, 4), torch.bfloat16, [3, 1, 0], [2, 1, 0], num_pads=1)
    assert fla.gated_delta_net(*case.fresh("meta"), case.query_start_loc).shape == (5, 8)


def inputs(lengths: list[int], heads: tuple[int, int] = (2, 4), size: int = 8) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(sum(lengths))
    T, (G, H) = sum(lengths), heads

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return noise(T, G, size), noise(T, G, size), noise(T, H, size), -noise(T, H).exp(), noise(T, H).sigmoid()


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
