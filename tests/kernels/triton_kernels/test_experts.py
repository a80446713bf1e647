# SPDX-License-Identifier: Apache-2.0
"""The fused experts against fp64 and their twin, over every uneven load, in the interpreter and on a device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from drawn import HealthCheck, given, settings, st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vllm.kernels import ops, reference, table
from vllm.kernels.weights import PackedExperts

pytest.importorskip("triton.language", reason="triton is not installed")
from triton.runtime.interpreter import interpreter_builder

from vllm.kernels.triton import experts

NAN = float("nan")
SUM = 2e-6  # float32 summation, relative to the sum of magnitudes
SMALL = experts.Tiles(4, 8, 8, 1, 2)  # so that small shapes have several tiles in each direction


def between_nans(tensor: Tensor) -> Tensor:
    """The same values; what lies between the rows in memory is NaN."""
    wide = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 5), NAN)
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


def packed(weight_ENK: Tensor, gated: bool) -> PackedExperts:
    return PackedExperts(*weight_ENK.shape, weight_ENK.dtype, weight_ENK, "plain", gated)


def weights_of(E: int, I: int, D: int, dtype: torch.dtype, device: str = "cpu") -> tuple[PackedExperts, PackedExperts]:
    w13, w2 = (torch.randn(E, 2 * I, D) * D**-0.5).to(dtype), (torch.randn(E, D, I) * I**-0.5).to(dtype)
    return packed(between_nans(w13).to(device), True), packed(between_nans(w2).to(device), False)


def wanted(x: Tensor, w13: PackedExperts, w2: PackedExperts, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(sum over slots, sum of the magnitudes of what it sums) in fp64 on the CPU."""
    x, ids, weights = x.double().cpu(), ids.cpu(), weights.double().cpu()
    want, magnitude = torch.zeros_like(x), torch.zeros_like(x)
    for e in range(w13.E):
        token, slot = torch.where(ids == e)
        gate, up = (x[token] @ w13.data[e].double().cpu().T).chunk(2, -1)
        h, down = torch.nn.functional.silu(gate) * up, w2.data[e].double().cpu().T
        weight = weights[token, slot, None]
        want.index_add_(0, token, weight * (h @ down))
        magnitude.index_add_(0, token, weight.abs() * (h.abs() @ down.abs()))
    return want, magnitude


def assert_close(got: Tensor, want: Tensor, magnitude: Tensor) -> None:
    """Rounded to the dtype: gate and up in float32, h, y, the sum."""
    finfo = torch.finfo(got.dtype)
    off = (got.double().cpu() - want).abs()
    bound = finfo.eps * want.abs() + (SUM + 4 * finfo.eps) * magnitude + finfo.tiny
    assert (off <= bound).all(), f"off by {(off / bound).max():.2f} times the bound"


def poison_skipped(x: Tensor, ids: Tensor, weights: Tensor) -> None:
    weights[ids < 0] = NAN
    x[(ids < 0).all(dim=1)] = NAN


