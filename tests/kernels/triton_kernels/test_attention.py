# SPDX-License-Identifier: Apache-2.0
"""Paged attention against fp64 and its twin, with NaN wherever nothing may be read, in the interpreter and on a device.

Error bounds: float32 sums as in ``test_cpu_ops``, scores below 8; one rounding to the dtype, where the interpreter cuts
off; on a device the weights are rounded to a narrow dtype before they meet the values.
"""

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

pytest.importorskip("triton", reason="triton is not installed")

from row_cases import interpreted

from vllm.kernels import ops, reference, table
from vllm.kernels.triton import attention
from vllm.kernels.triton.attention import Plan

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SUM = 2e-6  # float32 summation, relative to the sum of magnitudes
NAN = float("nan")


def between_nans(T: int, H: int, D: int, dtype: torch.dtype, device: str) -> Tensor:
    """NaN [T, H, D], a view into wider rows."""
    return torch.full((T, H * D + 16), NAN, dtype=dtype, device=device)[:, : H * D].view(T, H, D)


class Case:
    """Requests over a cache whose unwritten slots are NaN, as are the null block, the rows of padding, and those out of
    every query's window. A request of length 0 has queries that nobody answers. ``scales``: of a float8 cache."""

    def __init__(
        self, lens, queries, H, J, D, block_size=16, dtype=torch.float32, *, DV=None, pad_rows=0, window=0,
        sinks=False, soft_cap=0.0, latent=False, device="cpu", seed=0, keep=None, scales=None,
    ):  # fmt: skip
        g = torch.Generator().manual_seed(seed)
        DV = D if DV is None else DV
        self.lens, self.queries, self.J, self.DV, self.device = lens, queries, J, DV, device
        self.window, self.soft_cap, self.scale, self.pad_rows = window, soft_cap, D**-0.5, pad_rows
        needed = [-(-length // block_size) for length in lens]
        blocks, R, T = 1 + sum(needed), len(lens), sum(queries) + pad_rows
        cached = torch.float8_e4m3fn if scales else dtype
        raw = torch.uint8 if scales else dtype
        keys = torch.full((blocks, J, block_size, D), NAN, dtype=cached)
        values = keys[..., :DV] if latent else torch.full((blocks, J, block_size, DV), NAN, dtype=cached)
        blocks_of = torch.zeros(R, max([*needed, 1]) + 2, dtype=torch.int32)
        ids = 1 + torch.randperm(blocks - 1, generator=g).int()
        self.k = [torch.randn(n, J, D, generator=g).to(cached) for n in lens]
        self.v = [k[..., :DV] if latent else torch.randn(len(k), J, DV, generator=g).to(cached) for k in self.k]
        self.scales = scales or (1.0, 1.0)
        for r, n in enumerate(needed):
            blocks_of[r, :n], ids = ids[:n], ids[n:]
            seen = torch.arange(max(lens[r] - queries[r] + 1 - window, 0) if window else 0, lens[r])
            block, offset = blocks_of[r, seen // block_size].long(), seen % block_size
            for cache, of in ((keys, self.k), (values, self.v)):
                cache.view(raw)[block, :, offset] = of[r].view(raw)[seen]
        self.sinks = torch.randn(H, generator=g).to(dtype) if sinks else None
        self.q = between_nans(T, H, D, dtype, "cpu")
        self.q[: T - pad_rows] = torch.randn(T - pad_rows, H, D, generator=g).to(dtype)
        self.start = torch.tensor([0, *queries]).cumsum(0).int()
        self.key_cache = keys.to(device)
        self.value_cache = self.key_cache[..., :DV] if latent else values.to(device)
        self.table = blocks_of.to(device)

    def run(self, operator=attention.paged_attention, num_reqs=None, q=None, fill=NAN) -> Tensor:
        q = self.q if q is None else q
        out = between_nans(*q.shape[:2], self.DV, q.dtype, self.device)
        beside = out.as_strided((len(q), 16), (out.stride(0), 1), q.shape[1] * self.DV)
        out.fill_(fill)
        wide = between_nans(*q.shape, q.dtype, self.device)
        wide.copy_(q)
        lens = torch.tensor(self.lens, dtype=torch.int32).to(self.device)
        sinks = None if self.sinks is None else self.sinks.to(self.device)
        operator(
            wide, self.key_cache, self.value_cache, self.table, self.start.to(self.device), lens, self.scale, out,
            self.window, num_reqs, sinks, self.soft_cap, None, None, *self.scales,
        )  # fmt: skip
        assert beside.isnan().all()
        return out.cpu()

    def want(self) -> tuple[Tensor, Tensor]:
        """(reference in fp64, weighted magnitudes of the values); unanswered rows are NaN, padding is 0."""
        want = torch.zeros(len(self.q), self.q.shape[1], self.DV, dtype=torch.float64)
        magnitude = want.clone()
        for r, (length, n) in enumerate(zip(self.lens, self.queries, strict=True)):
            rows = slice(int(self.start[r]), int(self.start[r + 1]))
            if length == 0:
                want[rows] = NAN
                continue
            q = self.q[rows].double()
            k, v = (
                (x[r].double() * scale).repeat_interleave(q.shape[1] // self.J, dim=1)
                for x, scale in zip((self.k, self.v), self.scales, strict=True)
            )
            scores = torch.einsum("qhd,khd->hqk", q, k) * self.scale
            if self.soft_cap:
                scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
            position, key = torch.arange(length - n, length)[:, None], torch.arange(length)[None]
            seen = (key <= position) & ((key > position - self.window) if self.window else True)
            p = scores.masked_fill(~seen, -torch.inf).exp()
            extra = 0.0 if self.sinks is None else self.sinks.double().exp()[:, None, None]
            p = p / (p.sum(-1, keepdim=True) + extra)
            want[rows] = torch.einsum("hqk,khd->qhd", p, v)
            magnitude[rows] = torch.einsum("hqk,khd->qhd", p, v.abs())
        return want, magnitude

    def check(self, operator=attention.paged_attention) -> Tensor:
        got, (want, magnitude) = self.run(operator), self.want()
        unanswered = want.isnan()
        assert torch.equal(got.isnan(), unanswered), f"NaN in rows {got.isnan().any(-1).any(-1).nonzero()[:, 0]}"
        eps = torch.finfo(got.dtype).eps
        rounded = eps if self.device != "cpu" and got.dtype is not torch.float32 else 0
        bound = eps * want.abs() + (8 * SUM + rounded) * magnitude
        off = ((got.double() - want).abs() - bound).masked_fill(unanswered, -1)
        wrong = (off > 0).any(-1).any(-1).nonzero()[:, 0]
        assert not len(wrong), f"off by {off.max()} more than the bound, in rows {wrong}"
        return got


def planned(monkeypatch: pytest.MonkeyPatch, few: Plan, many: Plan) -> None:
    monkeypatch.setattr(attention, "_plan_few", lambda *_: few)
    monkeypatch.setattr(attention, "_plan_many", lambda *_: many)


SMALL = Plan(4, 16, 1, 1), Plan(16, 16, 1, 1)  # several tiles of each; a program takes the interpreter 10 ms
SPLIT = Plan(4, 16, 1, 1, splits=4), Plan(16, 16, 1, 1)
REQUESTS = st.lists(
    st.tuples(st.sampled_from([0, 1, 15, 16, 31, 70]), st.sampled_from([0, 1, 1, 1, 2, 9, 20]), st.booleans()),
    min_size=1,
    max_size=4,
)


@interpreted("invalid value encountered in divide")  # in rows that are not stored
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtype=st.sampled_from(DTYPES),
    heads=st.sampled_from([(1, 1), (2, 2), (6, 2), (3, 1), (12, 1)]),
    sizes=st.sampled_from([(16, 16), (24, 24), (40, 32), (8, 8), (32, 48)]),
    block_size=st.sampled_from([16, 24, 32, 8]),
    window=st.sampled_from([0, 0, 1, 5, 33]),
    sinks=st.booleans(),
    soft_cap=st.sampled_from([0.0, 0.0, 2.0]),
    requests=REQUESTS,
    pad_rows=st.sampled_from([0, 1, 5]),
    plans=st.sampled_from([SMALL, SPLIT]),
    seed=st.integers(0, 1000),
)
def test_attention_of_any_shape(
    dtype, heads, sizes, block_size, window, sinks, soft_cap, requests, pad_rows, plans, seed, monkeypatch, nan_poison
):
    planned(monkeypatch, *plans)
    lens = [context + queries if queries and live else 0 for context, queries, live in requests]
    queries = [queries for _, queries, _ in requests]
    case = Case(
        lens, queries, *heads, sizes[0], block_size, dtype, DV=sizes[1], pad_rows=pad_rows, window=window, sinks=sinks,
        soft_cap=soft_cap, seed=seed,
    )  # fmt: skip
    case.check()
    case.check(reference.paged_attention)


SHAPES = {
    "prefill and decode": {"lens": [70, 200, 33], "queries": [70, 1, 5], "H": 4, "J": 2, "D": 64, "pad_rows": 3},
    "decode": {"lens": [130, 64, 5], "queries": [1, 1, 1], "H": 6, "J": 2, "D": 128, "pad_rows": 2},
    "a chunk": {"lens": [150], "queries": [50], "H": 4, "J": 4, "D": 96, "pad_rows": 1},
    "window": {"lens": [180, 150, 9], "queries": [20, 1, 9], "H": 4, "J": 2, "D": 64, "window": 70},
    "window of one": {"lens": [70, 66], "queries": [1, 40], "H": 2, "J": 2, "D": 32, "window": 1},
    "sinks": {"lens": [100, 30], "queries": [40, 1], "H": 4, "J": 2, "D": 64, "sinks": True},
    "sinks in a window": {"lens": [140, 30], "queries": [1, 1], "H": 4, "J": 2, "D": 64, "sinks": True, "window": 30},
    "soft cap": {"lens": [80, 30], "queries": [3, 1], "H": 4, "J": 2, "D": 64, "soft_cap": 1.5},
    "one KV head of many": {"lens": [40, 20], "queries": [1, 5], "H": 40, "J": 1, "D": 32},
    "pages of 24": {"lens": [90, 30], "queries": [3, 1], "H": 2, "J": 1, "D": 80, "block_size": 24},
    "pages of 256": {"lens": [300, 30], "queries": [3, 1], "H": 2, "J": 1, "D": 256, "block_size": 256},
    "head 192": {"lens": [70], "queries": [3], "H": 4, "J": 2, "D": 192, "DV": 128, "pad_rows": 1},
    "latent": {
        "lens": [70, 20],
        "queries": [1, 30],
        "H": 16,
        "J": 1,
        "D": 576,
        "DV": 512,
        "latent": True,
        "pad_rows": 2,
    },
}


NARROW = ("prefill and decode", "decode", "sinks in a window")


@interpreted("invalid value encountered in divide")  # in rows that are not stored
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in SHAPES] + [(name, torch.bfloat16) for name in NARROW],
    ids=str,
)
def test_attention_against_fp64(name, dtype, nan_poison):
    """With the interpreter's own plans."""
    Case(**SHAPES[name], dtype=dtype).check()


@pytest.mark.parametrize("window", [0, 130])
def test_splits_make_one_answer(window, monkeypatch, nan_poison):
    """Of a context of many splits, of one split, and of some that get nothing; the same bits each time."""
    case = Case([300, 40, 17], [1, 2, 1], 2, 1, 32, pad_rows=1, window=window, sinks=True, seed=3)
    results = []
    for splits, least in ((1, 1), (8, 1), (4, 4)):
        planned(monkeypatch, Plan(4, 16, 1, 1, splits, least), SMALL[1])
        results.append(case.check())
    assert torch.equal(case.run(), results[-1])
    assert any(not torch.equal(result, results[0]) for result in results), "nothing was split"


@interpreted("All-NaN slice encountered", "invalid value encountered in subtract")
@pytest.mark.parametrize("plans", [SMALL, SPLIT], ids=["whole", "split"])
def test_a_request_is_bitwise_its_own(plans, monkeypatch):
    """Whatever the others of the batch are, NaN too."""
    planned(monkeypatch, *plans)
    lens, queries = [60, 30, 100, 32], [3, 20, 1, 1]
    case = Case(lens, queries, 2, 1, 32, pad_rows=2)
    got = case.run()
    for r in (1, 2):
        rows = slice(int(case.start[r]), int(case.start[r + 1]))
        q = torch.full_like(case.q, NAN)
        q[rows] = case.q[rows]
        assert torch.equal(case.run(q=q)[rows], got[rows])
        lens_before = case.lens
        case.lens = [length if i == r else 0 for i, length in enumerate(lens)]
        assert torch.equal(case.run()[rows], got[rows])
        case.lens = lens_before


@interpreted("All-NaN slice encountered", "invalid value encountered in (subtract|matmul)")
def test_a_nan_of_its_own_shows(monkeypatch):
    """In q: in that head; in a key: in all heads of its group; in a value: in that column. Nowhere else."""
    for plans, bits in ((SMALL, -1), (SPLIT, 0x7F800101)):
        planned(monkeypatch, *plans)
        nan = torch.tensor(bits).int().view(torch.float32)
        clean, *spoilt = (Case([20, 70], [1, 1], 4, 2, 16, seed=1) for _ in range(4))
        at = int(clean.table[1, 33 // 16]), 1, 33 % 16, 5
        spoilt[0].q[1, 2, 5] = nan
        spoilt[1].key_cache[at] = nan
        spoilt[2].value_cache[at] = nan
        right = clean.run()
        for case, where in zip(spoilt, ((1, 2), (1, slice(2, 4)), (1, slice(2, 4), 5)), strict=True):
            expected = right.clone()
            expected[where] = NAN
            assert torch.equal(case.run().nan_to_num(7.0), expected.nan_to_num(7.0)), where


def test_pad_requests(nan_poison):
    """Those of length 0, without queries, and past ``num_reqs`` write nothing; the rows past the last become 0."""
    case = Case([20, 0, 0, 5], [3, 0, 2, 0], 2, 1, 32, pad_rows=4)
    got = case.check()
    assert got[5:].eq(0).all()
    assert case.run(fill=7.0)[3:5].eq(7).all()
    case.table[1:] = 10**6
    case.start[2:] = 10**6
    got = case.run(num_reqs=1)
    assert got[3:].eq(0).all()
    assert not got[:3].isnan().any()
    assert case.run(num_reqs=0).eq(0).all()
    assert case.run(q=case.q[:0], num_reqs=0).shape == (0, 2, 32)


# Decode rows of four ranks, padded to the largest; 26 real rows of 30; and prompts among them.
LAYOUTS = {
    **{f"{n} of 11": ([1] * n, 11 - n) for n in (7, 5, 11)},
    **{f"{n} of 8": ([1] * n, 8 - n) for n in (5, 8)},
    "26 of 30": ([1] * 26, 4),
    "26 of 30 with a prompt": ([1] * 19 + [7], 4),
}


@pytest.mark.parametrize("name", ["5 of 8", "26 of 30 with a prompt"])
def test_layouts_of_ranks(name, nan_poison):
    queries, pad_rows = LAYOUTS[name]
    Case([3 * i + n for i, n in enumerate(queries)], queries, 2, 1, 16, pad_rows=pad_rows).check()


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_the_host_asks_the_device_nothing(monkeypatch):
    planned(monkeypatch, *SPLIT)
    case = Case([90, 30], [1, 20], 2, 1, 16, pad_rows=1)

    def watched(*args):
        with Calls() as calls:
            attention.paged_attention(*args)
        waits = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "_to_copy", "bincount", "unique"}
        assert not calls.seen & waits, calls.seen

    case.check(watched)


def test_what_is_out_of_range_is_left_to_the_twin(monkeypatch, log):
    monkeypatch.setenv("VLLM_KERNELS", "paged_attention=triton")
    table.choose.cache_clear()
    case = Case([20, 9], [3, 1], 2, 1, 584, DV=16, pad_rows=1)
    out = torch.full((5, 2, 16), 7.0)
    lens = torch.tensor(case.lens, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=r"heads of 584 with values of 16.*576 with 512"):
        attention.paged_attention(
            case.q, case.key_cache, case.value_cache, case.table, case.start, lens, case.scale, out
        )
    assert out.eq(7).all()
    case.check(ops.paged_attention)
    assert "heads of 584" in log.text
    log.clear()
    Case([20, 9], [3, 1], 2, 1, 16, sinks=True).check(ops.paged_attention)
    assert not log.text
    with pytest.raises(NotImplementedError, match="float64"):
        Case([3], [1], 1, 1, 16, dtype=torch.float64).run()


@pytest.mark.parametrize("options", [{"sinks": True}, {"soft_cap": 2.0}, {"DV": 8}], ids=str)
def test_the_cpu_kernel_has_every_option(options, monkeypatch, log):
    monkeypatch.setenv("VLLM_KERNELS", "paged_attention=cpu")
    monkeypatch.setattr(table, "_refused", set())
    table.choose.cache_clear()
    Case([20, 9], [3, 1], 2, 1, 16, **options).check(ops.paged_attention)
    assert not log.text


@pytest.mark.parametrize("shape", [(32, 8, 128), (8, 8, 64), (16, 1, 256), (128, 1, 512), (4, 2, 96)], ids=str)
def test_the_workspace_is_enough(shape):
    H, J, D = shape
    for dtype in (torch.float32, torch.bfloat16):
        many = attention._plan_many(D, D, dtype, False)
        for T in (1, 3, 16, 64, 300, 5000):
            room = attention.paged_attention_workspace(T, 1 << 17, H, J, D, dtype)
            for R in (R for R in (1, 2, 7, 64, 129, 1000) if R <= T):
                few = attention._plan_few(R, H // J, J, D, D, dtype, 1 << 17, False)
                needed = sum(cut.parts for cut in attention._cuts(T, R, H // J, J, few, many))
                width = attention.triton.next_power_of_2(D) + 2
                assert needed * width * 4 <= room, (T, R)


COMPILED = """
import sys, torch, compiling
from vllm.kernels.triton import attention

capability, shared = map(int, sys.argv[1:])
FP8 = torch.float8_e4m3fn
compiling.TYPES[torch.uint8] = "*u8"
attention.shared_memory = lambda device: shared

def call(dtype, T, R, H, J, D, DV, block_size=16, window=0, sinks=False, soft_cap=0.0, cached=None):
    empty = lambda *shape, dtype=dtype: torch.empty(*shape, dtype=dtype, device="meta")
    attention.paged_attention(
        empty(T, H, D), *(empty(9, J, block_size, size, dtype=cached or dtype) for size in (D, DV)),
        empty(R, 256, dtype=torch.int32),
        empty(R + 1, dtype=torch.int32), empty(R, dtype=torch.int32), 1.0, empty(T, H, DV), window, None,
        empty(H) if sinks else None, soft_cap,
    )

for case in (
    (torch.bfloat16, 2048, 4, 64, 8, 128, 128), (torch.float16, 2048, 8, 64, 8, 64, 64, 16, 128, True),
    (torch.bfloat16, 300, 2, 16, 8, 256, 256, 64, 0, False, 30.0), (torch.bfloat16, 300, 2, 12, 4, 96, 96, 24),
    (torch.bfloat16, 300, 2, 16, 16, 192, 128), (torch.bfloat16, 300, 2, 16, 1, 576, 512),
    (torch.float32, 300, 2, 32, 8, 128, 128), (torch.bfloat16, 2048, 4, 64, 8, 128, 128, 16, 0, False, 0.0, FP8),
    (torch.float16, 300, 2, 16, 1, 576, 512, 64, 0, False, 0.0, FP8),
):
    seen = compiling.launches(attention, lambda: call(*case))
    assert [launch.kernel.__name__ for launch in seen].count("_attend") == 2
    for launch in seen:
        kernel = compiling.compile_launch(launch, capability)
        name = launch.kernel.__name__
        print(case, name, launch.grid, launch.options, kernel.metadata.shared, flush=True)
        assert kernel.metadata.shared <= shared, (case, name)
        if name == "_attend" and case[0] is not torch.float32:
            assert "mma" in kernel.asm["ptx"], (case, name)
            copies = "cp.async.cg" in kernel.asm["ptx"]
            assert launch.options["num_stages"] == 1 or case[-1] is FP8 or copies, (case, name)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "shared"), [(80, 163 << 10), (89, 99 << 10), (90, 227 << 10)])
def test_attention_compiles_for_cuda(capability, shared, tmp_path):
    """Every kind of tile fits a card's shared memory and uses its matrix unit; what has room keeps copies in flight."""
    here = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": f"{here.parents[2]}:{here}", "TRITON_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-W", "ignore", "-c", COMPILED, str(capability), str(shared)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
