# SPDX-License-Identifier: Apache-2.0
"""The gated delta net in Triton against its definition in fp64: in the interpreter at small sizes, on a device at real
ones. Pad rows, the pad slot, foreign slots and fresh memory are NaN."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import given, settings, st
from gdn_cases import check, make_case

pytest.importorskip("triton")
from row_cases import interpreted

from vllm.kernels import checks
from vllm.kernels.triton import gdn

SMALL = [(2, 4, 16, 16, 4), (1, 3, 7, 5, 2), (1, 1, 128, 40, 4)]  # key heads, value heads, D, E, taps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SMALL)
@pytest.mark.usefixtures("nan_poison")
def test_against_the_definition(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(make_case(shape, dtype, [1, 4, 2, 0], [4, 1, 3, 0], num_pads=3), gdn.gated_delta_net)


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from([(1, 1), (1, 2), (2, 2)]),
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4)),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=3),
    st.integers(0, 2),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_batch(heads: Any, sizes: Any, requests: list[tuple[int, int]], num_pads: int, dtype: torch.dtype) -> None:
    """Requests without rows, in a slot of their own in any order, in the pad slot, or in slot -1."""
    slots = [{0: 0, 1: -1}.get(kind, len(requests) - r) for r, (_, kind) in enumerate(requests)]
    check(
        make_case((*heads, *sizes), dtype, [n for n, _ in requests], slots, num_pads, seed=sum(sizes)),
        gdn.gated_delta_net,
    )


@pytest.mark.usefixtures("nan_poison")
def test_a_long_request_is_convolved_in_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gdn, "_SEGMENT", 8)
    check(make_case((1, 1, 4, 4, 4), torch.float32, [9, 17], [2, 1], num_pads=1), gdn.gated_delta_net)


def test_bitwise_the_same_however_tokens_are_cut_and_in_any_batch() -> None:
    case = make_case((1, 2, 8, 8, 4), torch.bfloat16, [5, 2], [2, 1], num_pads=0)
    mixed_args, args = case.fresh(), case.fresh()
    mixed = gdn.gated_delta_net(*mixed_args)
    for begin, end, request in ((0, 1, 0), (1, 3, 0), (3, 5, 0), (5, 7, 1)):
        start = torch.tensor([0, end - begin], dtype=torch.int32)
        part = gdn.gated_delta_net(args[0][begin:end], *args[1:4], start, args[5][request : request + 1])
        assert torch.equal(part, mixed[begin:end])
    for after, whole in zip(args[2:4], mixed_args[2:4], strict=True):
        assert torch.equal(after[1:3], whole[1:3])


@interpreted("overflow encountered in exp")  # of what a sigmoid makes 0
def test_extreme_gates_and_inputs() -> None:
    """Decay from 1 to underflow, steps from 0 to 1, inputs of 1e4 and exactly 0: finite, and the definition's."""
    case = make_case((1, 4, 8, 8, 4), torch.float32, [6], [1], num_pads=0)
    case.x[:, -8:] = torch.tensor([-100.0, -5.0, 5.0, 100.0]).repeat(2)
    case.x[2] *= 1e4
    case.x[3] = 0
    weights = replace(case.weights, decay_rate_H=torch.tensor([1e-4, 1.0, 16.0, 1.0]))
    check(replace(case, weights=weights), gdn.gated_delta_net)


@pytest.mark.parametrize(("D", "E", "dtype"), [(257, 8, torch.float32), (8, 300, torch.float32), (8, 8, torch.float64)])
def test_what_the_kernel_cannot_take_is_said_before_anything_is_written(D: int, E: int, dtype: torch.dtype) -> None:
    case = make_case((1, 1, D, E, 4), dtype, [1], [1], num_pads=0)
    args = case.fresh()
    with pytest.raises(NotImplementedError, match=f"{D} and {E} in {dtype}"):
        gdn.gated_delta_net(*args)
    assert torch.equal(args[2][1], case.conv_state[1])
    assert torch.equal(args[3][1], case.state[1])


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_a_step_without_requests(lengths: list[int]) -> None:
    check(make_case((1, 2, 4, 4, 4), torch.float32, lengths, [0] * len(lengths), num_pads=3), gdn.gated_delta_net)


def test_the_host_never_asks_for_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without values, kernels that do nothing: what reads a value raises."""

    class Kernel:
        launches = 0

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            assert all(type(size) is int and size > 0 for size in grid)
            return self

        def __call__(self, *args: Any, **options: Any) -> None:
            Kernel.launches += 1

    for name in ("_conv_kernel", "_recurrent_kernel"):
        monkeypatch.setattr(gdn, name, Kernel())
    case = make_case((1, 2, 4, 4, 4), torch.bfloat16, [3, 1], [2, 1], num_pads=1)
    assert gdn.gated_delta_net(*case.fresh("meta")).shape == (5, 8)
    assert Kernel.launches == 2


def test_the_tables_check_passes() -> None:
    assert checks.failure("gated_delta_net", gdn.gated_delta_net, "cpu") is None


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from vllm.kernels.triton import gdn

def build(kernel, arguments, constants):
    types = dict(zip(kernel.arg_names, arguments.split() + ["constexpr"] * len(constants), strict=True))
    source = ASTSource(kernel, types, dict(zip(((i,) for i in range(len(arguments.split()), 99)), constants)))
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    print(kernel.__name__, len(made.asm["cubin"]), made.asm["ptx"].count("ld.local"))

build(gdn._conv_kernel, "*bf16 i32 *fp32 *bf16 *i32 *i32 i32 *fp32 i32", (4, 4, 8, 256, 512))
build(
    gdn._recurrent_kernel,
    "*fp32 *bf16 i32 *fp32 *fp32 *fp32 fp32 *fp32 *i32 *i32 i32 *bf16 fp32",
    (16, 32, 128, 128, 128, 32, 128),
)
"""


def test_compiles_for_a_card_without_one(tmp_path: Path) -> None:
    """Triton's compiler takes what its interpreter took, to the card's machine code, and nothing spills."""
    pytest.importorskip("triton.backends.nvidia.compiler")
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    built = [line.split() for line in done.stdout.splitlines()]
    assert [(name, spills) for name, _, spills in built] == [("_conv_kernel", "0"), ("_recurrent_kernel", "0")]
