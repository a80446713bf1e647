# SPDX-License-Identifier: Apache-2.0
"""A float8 cache by every implementation: what is written, number by number, and what is read, against fp64.

What a code means and which code is nearest are worked out here from e4m3's definition: a sign, four bits of exponent
with bias 7, three of mantissa, subnormals at exponent 0, NaN where all seven are set. Slots that no request wrote, rows
of padding and the null block are NaN.
"""

from __future__ import annotations

import bisect
import importlib
import importlib.util
import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import xpu_stand_ins
from torch import Tensor

from vllm.kernels import checks, ops, table, xpu

FP8, NAN_CODE = torch.float8_e4m3fn, 0x7F
NAN, INF = float("nan"), float("inf")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
IMPLEMENTATIONS = ["cpu", "reference", *(["triton"] if importlib.util.find_spec("triton") else [])]


def value_of(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 127 == NAN_CODE:
        return NAN
    size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -size if code & 128 else size


VALUES = torch.tensor([value_of(code) for code in range(256)], dtype=torch.float64)
SIZES = [Fraction(value_of(code)) for code in range(NAN_CODE)]


def nearest(x: float) -> int:
    """The code of ``x``: the nearest, of two the even one, never beyond 448."""
    if np.isnan(x):
        return NAN_CODE
    sign = 128 if np.signbit(x) else 0
    if abs(x) >= 448:
        return sign | 0x7E
    size = Fraction(abs(float(x)))
    above = bisect.bisect_left(SIZES, size)
    if SIZES[above] == size:
        return sign | above
    below, up = size - SIZES[above - 1], SIZES[above] - size
    return sign | (above if up < below or (up == below and above % 2 == 0) else above - 1)


def operators(name: str) -> Any:
    return importlib.import_module("vllm.kernels.cpu.ops" if name == "cpu" else f"vllm.kernels.{name}")


def codes(cache: Tensor) -> Tensor:
    return cache.view(torch.uint8)


def numbers(dtype: torch.dtype) -> Tensor:
    """Every code's value and, between it and the next, the middle and its neighbours; what is cut off; numbers of all
    magnitudes."""
    sizes = [float(size) for size in SIZES]
    middles = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(sizes)], dtype=torch.float32)
    around = [middles, *(middles * (1 + step * torch.finfo(dtype).eps) for step in (-1, 1))]
    limits = torch.tensor([447.9, 448, 449, 463.9, 464, 465, 480, 512, 60000, INF, NAN])
    g = torch.Generator().manual_seed(0)
    many = torch.randn(600, generator=g) * 10.0 ** torch.randint(-5, 3, (600,), generator=g)
    x = torch.cat((torch.tensor(sizes), *around, limits, many))
    return torch.cat((x, -x)).to(dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", [(1.0, 0.25), (0.0371, 3.3)])
def test_every_number_is_written_as_the_nearest(implementation: str, dtype: torch.dtype, scales: tuple) -> None:
    x = numbers(dtype)
    J, D, block_size = 3, 37, 8
    T = len(x) // (J * D) + 1
    k = torch.nn.functional.pad(x, (0, T * J * D - len(x))).view(T, J, D)
    v = k.flip(0)
    blocks = T // block_size + 3
    g = torch.Generator().manual_seed(T)
    slots = block_size + torch.randperm((blocks - 1) * block_size, generator=g)[:T]
    slots[::5] = -1
    kept = torch.full((2, blocks, J, block_size, D), 0x55, dtype=torch.uint8)
    caches = kept.clone().view(FP8)
    poisoned = [torch.where((slots < 0)[:, None, None], NAN, row) for row in (k, v)]
    operators(implementation).reshape_and_cache(*poisoned, *caches, slots, *scales)
    for row, want, scale in zip((k, v), kept, scales, strict=True):
        scaled = row.float().numpy() / np.float32(scale)
        right = torch.tensor([nearest(y) for y in scaled.flatten()], dtype=torch.uint8).view(T, J, D)
        for t in (slots >= 0).nonzero()[:, 0].tolist():
            want[slots[t] // block_size, :, slots[t] % block_size] = right[t]
    assert torch.equal(codes(caches) | 128 * (codes(caches) & 127 == NAN_CODE), kept | 128 * (kept & 127 == NAN_CODE))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_code_is_read_as_its_number(implementation: str) -> None:
    """As a value: all at once, under a softmax over one key. As a key, beside one of zeros: head h asks for channel h
    alone, whose code is h, as much as makes its score ±1."""
    attention = operators(implementation).paged_attention
    every, zeros = torch.arange(256, dtype=torch.uint8).view(1, 1, 1, 256), torch.zeros(1, 1, 2, 256, dtype=torch.uint8)
    block, starts, one = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 1]).int(), torch.tensor([1]).int()
    for dtype in DTYPES:
        out, q = torch.full((1, 1, 256), 7.0, dtype=dtype), torch.zeros(1, 1, 16, dtype=dtype)
        keys = zeros[:, :, :1, :16].view(FP8)
        attention(q, keys, every.view(FP8), block, starts, one, 1.0, out, v_scale=0.5)
        torch.testing.assert_close(out[0, 0], (VALUES / 2).to(dtype), rtol=0, atol=0, equal_nan=True)

    real = ~VALUES.isnan()
    keys, ones = zeros.clone(), torch.zeros(1, 1, 2, 16).to(FP8)
    keys[0, 0, 1], ones[:, :, 1] = torch.where(real, every, 0), 1.0
    q = torch.where(real & (VALUES != 0), 1 / VALUES.abs(), 1.0).float().diag()[None]
    out = torch.full((1, 256, 16), 7.0)
    attention(q, keys.view(FP8), ones, block, starts, 2 * one, 0.5, out, k_scale=2.0)
    right = torch.where(real, torch.sigmoid(VALUES.sign()), 0.5).float()
    torch.testing.assert_close(out[0, :, 0], right, rtol=2e-6, atol=0)
    for nan in (0x7F, 0xFF):
        keys[0, 0, 1, 3] = nan
        attention(q, keys.view(FP8), ones, block, starts, 2 * one, 0.5, out)
        assert out.isnan().all()