def check(device: str, dtype: torch.dtype, T: int, E: int, I: int, D: int, S: int, skip: float = 0.2) -> None:
    w13, w2 = weights_of(E, I, D, dtype, device)
    x, ids = torch.randn(T, D).to(dtype), torch.rand(T, E).topk(S).indices
    ids[torch.rand(T, S) < skip] = -1
    ids[T // 2 : T // 2 + (T > 1)] = -1
    weights = torch.rand(T, S)
    some = torch.arange(0, T, -(-T // 70))  # all of a few, else a sample: fp64 takes its time
    want, magnitude = wanted(x[some], w13, w2, ids[some], weights[some])
    twin = reference.fused_experts(x.cpu(), packed(w13.data.cpu(), True), packed(w2.data.cpu(), False), ids, weights)
    poison_skipped(x, ids, weights)
    x, ids, weights = between_nans(x).to(device), ids.to(device), weights.to(device)
    got = experts.fused_experts(x, w13, w2, ids, weights)
    assert got.dtype is dtype
    assert not got.isnan().any()
    assert got[(ids < 0).all(dim=1)].eq(0).all()
    assert_close(got[some.to(device)], want, magnitude)
    assert (got.cpu().double() - twin.double()).norm() <= 4 * torch.finfo(dtype).eps * twin.double().norm() + SUM
    room = x.new_full((T + 3, D + 2), 7)
    out = room[:T, :D]
    out.copy_(x)
    assert experts.fused_experts(out, w13, w2, ids.int(), weights, out=out) is out
    assert torch.equal(out, got)
    assert room[T:].eq(7).all()
    assert room[:, D:].eq(7).all()


@pytest.mark.parametrize(
    ("dtype", "T", "E", "I", "D", "S"),
    [
        (torch.float32, 1, 8, 24, 32, 2),
        (torch.float32, 70, 5, 40, 50, 3),
        (torch.bfloat16, 9, 3, 80, 72, 2),
        (torch.bfloat16, 70, 5, 140, 50, 3),
        (torch.bfloat16, 300, 4, 20, 24, 2),  # more pairs than the order is made of at a time
        (torch.float16, 40, 2, 24, 32, 1),
    ],
)
def test_experts_against_fp64(dtype, T, E, I, D, S, monkeypatch, nan_poison):
    tiles = experts._tiles
    monkeypatch.setattr(experts, "_tiles", lambda T, S, E, dtype, _: tiles(T, S, E, dtype, interpreted=False))
    check("cpu", dtype, T, E, I, D, S)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    E=st.integers(1, 4),
    I=st.integers(1, 9),
    D=st.integers(1, 17),
    S=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    index=st.sampled_from([torch.int32, torch.int64]),
)
def test_experts_of_any_shape(data, E, I, D, S, dtype, index, monkeypatch, nan_poison):
    """One expert may stand in several slots of a row; all slots may be skipped; any number of rows, none as well."""
    monkeypatch.setattr(experts, "_tiles", lambda *_: SMALL)
    rows = data.draw(st.lists(st.lists(st.integers(-1, E - 1), min_size=S, max_size=S), max_size=9))
    torch.manual_seed(len(rows))
    ids = torch.tensor(rows, dtype=index).view(-1, S)
    w13, w2 = weights_of(E, I, D, dtype)
    unused = [e for e in range(E) if not ids.eq(e).any()]
    x, weights = torch.randn(len(rows), D).to(dtype), torch.rand(len(rows), S) - 0.3
    want, magnitude = wanted(x, w13, w2, ids, weights)
    w13.data[unused], w2.data[unused] = NAN, NAN
    poison_skipped(x, ids, weights)
    got = experts.fused_experts(x, w13, w2, ids, weights)
    assert_close(got, want, magnitude)
    assert got[(ids < 0).all(dim=1)].eq(0).all()


@pytest.mark.parametrize("load", ["one expert", "first and last", "none", "no rows", "no experts", "beyond"])
def test_experts_under_uneven_loads(load, monkeypatch, nan_poison):
    monkeypatch.setattr(experts, "_tiles", lambda *_: SMALL)
    E, T, D = 0 if load == "no experts" else 6, 0 if load == "no rows" else 11, 18
    w13, w2 = weights_of(E, 9, D, torch.float32)
    x, weights = between_nans(torch.randn(T, D)), torch.rand(T, 2)
    ids = torch.full((T, 2), -1)
    if load == "one expert":
        ids[:] = 3
    if load == "first and last":
        ids[::3], ids[1::3, 1] = torch.tensor([E - 1, 0]), 0
    if load == "beyond":  # no expert of this rank: nobody's weights may be read
        ids[:, 0] = E
    want, magnitude = wanted(x, w13, w2, ids, weights)
    weights[ids < 0] = NAN
    got = experts.fused_experts(x, w13, w2, ids, weights, out=torch.full((T, D), NAN))
    assert_close(got, want, magnitude)
    assert got[want.eq(0).all(dim=1)].eq(0).all()


def gpt_oss(E: int, I: int, D: int) -> tuple[torch.nn.Module, list[Tensor]]:
    """transformers' experts, and their weights and biases as the operator takes them: w13, w2, b13, b2."""
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = GptOssConfig(num_local_experts=E, hidden_size=D, intermediate_size=I, num_attention_heads=1, head_dim=D)
    theirs = GptOssExperts(config).double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape))
        theirs.gate_up_proj.mul_(1.5)  # a tenth of the gates and ups are past 7
        halves = torch.cat((torch.arange(0, 2 * I, 2), torch.arange(1, 2 * I, 2)))
        w13, b13 = theirs.gate_up_proj.mT[:, halves], theirs.gate_up_proj_bias[:, halves]
        return theirs, [x.float().contiguous() for x in (w13, theirs.down_proj.mT, b13, theirs.down_proj_bias)]