def random_codes(*shape: int, seed: int) -> Tensor:
    """Numbers from normal down to subnormal."""
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g) * 2.0 ** torch.randint(-8, 2, shape, generator=g)).to(FP8)


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [pair for pair in itertools.product(IMPLEMENTATIONS, DTYPES) if pair != ("triton", torch.float16)],
)
@pytest.mark.parametrize(
    ("heads", "window", "cap", "sinks", "latent"),
    [
        ((4, 2, 64, 64), 0, 0.0, False, False),
        ((6, 1, 40, 24), 9, 0.0, True, False),
        ((2, 2, 128, 128), 0, 2.0, False, False),
        ((16, 1, 40, 32), 0, 0.0, False, True),
    ],
)
def test_attention_against_fp64(implementation, dtype, heads, window, cap, sinks, latent, nan_poison) -> None:
    """Prompts, a chunk, decodes and a request without rows; over several splits and with few queries that read the
    cache directly. Keys and values are 0.7 and 0.3 times what the cache holds, those of a latent 0.7 times."""
    (H, J, D, DV), block_size, pads = heads, 16, 3
    lengths, rows = [700, 40, 1, 0, 33, 20], [1, 40, 1, 0, 5, 2]
    if implementation == "triton":  # in the interpreter
        lengths, rows = [90, 21, 0, 33], [1, 21, 0, 5]
    k_scale, v_scale = 0.7, 0.7 if latent else 0.3
    needed = [-(-n // block_size) for n in lengths]
    R, T = len(lengths), sum(rows) + pads
    kept = torch.full((2, 1 + sum(needed), J, block_size, D), NAN_CODE, dtype=torch.uint8)
    tables, at, of_requests = torch.zeros(R, max(needed), dtype=torch.int32), 1, []
    for r, length in enumerate(lengths):
        tables[r, : needed[r]] = torch.arange(at, at + needed[r]).flip(0)
        at += needed[r]
        position = torch.arange(length)
        place = tables[r, position // block_size].long(), position % block_size
        both = [codes(random_codes(length, J, D, seed=10 * r + i)) for i in range(2)]
        for cache, new in zip(kept, both, strict=True):
            cache[place[0], :, place[1]] = new
        of_requests.append([VALUES[new.long()] for new in both])
    keys, values = kept.view(FP8)
    values = (keys if latent else values)[..., :DV]
    g = torch.Generator().manual_seed(1)
    q = torch.randn(T, H, D, generator=g).to(dtype)
    q[T - pads :] = NAN
    of_sinks = torch.randn(H, generator=g) if sinks else None
    starts, lens = torch.tensor([0, *rows]).cumsum(0).int(), torch.tensor(lengths, dtype=torch.int32)
    out = torch.full((T, H, DV), NAN, dtype=dtype)
    operators(implementation).paged_attention(
        q, keys, values, tables, starts, lens, D**-0.5, out, window, None, of_sinks, cap, None, None, k_scale, v_scale
    )  # fmt: skip
    at = 0
    for r, n in enumerate(rows):
        k, v = of_requests[r]
        v = (k if latent else v)[..., :DV]
        for i in range(n):
            last = lengths[r] - n + i + 1
            first = max(last - window, 0) if window else 0
            ks, vs = (x[first:last].repeat_interleave(H // J, 1) for x in (k * k_scale, v * v_scale))
            scores = torch.einsum("hd,khd->hk", q[at].double(), ks) * D**-0.5
            scores = cap * torch.tanh(scores / cap) if cap else scores
            p = scores.exp()
            p = p / (p.sum(-1, keepdim=True) + (of_sinks.double().exp()[:, None] if sinks else 0))
            want, magnitude = (torch.einsum("hk,khd->hd", p, x) for x in (vs, vs.abs()))
            bound = 3e-5 * magnitude + torch.finfo(dtype).eps * want.abs()
            assert ((out[at].double() - want).abs() <= bound).all(), (r, i)
            at += 1
    assert out[at:].eq(0).all()


def test_a_row_is_bitwise_its_own() -> None:
    """Alone or among others, in C++: decoding changes nothing about it."""
    attention = operators("cpu").paged_attention
    keys, values = random_codes(20, 2, 16, 48, seed=1), random_codes(20, 2, 16, 48, seed=2)
    q = torch.randn(9, 4, 48, generator=torch.Generator().manual_seed(3)).bfloat16()
    tables = torch.arange(1, 19, dtype=torch.int32).view(2, 9)
    starts, lens = torch.tensor([0, 1, 9], dtype=torch.int32), torch.tensor([130, 70], dtype=torch.int32)
    out = torch.empty_like(q)
    attention(q, keys, values, tables, starts, lens, 0.2, out, k_scale=0.3, v_scale=0.4)
    for row, (r, length) in enumerate([(0, 130), *((1, 63 + i) for i in range(8))]):
        alone = torch.empty_like(q[:1])
        one = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
        attention(q[row : row + 1], keys, values, tables[r : r + 1], *one, 0.2, alone, k_scale=0.3, v_scale=0.4)
        assert torch.equal(alone[0], out[row])


@pytest.mark.parametrize("implementation", [name for name in IMPLEMENTATIONS if name != "reference"])
def test_caches_of_two_types_are_refused(implementation: str) -> None:
    module, row = operators(implementation), torch.zeros(1, 1, 16)
    codes_of, plain = torch.zeros(2, 1, 16, 16).to(FP8), torch.zeros(2, 1, 16, 16)
    one = torch.tensor([0, 1], dtype=torch.int32)
    for caches in ((codes_of, plain), (plain, codes_of), (plain.double(),) * 2):
        with pytest.raises(AssertionError):
            module.reshape_and_cache(row, row, *caches, torch.tensor([3]))
        with pytest.raises(AssertionError):
            module.paged_attention(row, *caches, one[None], one, one[1:], 1.0, row.clone())


# --- devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", table.ATTENTION)
def test_wrappers_of_xpu_kernels(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Around a kernel that makes NaN of what does not fit; layout, scales by request and head, as the kernels ask."""
    monkeypatch.setattr(xpu, "kernel_package", lambda module: object())
    with xpu_stand_ins.installed():
        assert checks.failure(operator, getattr(xpu, operator), "cpu", xpu, fp8_cache=True) is None


@pytest.mark.parametrize("implementation", [name for name in IMPLEMENTATIONS if name != "reference"])
@pytest.mark.parametrize("operator", table.ATTENTION)
def test_the_check_of_devices(operator: str, implementation: str) -> None:
    module = operators(implementation)
    function = getattr(module, operator)
    assert checks.failure(operator, function, "cpu", fp8_cache=True) is None

    def without_scales(*args: Any) -> Any:
        return function(*args[: -2 if operator == "paged_attention" else 5])

    assert "is wrong" in checks.failure(operator, without_scales, "cpu", fp8_cache=True)


def test_a_device_that_fails_its_check_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def failure(operator: str, function: Any, device_type: str, module: Any, fp8_cache: bool) -> str | None:
        assert function is getattr(ops, operator)
        asked.append((operator, device_type, fp8_cache))
        return "too hot" if operator == "paged_attention" else None

    choices = table.choose("cpu")
    monkeypatch.setattr(ops, "choose", lambda device_type: choices)
    monkeypatch.setattr(checks, "failure", failure)
    ops.check_fp8_cache("cpu")
    assert not asked
    with pytest.raises(ValueError, match=r"paged_attention by cpu fails .* on cuda \(too hot\).*kv_cache_dtype='auto'"):
        ops.check_fp8_cache("cuda")
    assert asked == [("reshape_and_cache", "cuda", True), ("paged_attention", "cuda", True)]