@pytest.mark.parametrize("implementation", ["triton", "reference", "cpu"])
def test_biases_and_the_clamped_activation_are_gpt_oss(implementation, monkeypatch, nan_poison):
    """In fp32 against transformers in fp64; the down bias counts as often as its expert is chosen, and never in a row
    or slot that is skipped."""
    monkeypatch.setattr(experts, "_tiles", lambda *_: SMALL)
    E, I, D, T, S = 5, 11, 18, 9, 3
    theirs, (w13, w2, b13, b2) = gpt_oss(E, I, D)
    x, weights, ids = torch.randn(T, D), torch.rand(T, S), torch.rand(T, E).topk(S).indices
    ids[2], ids[5, 1] = -1, -1
    with torch.no_grad():
        given = ids.masked_fill(ids < 0, 0), weights.masked_fill(ids < 0, 0).double()
        want = theirs(x.double(), *given)
    poison_skipped(x, ids, weights)
    if implementation == "cpu":
        cpu = pytest.importorskip("vllm.kernels.cpu")
        packs, run = (cpu.pack_expert_weights(w13, True), cpu.pack_expert_weights(w2)), cpu.fused_experts
    else:
        packs = packed(w13, True), packed(w2, False)
        run = {"triton": experts, "reference": reference}[implementation].fused_experts
    got = run(x, *packs, ids, weights, None, b13, b2, "swigluoai")
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-4)
    assert got[2].eq(0).all()
    x[4] = NAN
    again = run(x, *packs, ids, weights, None, b13, b2, "swigluoai")
    assert again[4].isnan().all()
    assert again[torch.arange(T) != 4].isfinite().all()
    silu = run(x, *packs, ids, weights, None, b13, b2)
    torch.testing.assert_close(
        silu,
        reference.fused_experts(x, packed(w13, True), packed(w2, False), ids, weights, None, b13, b2),
        rtol=2e-5,
        atol=2e-5,
        equal_nan=True,
    )
    if implementation != "reference":
        with pytest.raises(AssertionError, match="needed contiguous float32"):
            run(x, *packs, ids, weights, None, b13[:, 1:], b2)


def test_no_program_works_without_rows(monkeypatch):
    """Rows that chose another rank's experts cost a look at the plan and no product."""
    monkeypatch.setattr(experts, "_tiles", lambda *_: SMALL)
    w13, w2 = weights_of(4, 8, 16, torch.float32)
    x, weights, ids = torch.randn(9, 16), torch.rand(9, 2), torch.full((9, 2), -1)
    products = []
    dot = interpreter_builder.create_dot
    monkeypatch.setattr(interpreter_builder, "create_dot", lambda *args: products.append(1) or dot(*args))
    experts.fused_experts(x, w13, w2, ids, weights)
    assert not products
    ids[5, 1] = 2
    experts.fused_experts(x, w13, w2, ids, weights)
    assert len(products) == 2 * 2 * 2 + 2  # gate and up, 2 columns, 2 steps; 2 columns of one step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_bitwise_its_own(dtype, monkeypatch, nan_poison):
    """Whatever the other rows are, where it stands and whom it shares a tile with."""

    def dot(a, b, total, *_):  # numpy's own depends on the place in the tile, a device's does not
        for k in range(a.data.shape[1]):
            total.data = total.data + a.data[:, k, None] * b.data[k]
        return total

    monkeypatch.setattr(interpreter_builder, "create_dot", dot)
    monkeypatch.setattr(experts, "_tiles", lambda *_: SMALL)
    E, I, D, S, T = 2, 9, 10, 2, 9
    w13, w2 = weights_of(E, I, D, dtype)
    x, ids, weights = torch.randn(T, D).to(dtype), torch.rand(T, E).topk(S).indices, torch.rand(T, S)
    ids[7], ids[5, 1] = -1, -1

    def run(rows):
        return experts.fused_experts(x[rows], w13, w2, ids[rows], weights[rows])

    got = run(torch.arange(T))
    order = torch.randperm(T)
    assert torch.equal(run(order), got[order])
    for t in (0, 5):
        assert torch.equal(run(torch.tensor([t])), got[t : t + 1])
    x[4] = NAN
    broken = run(torch.arange(T))
    assert broken[4].isnan().all()
    rest = torch.arange(T) != 4
    assert torch.equal(broken[rest], got[rest])


def test_slots_are_summed_in_their_order():
    """1 + 2^25 - 2^25 is 0 in float32, in any other order 1."""
    big = 2.0**25
    w13 = packed(torch.tensor([[64.0], [1 / 64]]).expand(3, 2, 1).contiguous(), True)  # silu(64) / 64 = 1
    w2 = packed(torch.tensor([1.0, big, -big]).view(3, 1, 1), False)
    ids = torch.tensor([[0, 1, 2], [1, 2, 0]])
    got = experts.fused_experts(torch.ones(2, 1), w13, w2, ids, torch.ones(2, 3))
    assert got.tolist() == [[0.0], [1.0]]


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_the_host_asks_the_device_nothing():
    w13, w2 = weights_of(4, 8, 16, torch.float32)
    with Calls() as calls:
        experts.fused_experts(torch.randn(5, 16), w13, w2, torch.randint(-1, 4, (5, 2)), torch.rand(5, 2))
    waits = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "_to_copy", "bincount"}
    assert not calls.seen & waits, calls.seen


def test_what_the_kernel_refuses():
    w13, w2 = weights_of(4, 16, 8, torch.float32)
    x, ids, weights = torch.randn(2, 8), torch.zeros(2, 1, dtype=torch.int64), torch.rand(2, 1)
    out = torch.full((2, 8), 7.0, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="float64"):
        experts.fused_experts(x.double(), w13, w2, ids, weights, out)
    assert out.eq(7).all()
    with pytest.raises(AssertionError, match=r"9.*8"):
        experts.fused_experts(torch.randn(2, 9), w13, w2, ids, weights)
    with pytest.raises(AssertionError, match="gated"):
        experts.fused_experts(x, w2, w2, ids, weights)
    with pytest.raises(AssertionError, match="float64"):
        experts.fused_experts(x, w13, w2, ids, weights.double())
    with pytest.raises(AssertionError, match="panels"):
        experts.fused_experts(x, PackedExperts(4, 32, 8, x.dtype, w13.data, "panels", True), w2, ids, weights)
    with pytest.raises(AssertionError, match=r"strides.*\(2, 1\)"):
        experts.fused_experts(torch.randn(8, 2).T, w13, w2, ids, weights)


def test_the_table_takes_the_kernel_and_its_refusals(monkeypatch, log):
    monkeypatch.setenv("VLLM_KERNELS", "fused_experts=triton")
    table.choose.cache_clear()
    assert table.choose("cpu")["fused_experts"].function is experts.fused_experts, "it failed the quick check"
    w13, w2 = torch.randn(3, 8, 6, dtype=torch.float64), torch.randn(3, 6, 4, dtype=torch.float64)
    packs = ops.pack_expert_weights(w13, gated=True), ops.pack_expert_weights(w2)
    x, ids = torch.randn(5, 6, dtype=torch.float64), torch.randint(-1, 3, (5, 2))
    weights = torch.rand(5, 2)
    got = ops.fused_experts(x, *packs, ids, weights)
    assert torch.equal(got, reference.fused_experts(x, *packs, ids, weights))
    assert "float64" in log.text


COMPILED = """
import sys, torch, compiling
from vllm.kernels.triton import experts
from vllm.kernels.weights import PackedExperts

capability, shared = map(int, sys.argv[1:])
experts.shared_memory = lambda device: shared

def call(dtype, T, E, I, D, S, index=torch.int32):
    empty = lambda *shape, dtype=dtype: torch.empty(*shape, dtype=dtype, device="meta")
    w13 = PackedExperts(E, 2 * I, D, dtype, empty(E, 2 * I, D), "plain", True)
    w2 = PackedExperts(E, D, I, dtype, empty(E, D, I), "plain", False)
    experts.fused_experts(empty(T, D), w13, w2, empty(T, S, dtype=index), empty(T, S, dtype=torch.float32))

for case in (
    (torch.bfloat16, 64, 64, 768, 2048, 8), (torch.bfloat16, 300, 64, 768, 2048, 8),
    (torch.bfloat16, 2048, 64, 768, 2048, 8), (torch.float16, 8192, 256, 96, 2080, 8, torch.int64),
    (torch.float32, 64, 64, 768, 2048, 8), (torch.float32, 1, 1, 1, 3, 1),
):
    for launch in compiling.launches(experts, lambda: call(*case)):
        kernel = compiling.compile_launch(launch, capability)
        name = launch.kernel.__name__
        print(case, name, launch.grid, launch.options, kernel.metadata.shared, flush=True)
        assert kernel.metadata.shared <= shared, (case, name)
        if name == "_product" and case[0] is not torch.float32:
            assert ("mma" in kernel.asm["ptx"]) and ("cp.async.cg" in kernel.asm["ptx"]), (case, name)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "shared"), [(80, 163 << 10), (89, 99 << 10), (90, 227 << 10)])
def test_experts_compile_for_cuda(capability, shared, tmp_path):
    """Every kind of tile fits a card's shared memory and keeps its matrix unit and its copies in flight busy."""
    here = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": f"{here.parents[2]}:{here}", "TRITON_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-W", "ignore", "-c", COMPILED, str(capability), str(shared)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
