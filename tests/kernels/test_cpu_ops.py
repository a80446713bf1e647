# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels against fp64 references, each row's independence of its batch (bitwise), and the build.

Error bounds: a sum of n products in float32 is off by at most about ``n * 2^-24`` of the sum of their magnitudes; in
practice by a few 2^-24, of which ``SUM`` is a generous multiple. The result is then rounded once to the dtype.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import statistics
import struct
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import poison
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm.kernels import ops as operators
from vllm.kernels import reference, table
from vllm.kernels.cpu import build, ops

pytestmark = pytest.mark.usefixtures("cpu_kernels")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SUM = 2e-6  # float32 summation, relative to the sum of magnitudes
NAN = float("nan")


def assert_close(got: Tensor, want: Tensor, magnitude: Tensor | None = None, roundings: int = 1) -> None:
    """``want`` in fp64; ``magnitude``: the sum of the magnitudes that were summed up."""
    assert got.shape == want.shape
    eps = torch.finfo(got.dtype).eps
    tiny = torch.finfo(got.dtype).tiny
    bound = roundings * eps * want.abs() + SUM * (want.abs() if magnitude is None else magnitude) + tiny
    excess = ((got.double() - want).abs() - bound).max() if got.numel() else torch.tensor(0.0)
    assert excess <= 0, f"off by {excess} more than the bound"


def wide_rows(T: int, width: int, dtype: torch.dtype) -> Tensor:
    """[T, width] as a view into wider rows whose other elements are NaN."""
    return torch.cat((torch.randn(T, width), torch.full((T, 5), NAN)), dim=1).to(dtype)[:, :width]


# ---------------------------------------------------------------------------------------------------------------------
# Linear layers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "K"), [(192, 64), (100, 33), (1, 1), (7, 130), (515, 96)])
def test_linear_against_fp64(dtype, N, K):
    weight, bias = torch.randn(N, K).to(dtype), torch.randn(N).to(dtype)
    packed = ops.pack_linear_weight(weight)
    for M in (0, 1, 2, 3, 5, 8, 12, 13, 33, 150):
        x = wide_rows(M, K, dtype)
        want = x.double() @ weight.double().T
        magnitude = x.double().abs() @ weight.double().abs().T
        assert_close(ops.linear(x, packed), want, magnitude)
        assert_close(ops.linear(x, packed, bias), want + bias.double(), magnitude + bias.double().abs())
        out = torch.full((M, N + 3), NAN, dtype=dtype)
        assert ops.linear(x, packed, out=out[:, :N]) is not out
        assert_close(out[:, :N], want, magnitude)
        assert out[:, N:].isnan().all()
        exact = torch.empty(M, N)
        ops.linear(x, packed, out=exact)
        assert_close(exact, want, magnitude)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_row_is_bitwise_its_own(dtype, threads):
    """Alone, in any batch, at any place, on any number of threads."""
    N, K = 416, 200
    packed = ops.pack_linear_weight(torch.randn(N, K).to(dtype))
    x = torch.randn(230, K).to(dtype)
    torch.set_num_threads(1)
    alone = torch.cat([ops.linear(row, packed) for row in x.split(1)])
    torch.set_num_threads(threads)
    for M in (*range(1, 30), 97, 230):
        assert torch.equal(ops.linear(x[:M], packed), alone[:M]), M
    order = torch.randperm(230)
    assert torch.equal(ops.linear(x[order], packed), alone[order])


def test_linear_nan_row_stays_alone():
    packed = ops.pack_linear_weight(torch.randn(64, 32))
    x = torch.randn(30, 32)
    clean = ops.linear(x, packed)
    x[11] = NAN
    got = ops.linear(x, packed)
    assert got[11].isnan().all()
    rows = torch.arange(30) != 11
    assert torch.equal(got[rows], clean[rows])


def test_bf16_rounding_keeps_nan_and_ties_to_even():
    """Bit patterns that a rounding by carry alone would turn into 0 or inf."""
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7F800000, -0x800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF])
    x = bits.to(torch.int32).view(torch.float32)
    want = x.bfloat16()
    # silu_and_mul of [gate, up] with silu(gate) = gate: nothing else rounds a float32 straight to bfloat16
    packed = ops.pack_linear_weight(torch.eye(1).bfloat16())
    got = ops.linear(torch.ones(8, 1).bfloat16(), packed, out=torch.empty(8, 1))
    assert torch.equal(got, torch.ones(8, 1))
    norm = ops.rms_norm(x[:, None].repeat(1, 8).clone(), torch.ones(8), 0.0)
    assert norm[:2].isnan().all()
    assert want[:2].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_reads_the_packed_weight(dtype, threads):
    weight = torch.randn(100, 33).to(dtype)
    packed = ops.pack_linear_weight(weight)
    ids = torch.randint(0, 100, (57,))
    assert torch.equal(ops.embedding(ids, packed), weight[ids])
    assert ops.embedding(ids[:0], packed).shape == (0, 33)
    for bad in (100, -1):
        with pytest.raises(AssertionError, match=rf"{bad}.* 100 rows"):
            ops.embedding(torch.tensor([3, bad]), packed)


def test_linear_misuse_names_both_sides():
    packed = ops.pack_linear_weight(torch.randn(8, 16))
    with pytest.raises(AssertionError, match=r"15 .* 16"):
        ops.linear(torch.randn(2, 15), packed)
    with pytest.raises(AssertionError, match=r"float32.*bfloat16|bfloat16.*float32"):
        ops.linear(torch.randn(2, 16).bfloat16(), packed)
    with pytest.raises(AssertionError, match=r"\(2, 8\)"):
        ops.linear(torch.randn(2, 16), packed, out=torch.empty(3, 8))
    with pytest.raises(ValueError, match="float64"):
        ops.pack_linear_weight(torch.randn(8, 16).double())


# ---------------------------------------------------------------------------------------------------------------------
# Row-wise operations


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [64, 576, 5, 33])
def test_rms_norm_against_fp64(dtype, D, threads):
    x, weight = wide_rows(9, D, dtype), torch.randn(D).to(dtype)
    want = reference.rms_norm(x.double(), weight.double(), 1e-5)
    assert_close(ops.rms_norm(x, weight, 1e-5), want, 2 * want.abs(), roundings=2)
    folded = 1 + torch.randn(D)
    assert_close(ops.rms_norm(x, folded, 1e-5), reference.rms_norm(x.double(), folded.double(), 1e-5))
    out = torch.full((9, D + 2), NAN, dtype=dtype)
    ops.rms_norm(x, weight, 1e-5, out=out[:, :D])
    assert torch.equal(out[:, :D], ops.rms_norm(x, weight, 1e-5))
    assert out[:, D:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_rounds_as_transformers(dtype):
    """The mean of squares is summed in another order, a few units in the last place of float32: a narrower dtype sees
    that in nearly no element, and then as one unit after each of its two roundings."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = LlamaRMSNorm(192, eps=1e-6).to(dtype)
    norm.weight.data = torch.randn(192).to(dtype)
    x, residual = torch.randn(200, 192).to(dtype), torch.randn(200, 192).to(dtype)
    want_residual = residual + x
    want = norm(want_residual).detach()
    got, got_residual = ops.fused_add_rms_norm(x, residual, norm.weight.data, 1e-6)
    assert got_residual is residual
    assert torch.equal(residual, want_residual)
    ulp = torch.finfo(dtype).eps * want.double().abs()
    assert ((got.double() - want.double()).abs() <= (6 if dtype is torch.float32 else 2) * ulp).all()
    assert (got != want).float().mean() < (0.5 if dtype is torch.float32 else 0.01)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_heads_in_place(dtype, threads):
    """The q/k norm: heads of a fused row, written back where they were."""
    qkv = torch.randn(11, 5 * 32).to(dtype)
    weight = torch.randn(32).to(dtype)
    before = qkv.clone()
    q = qkv[:, : 3 * 32].view(11, 3, 32)
    ops.rms_norm(q, weight, 1e-6, out=q)
    assert torch.equal(qkv[:, 3 * 32 :], before[:, 3 * 32 :])
    want = reference.rms_norm(before[:, : 3 * 32].reshape(11, 3, 32).double(), weight.double(), 1e-6)
    assert_close(q, want, 2 * want.abs(), roundings=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [48, 7])
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_tanh_and_mul"])
def test_gated_activations_against_fp64(name, dtype, D, threads):
    x = wide_rows(13, 2 * D, dtype)
    x[0, :6] = torch.tensor([0.0, -0.0, -100.0, 100.0, -30.0, 88.0])
    want = getattr(reference, name)(x.double())
    assert_close(getattr(ops, name)(x), want, 4 * want.abs(), roundings=2)
    x[5, 2] = NAN
    got = getattr(ops, name)(x)
    assert got[5, 2].isnan()
    assert got.isnan().sum() == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("D", "rot_dim"), [(64, 64), (64, 16), (80, 40), (10, 6)])
def test_rotary_embedding_against_fp64(dtype, D, rot_dim, threads):
    H, J, T, P = 3, 2, 17, 50
    qkv = torch.randn(T, (H + 2 * J) * D).to(dtype)
    before = qkv.clone()
    angles = torch.randn(P, rot_dim // 2)
    cache = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.randint(0, P, (T,))
    q, k, v = (part.unflatten(1, (-1, D)) for part in qkv.split((H * D, J * D, J * D), dim=1))
    ops.rotary_embedding(positions, q, k, cache)
    assert torch.equal(v, before[:, (H + J) * D :].unflatten(1, (-1, D)))
    for got, start, heads in ((q, 0, H), (k, H * D, J)):
        x = before[:, start : start + heads * D].unflatten(1, (-1, D))
        assert torch.equal(got[..., rot_dim:], x[..., rot_dim:])
        a, b = x[..., :rot_dim].double().chunk(2, dim=-1)
        cos, sin = cache[positions].double().unsqueeze(1).chunk(2, dim=-1)
        want = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        magnitude = torch.cat(2 * ((a.abs() + b.abs()),), dim=-1)
        assert_close(got[..., :rot_dim], want, magnitude)
    with pytest.raises(AssertionError, match=r"50"):
        ops.rotary_embedding(torch.full((T,), 50), q, k, cache)


def test_rotary_embedding_equals_transformers():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = torch.randn(6, 3, 32), torch.randn(6, 1, 32)
    angles = torch.arange(6)[:, None] * 10000.0 ** (-torch.arange(0, 32, 2) / 32)
    both = torch.cat((angles, angles), dim=1)
    by_head = (x[None].transpose(1, 2) for x in (q, k))
    want_q, want_k = apply_rotary_pos_emb(*by_head, both.cos()[None], both.sin()[None])
    ops.rotary_embedding(torch.arange(6), q, k, torch.cat((angles.cos(), angles.sin()), dim=1))
    torch.testing.assert_close(q, want_q[0].transpose(0, 1), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(k, want_k[0].transpose(0, 1), atol=1e-6, rtol=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# Paged cache


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [8, 16, 24])
def test_reshape_and_cache_writes_its_slots_only(dtype, block_size, threads):
    J, D, blocks, T = 3, 40, 7, 20
    fused = torch.randn(T, 2 * J * D + 3).to(dtype)
    k, v = fused[:, : J * D].view(T, J, D), fused[:, J * D : 2 * J * D].view(T, J, D)
    both = torch.randn(2, blocks, J, block_size, D).to(dtype)
    before = both.clone()
    slots = torch.randperm(blocks * block_size)[:T]
    slots[::3] = -1
    fused[::3] = NAN  # a skipped token holds anything
    ops.reshape_and_cache(k, v, both[0], both[1], slots)
    written = torch.zeros(blocks, block_size, dtype=torch.bool)
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            written[block, offset] = True
            assert torch.equal(both[0, block, :, offset], k[t])
            assert torch.equal(both[1, block, :, offset], v[t])
    untouched = ~written[None, :, None, :, None].expand_as(both)
    assert torch.equal(both[untouched], before[untouched])
    for bad in (-2, blocks * block_size):
        with pytest.raises(AssertionError, match=f"{bad}.*{blocks} blocks of {block_size}"):
            ops.reshape_and_cache(k[:1], v[:1], both[0], both[1], torch.tensor([bad]))


class Paged:
    """Requests over a paged cache whose unwritten slots, and whose rows of q and out beside the heads, are NaN."""

    def __init__(self, lens, queries, H, J, D, block_size, dtype, pad_rows=0, seed=0, sinks=False, cap=0.0):
        g = torch.Generator().manual_seed(seed)
        # from one that takes all to one that takes nothing
        self.sinks, self.cap = torch.linspace(6, -9, H).to(dtype) if sinks else None, cap
        R = len(lens)
        per_request = [-(-length // block_size) for length in lens]
        blocks = 1 + sum(per_request)
        self.lens, self.queries, self.J, self.D, self.dtype, self.scale = lens, queries, J, D, dtype, D**-0.5
        both = torch.full((blocks, 2, J, block_size, D), NAN, dtype=dtype)
        self.key_cache, self.value_cache = both[:, 0], both[:, 1]
        self.table = torch.zeros(R, max([*per_request, 1]) + 2, dtype=torch.int32)  # the null block holds NaN too
        ids = 1 + torch.randperm(blocks - 1, generator=g)
        self.k, self.v = ([torch.randn(n, J, D, generator=g).to(dtype) for n in lens] for _ in range(2))
        for r, n in enumerate(per_request):
            self.table[r, :n], ids = ids[:n].int(), ids[n:]
            positions = torch.arange(lens[r])
            slots = self.table[r, positions // block_size].long() * block_size + positions % block_size
            reference.reshape_and_cache(self.k[r], self.v[r], self.key_cache, self.value_cache, slots)
        T = sum(queries) + pad_rows
        self.q = torch.randn(T, (H + 1) * D, generator=g).to(dtype)[:, : H * D].view(T, H, D)
        self.q[T - pad_rows :] = NAN

    def run(self, window=0, requests=None, queries=None, attention=ops.paged_attention):
        """Output of the last ``queries[r]`` queries of each of ``requests``, over exactly their keys."""
        requests = list(range(len(self.lens))) if requests is None else requests
        queries = self.queries if queries is None else queries
        T, H, D = self.q.shape
        out = torch.full((T, H * D + 7), NAN, dtype=self.dtype)[:, : H * D].view(T, H, D)
        ends = torch.tensor([0, *self.queries]).cumsum(0)[1:]
        rows = torch.cat([torch.arange(ends[r] - queries[r], ends[r]) for r in requests])
        pads = torch.arange(int(ends[-1]), T)
        q = self.q[torch.cat((rows, pads))] if len(rows) < int(ends[-1]) else self.q
        out = out[: len(q)]
        start = torch.tensor([0, *(queries[r] for r in requests)]).cumsum(0).int()
        lens = torch.tensor([self.lens[r] for r in requests], dtype=torch.int32)
        caches, options = (self.key_cache, self.value_cache), (window, None, self.sinks, self.cap)
        attention(q, *caches, self.table[requests], start, lens, self.scale, out, *options)
        assert out[len(rows) :].eq(0).all()
        return out[: len(rows)]

    def want(self, window=0):
        """(reference in fp64, weighted magnitudes of the values)"""
        outs, magnitudes, begin = [], [], 0
        for r, (length, n) in enumerate(zip(self.lens, self.queries, strict=True)):
            q = self.q[begin : begin + n].double()
            begin += n
            k, v = (x[r].double().repeat_interleave(q.shape[1] // self.J, dim=1) for x in (self.k, self.v))
            position, key = torch.arange(length - n, length)[:, None], torch.arange(length)[None]
            seen = (key <= position) & ((key > position - window) if window else True)
            scores = torch.einsum("qhd,khd->hqk", q, k) * self.scale
            scores = self.cap * torch.tanh(scores / self.cap) if self.cap else scores
            scores = scores.masked_fill(~seen, -torch.inf)
            if self.sinks is not None:
                scores = torch.cat((scores, self.sinks.double()[:, None, None].expand(-1, n, 1)), dim=-1)
            p = scores.softmax(-1)[..., :length]
            outs.append(torch.einsum("hqk,khd->qhd", p, v))
            magnitudes.append(torch.einsum("hqk,khd->qhd", p, v.abs()))
        return torch.cat(outs), torch.cat(magnitudes)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    dtype=st.sampled_from(DTYPES),
    heads=st.sampled_from([(1, 1), (4, 4), (9, 3), (8, 1), (14, 2), (20, 1)]),
    D=st.sampled_from([16, 32, 64, 80, 128, 256, 24]),
    block_size=st.sampled_from([8, 16, 32, 24]),
    window=st.sampled_from([0, 0, 1, 5, 33, 100]),
    requests=st.lists(
        st.tuples(st.sampled_from([0, 1, 15, 16, 63, 64, 65, 130]), st.sampled_from([0, 1, 1, 1, 2, 13, 40])),
        min_size=1,
        max_size=5,
    ),
    pad_rows=st.sampled_from([0, 1, 5]),
    seed=st.integers(0, 1000),
    sinks=st.booleans(),
    cap=st.sampled_from([0.0, 0.0, 0.5, 30.0]),
)
def test_paged_attention_against_fp64(dtype, heads, D, block_size, window, requests, pad_rows, seed, sinks, cap):
    lens = [context + queries for context, queries in requests]
    queries = [queries for _, queries in requests]
    case = Paged(lens, queries, *heads, D, block_size, dtype, pad_rows, seed, sinks, cap)
    want, magnitude = case.want(window)
    # a relative error of SUM in a score is one of (score * SUM) in its weight; scores here are below 8
    assert_close(case.run(window), want, 8 * magnitude)
    assert_close(case.run(window, attention=reference.paged_attention), want, 8 * magnitude)


@pytest.mark.parametrize("dtype", DTYPES)
def test_paged_attention_over_splits(dtype):
    for more in ({}, {"sinks": True, "cap": 4.0}):
        case = Paged([1500, 513, 1024], [1, 3, 1], 6, 2, 64, 16, dtype, **more)
        want, magnitude = case.want()
        assert_close(case.run(), want, 8 * magnitude)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 70])
def test_paged_attention_row_is_bitwise_its_own(dtype, window, threads):
    """In a batch or alone, whatever the chunking, on any number of threads; beyond one split of the keys too."""
    case = Paged([1100, 90, 600, 1, 64], [100, 90, 1, 1, 20], 6, 2, 32, 16, dtype)
    got = case.run(window)
    torch.set_num_threads(1)
    assert torch.equal(case.run(window), got)
    ends = torch.tensor([0, *case.queries]).cumsum(0)
    for r in range(5):
        assert torch.equal(case.run(window, requests=[r]), got[ends[r] : ends[r + 1]])
    torch.set_num_threads(threads)
    for chunk in (1, 7, 16, 64):
        # the first rows of a prompt as chunks that see only the keys so far
        for r in (0, 1):
            lens, queries = case.lens[r], case.queries[r]
            for begin in range(0, queries, chunk):
                end = min(begin + chunk, queries)
                part = Paged.__new__(Paged)
                part.__dict__.update(case.__dict__)
                part.lens = [lens - queries + end]
                part.queries = [end - begin]
                part.q = case.q[ends[r] + begin : ends[r] + end]
                part.table = case.table[r : r + 1]
                assert torch.equal(part.run(window), got[ends[r] + begin : ends[r] + end]), (r, chunk, begin)


def test_paged_attention_masked_values_never_reach_a_sum():
    """A NaN in a later token of the same prompt, as a weight of 0 would let through: 0 * NaN is NaN."""
    case = Paged([40, 200], [40, 30], 4, 2, 32, 16, torch.float32)
    want, magnitude = case.want(50)
    for r, length in enumerate(case.lens):
        last = length - 1
        block, offset = int(case.table[r, last // 16]), last % 16
        case.key_cache[block, :, offset] = NAN
        case.value_cache[block, :, offset] = NAN
        if r == 1:  # before the window of every query of the chunk: slots that another request may own by now
            for position in range(200 - 30 - 50 + 1):
                case.key_cache[int(case.table[1, position // 16]), :, position % 16] = NAN
                case.value_cache[int(case.table[1, position // 16]), :, position % 16] = NAN
    got = case.run(50)
    assert got[[39, 69]].isnan().all()
    rows = torch.tensor([*range(39), *range(40, 69)])
    assert_close(got[rows], want[rows], 8 * magnitude[rows])
    # the fault put back: a dense softmax with weight 0 for masked keys
    v = case.v[0].clone()
    v[39] = NAN
    p = torch.eye(40)
    assert (p @ v[:, 0]).isnan().any(dim=1).all()


def test_paged_attention_nan_query_stays_alone():
    case = Paged([80, 60], [80, 1], 4, 2, 32, 16, torch.float32)
    clean = case.run()
    case.q[7, 1] = NAN
    got = case.run()
    assert got[7, 1].isnan().all()
    got[7, 1] = clean[7, 1]
    assert torch.equal(got, clean)


def test_paged_attention_pad_requests():
    """seq_len 0, query_len 0 and requests past num_reqs write nothing; the tail becomes 0."""
    case = Paged([20], [3], 2, 1, 32, 16, torch.float32, pad_rows=4)
    want = case.run()
    out = torch.full((7, 2, 32), NAN)
    table = torch.cat((case.table, torch.full_like(case.table, 10**6), torch.zeros_like(case.table)))
    start, lens = torch.tensor([0, 3, 3, 3], dtype=torch.int32), torch.tensor([20, 0, 0], dtype=torch.int32)
    caches = case.key_cache, case.value_cache
    for num_reqs in (None, 1):
        ops.paged_attention(case.q, *caches, table, start, lens, case.scale, out.fill_(NAN), 0, num_reqs)
        assert torch.equal(out[:3], want)
        assert out[3:].eq(0).all()


def test_paged_attention_refuses_lying_metadata():
    case = Paged([20, 20], [2, 2], 2, 1, 32, 16, torch.float32)
    start, lens = torch.tensor([0, 2, 4], dtype=torch.int32), torch.tensor([20, 20], dtype=torch.int32)
    out = torch.empty(4, 2, 32)

    def run(start=start, lens=lens, table=case.table):
        ops.paged_attention(case.q, case.key_cache, case.value_cache, table, start, lens, case.scale, out)

    run()
    with pytest.raises(AssertionError, match=r"seq_lens \[1, 20\]"):
        run(lens=torch.tensor([1, 20], dtype=torch.int32))  # more queries than keys
    with pytest.raises(AssertionError, match=r"seq_lens \[1000, 20\]"):
        run(lens=torch.tensor([1000, 20], dtype=torch.int32))  # longer than the table
    with pytest.raises(AssertionError, match=r"4 rows.*\[0, 2, 6\]"):
        run(start=torch.tensor([0, 2, 6], dtype=torch.int32))  # more rows than there are
    with pytest.raises(AssertionError, match=r"5 blocks.*99"):
        run(table=torch.full_like(case.table, 99))
    with pytest.raises(AssertionError, match="int64"):
        run(lens=torch.tensor([20, 20]))


# ---------------------------------------------------------------------------------------------------------------------
# Experts


def naive_experts(x, w13, w2, ids, weights):
    """(sum, sum of magnitudes) in fp64, with the roundings to x's dtype that a layer by layer model makes."""
    want = torch.zeros(x.shape, dtype=torch.float64)
    magnitude = want.clone()
    for t in range(x.shape[0]):
        for s in range(ids.shape[1]):
            e = int(ids[t, s])
            if e < 0:
                continue
            gate, up = (w13[e].double() @ x[t].double()).chunk(2)
            h = torch.nn.functional.silu(gate) * up
            want[t] += weights[t, s].double() * (w2[e].double() @ h)
            magnitude[t] += weights[t, s].double() * (w2[e].double().abs() @ h.abs())
    return want, magnitude


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("E", "I", "D", "S"), [(8, 48, 64, 2), (5, 40, 50, 3)])
def test_fused_experts_against_fp64(dtype, E, I, D, S, threads):
    w13, w2 = (torch.randn(E, 2 * I, D) / 8).to(dtype), (torch.randn(E, D, I) / 8).to(dtype)
    packed = ops.pack_expert_weights(w13, gated=True), ops.pack_expert_weights(w2)
    for T in (0, 1, 3, 70):
        x = wide_rows(T, D, dtype)
        ids = torch.rand(T, E).topk(S).indices
        ids[torch.rand(T, S) < 0.2] = -1
        weights = torch.rand(T, S)
        want, magnitude = naive_experts(x, w13, w2, ids, weights)
        weights[ids < 0] = NAN
        got = ops.fused_experts(x, *packed, ids, weights)
        # the intermediate values are rounded too: gate, up, silu(gate), the product
        assert_close(got, want, magnitude * (1 + 4 * torch.finfo(dtype).eps / SUM))
        assert torch.equal(ops.fused_experts(x, *packed, ids.int(), weights), got)
        out = torch.full((T, D), NAN, dtype=dtype)
        assert ops.fused_experts(x, *packed, ids, weights, out=out) is out
        assert torch.equal(out, got)
        assert got[(ids < 0).all(dim=1)].eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_experts_row_is_bitwise_its_own(dtype, threads):
    E, I, D, S, T = 6, 40, 48, 2, 60
    packed = (
        ops.pack_expert_weights((torch.randn(E, 2 * I, D) / 8).to(dtype), gated=True),
        ops.pack_expert_weights((torch.randn(E, D, I) / 8).to(dtype)),
    )
    x, ids, weights = torch.randn(T, D).to(dtype), torch.rand(T, E).topk(S).indices, torch.rand(T, S)
    ids[7], ids[9, 1] = -1, -1
    x[7] = NAN
    got = ops.fused_experts(x, *packed, ids, weights)
    assert got[7].eq(0).all()
    assert not got.isnan().any()
    alone = torch.cat([ops.fused_experts(x[t : t + 1], *packed, ids[t : t + 1], weights[t : t + 1]) for t in range(T)])
    assert torch.equal(got, alone)
    order = torch.randperm(T)
    assert torch.equal(ops.fused_experts(x[order], *packed, ids[order], weights[order]), got[order])


def test_fused_experts_misuse():
    w13, w2 = torch.randn(4, 32, 8), torch.randn(4, 8, 16)
    packed = ops.pack_expert_weights(w13, gated=True), ops.pack_expert_weights(w2)
    x, weights = torch.randn(2, 8), torch.rand(2, 1)
    for bad in (4, -2):
        with pytest.raises(AssertionError, match=f"{bad}.* 4 experts"):
            ops.fused_experts(x, *packed, torch.tensor([[0], [bad]]), weights)
    with pytest.raises(AssertionError, match=r"9.*8"):
        ops.fused_experts(torch.randn(2, 9), *packed, torch.zeros(2, 1, dtype=torch.int64), weights)
    with pytest.raises(AssertionError, match="gated"):
        ops.fused_experts(x, packed[1], packed[1], torch.zeros(2, 1, dtype=torch.int64), weights)


# ---------------------------------------------------------------------------------------------------------------------
# Matrix unit


@pytest.fixture(scope="module")
def matrix_unit(tmp_path_factory):
    """The linear kernels built with the matrix unit's instructions emulated in C++."""
    if ops._kernels().vc_panel_width(None) != 32:
        pytest.skip("the matrix unit's panels are those of 512-bit registers")
    folder = tmp_path_factory.mktemp("amx")
    flags = [flag for flag in build.FLAGS if flag != "-O3"]
    sources = [str(build.SOURCE_DIR / f"{name}.cpp") for name in ("linear", "quantized", "kernels", "pool")]
    command = [build._compiler(), "-O1", *flags, "-DAMX_EMULATED", "-shared", *sources, "-o", str(folder / "amx.so")]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(folder / "amx.so"))
    for name in ("vc_pack", "vc_linear", "vc_embedding", "vc_fused_experts"):
        getattr(library, name).argtypes = [ctypes.c_char_p]
    assert library.vc_matrix_unit(None) == 1
    return library


def test_matrix_unit_linear(matrix_unit, monkeypatch, threads):
    monkeypatch.setattr(ops, "_kernels", lambda: matrix_unit)
    for N, K in ((96, 64), (70, 33), (33, 100), (5, 1)):
        weight, bias = torch.randn(N, K).bfloat16(), torch.randn(N).bfloat16()
        packed = ops.pack_linear_weight(weight)
        assert torch.equal(ops.embedding(torch.arange(N), packed), weight)
        x = wide_rows(200, K, torch.bfloat16)
        want = x.double() @ weight.double().T + bias.double()
        magnitude = x.double().abs() @ weight.double().abs().T + bias.double().abs()
        alone = torch.cat([ops.linear(row, packed, bias) for row in x.split(1)])
        assert_close(alone, want, magnitude)
        for M in (2, 15, 16, 17, 31, 32, 33, 48, 97, 200):
            assert torch.equal(ops.linear(x[:M], packed, bias), alone[:M]), M


def test_matrix_unit_experts(matrix_unit, monkeypatch, threads):
    monkeypatch.setattr(ops, "_kernels", lambda: matrix_unit)
    E, I, D, S, T = 3, 40, 50, 2, 70
    w13, w2 = (torch.randn(E, 2 * I, D) / 8).bfloat16(), (torch.randn(E, D, I) / 8).bfloat16()
    x, ids, weights = torch.randn(T, D).bfloat16(), torch.rand(T, E).topk(S).indices, torch.rand(T, S)
    ids[4] = -1
    want, magnitude = naive_experts(x, w13, w2, ids, weights)
    x[4] = NAN
    got = ops.fused_experts(x, ops.pack_expert_weights(w13, True), ops.pack_expert_weights(w2), ids, weights)
    assert_close(got, want, magnitude * (1 + 4 * torch.finfo(torch.bfloat16).eps / SUM))


# ---------------------------------------------------------------------------------------------------------------------
# Poison, twins, build


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", poison.PATTERNS, ids=hex)
def test_nothing_uninitialised_is_read(dtype, pattern, request):
    """Neither of what torch hands out nor of the kernels' scratch, which other sizes have used before."""
    poison.start(pattern)
    request.addfinalizer(poison.stop)
    x = torch.randn(21, 48).to(dtype)
    packed = ops.pack_linear_weight(torch.randn(70, 48).to(dtype))
    results = [
        ops.linear(x, packed),
        ops.embedding(torch.arange(70), packed),
        ops.rms_norm(x, torch.randn(48).to(dtype), 1e-6),
        ops.silu_and_mul(x),
        ops.gelu_tanh_and_mul(x),
        Paged([70, 3], [70, 1], 4, 2, 80, 16, dtype, pad_rows=2).run(),
        Paged([1100, 600], [1, 2], 4, 2, 80, 16, dtype, pad_rows=2).run(),
        ops.fused_experts(
            x,
            ops.pack_expert_weights(torch.randn(3, 20, 48).to(dtype), gated=True),
            ops.pack_expert_weights(torch.randn(3, 48, 10).to(dtype)),
            torch.randint(-1, 3, (21, 2)),
            torch.rand(21, 2),
        ),
    ]
    assert not any(result.isnan().any() for result in results)


# By dtype: canonical, quiet and signalling with a payload in the low bits, all ones, negative signalling. An exp that
# adds to the exponent, or a rounding by carry, makes numbers of some of them.
NANS = {
    torch.float32: [0x7FC00000, 0x7FC00001, 0x7F800101, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001],
    torch.bfloat16: [0x7FC0, 0x7FC1, 0x7F81, 0x7FFF, 0xFFFF, 0xFF81],
    torch.float16: [0x7E00, 0x7E01, 0x7C01, 0x7FFF, 0xFFFF, 0xFC01],
}
EACH_NAN = [(dtype, bits) for dtype, patterns in NANS.items() for bits in patterns]


def put(tensor: Tensor, place, bits: int) -> None:
    """``tensor[place]`` becomes the NaN of these bits, without arithmetic that would change them."""
    kind = {4: torch.int32, 2: torch.int16}[tensor.element_size()]
    limit = 1 << (8 * tensor.element_size())
    tensor.view(kind)[place] = bits - limit if bits >= limit // 2 else bits
    assert tensor[place].isnan().all()


@pytest.mark.parametrize(("dtype", "bits"), EACH_NAN, ids=str)
@pytest.mark.parametrize("attention", [ops.paged_attention, reference.paged_attention])
def test_paged_attention_shows_every_nan(attention, dtype, bits):
    """In q or k: all of the row's output; in v: that column. For prefill, decode, a window, and beyond one split."""
    for lens, queries, window, more in (
        ([40, 90], [40, 1], 0, {}),
        ([1300], [1], 0, {}),
        ([1300], [1], 700, {}),
        ([20], [20], 8, {}),
        ([20], [20], 0, {"sinks": True, "cap": 5.0}),
    ):
        make = functools.partial(Paged, lens, queries, 4, 2, 32, 16, dtype, **more)
        r, position = len(lens) - 1, lens[-1] - 5
        case = make()
        clean = case.run(window, attention=attention)
        block, offset = int(case.table[r, position // 16]), position % 16
        sees = sum(queries) - 1  # the last query
        put(case.key_cache, (block, 1, offset, 3), bits)
        got = case.run(window, attention=attention)
        assert got[sees, 2:].isnan().all(), f"heads {got[sees, 2:]}"
        assert torch.equal(got[sees, :2], clean[sees, :2])
        case = make()
        put(case.value_cache, (block, 1, offset, 3), bits)
        got = case.run(window, attention=attention)
        assert got[sees, 2:, 3].isnan().all()
        if attention is ops.paged_attention:  # the twin multiplies what is masked by 0
            assert got[sees].isnan().sum() == 2
        case = make()
        case.q = case.q.clone()
        put(case.q, (sees, 1, 7), bits)
        got = case.run(window, attention=attention)
        assert got[sees, 1].isnan().all()
        assert torch.equal(got[sees, 2:], clean[sees, 2:])


@pytest.mark.parametrize(("dtype", "bits"), EACH_NAN, ids=str)
def test_every_kernel_shows_every_nan(dtype, bits):
    """Each operand in turn; where the exact result has a NaN the kernel's has one, and nowhere else."""

    def check(op, *tensors: Tensor) -> None:
        for i in range(len(tensors)):
            given = [t.clone() for t in tensors]
            put(
                given[i],
                tuple(n // 2 for n in given[i].shape),
                bits if given[i].dtype is dtype else NANS[given[i].dtype][3],
            )
            want = op(*(t.double() for t in given))
            assert want.isnan().any()
            assert torch.equal(op(*given).isnan(), want.isnan()), f"operand {i}"

    def linear(x, weight, bias):
        if x.dtype is torch.float64:
            return torch.nn.functional.linear(x, weight, bias)
        return ops.linear(x, ops.pack_linear_weight(weight), bias)

    def rms_norm(x, weight):
        return (reference.rms_norm if x.dtype is torch.float64 else ops.rms_norm)(x, weight, 1e-6)

    def add_norm(x, residual, weight):
        op = reference.fused_add_rms_norm if x.dtype is torch.float64 else ops.fused_add_rms_norm
        return torch.cat(op(x, residual, weight, 1e-6))

    def silu(x):
        return (reference.silu_and_mul if x.dtype is torch.float64 else ops.silu_and_mul)(x)

    def gelu(x):
        return (reference.gelu_tanh_and_mul if x.dtype is torch.float64 else ops.gelu_tanh_and_mul)(x)

    def rotary(q, k):
        op = reference.rotary_embedding if q.dtype is torch.float64 else ops.rotary_embedding
        cache = torch.rand(9, 8, generator=torch.Generator().manual_seed(0))
        op(torch.arange(5), q, k, cache)
        return torch.cat((q, k), dim=1)

    def experts(x, w13, w2, weights):
        ids = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [1, 2]])
        if x.dtype is torch.float64:
            return naive_experts(x, w13, w2, ids, weights)[0]
        return ops.fused_experts(x, ops.pack_expert_weights(w13, True), ops.pack_expert_weights(w2), ids, weights)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    check(linear, randn(5, 33), randn(40, 33), randn(40))
    check(rms_norm, randn(5, 40), randn(40))
    check(rms_norm, randn(5, 40), torch.randn(40))  # a wide NaN is rounded to the narrow type
    check(add_norm, randn(5, 40), randn(5, 40), randn(40))
    check(silu, randn(5, 80))
    check(gelu, randn(5, 80))
    check(rotary, randn(5, 3, 8), randn(5, 2, 8))
    check(experts, randn(5, 32), randn(3, 40, 32), randn(3, 32, 20), torch.rand(5, 2))


def test_a_tensor_of_another_device_is_an_error():
    """Not a crash: its address means nothing to the kernels. The meta device stands for all others."""
    packed = ops.pack_linear_weight(torch.randn(8, 16))
    w13, w2 = ops.pack_expert_weights(torch.randn(4, 32, 8), True), ops.pack_expert_weights(torch.randn(4, 8, 16))
    far = functools.partial(torch.zeros, device="meta")
    ids, slots, cache = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), torch.zeros(3, 1, 8, 16)
    tables = [torch.tensor(t, dtype=torch.int32) for t in ([[1, 1]], [0, 2], [2])]
    heads = torch.randn(2, 1, 16)
    calls = [
        lambda: ops.pack_linear_weight(far(8, 16)),
        lambda: ops.linear(far(2, 16), packed),
        lambda: ops.linear(torch.randn(2, 16), packed, far(8)),
        lambda: ops.embedding(ids.to("meta"), packed),
        lambda: ops.rms_norm(far(2, 16), torch.ones(16), 1e-6),
        lambda: ops.rms_norm(torch.randn(2, 16), far(16), 1e-6),
        lambda: ops.fused_add_rms_norm(torch.randn(2, 16), far(2, 16), torch.ones(16), 1e-6),
        lambda: ops.silu_and_mul(far(2, 16)),
        lambda: ops.gelu_tanh_and_mul(far(2, 16)),
        lambda: ops.rotary_embedding(ids, heads, heads.clone(), far(4, 16)),
        lambda: ops.reshape_and_cache(heads, heads, cache, cache.to("meta"), slots),
        lambda: ops.paged_attention(heads, cache.to("meta"), cache, *tables, 1.0, torch.empty_like(heads)),
        lambda: ops.paged_attention(
            heads, cache, cache, tables[0].to("meta"), *tables[1:], 1.0, torch.empty_like(heads)
        ),
        lambda: ops.fused_experts(far(2, 8), w13, w2, ids[:, None], torch.ones(2, 1)),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"on meta: move it"):
            call()


# ---------------------------------------------------------------------------------------------------------------------
# Threads


def kernel_threads() -> list[int]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # one that has just ended
            if (task / "comm").read_text().strip() == "vllm-kernels":
                found.append(int(task.name))
    return found


def test_callers_on_several_threads(threads):
    """One has the workers, the others compute alone: all right at the same time."""
    packed, x = ops.pack_linear_weight(torch.randn(700, 200)), torch.randn(40, 200)
    want = ops.linear(x, packed)
    with ThreadPoolExecutor(4) as executor:
        results = list(executor.map(lambda _: ops.linear(x, packed), range(200)))
    assert all(torch.equal(result, want) for result in results)


def test_a_forked_process_makes_its_own_threads():
    torch.set_num_threads(2)
    packed, x = ops.pack_linear_weight(torch.randn(700, 200)), torch.randn(40, 200)
    want = ops.linear(x, packed)
    assert kernel_threads()
    pid = os.fork()
    if pid == 0:
        right = not kernel_threads() and all(torch.equal(ops.linear(x, packed), want) for _ in range(20))
        os._exit(0 if right and len(kernel_threads()) == 1 else 1)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.alone
def test_a_thread_that_is_put_off_holds_nobody_up():
    """Beside a busy neighbour of far more weight the worker hardly ever runs; the caller then computes alone. A team
    that waits for all its threads takes a hundred times as long."""
    packed, x = ops.pack_linear_weight(torch.randn(3072, 576)), torch.randn(1, 576)

    def median_s() -> float:
        times = []
        for _ in range(40):
            start = time.perf_counter()
            ops.linear(x, packed)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    torch.set_num_threads(1)
    alone = median_s()
    torch.set_num_threads(2)
    ops.linear(x, packed)
    core = max(os.sched_getaffinity(0))
    neighbour = subprocess.Popen([sys.executable, "-c", "while 1: pass"])
    try:
        os.sched_setaffinity(neighbour.pid, {core})
        for worker in kernel_threads():
            os.sched_setaffinity(worker, {core})
            os.sched_setscheduler(worker, os.SCHED_IDLE, os.sched_param(0))
        crowded = median_s()
    finally:
        neighbour.kill()
        neighbour.wait()
        for worker in kernel_threads():
            os.sched_setaffinity(worker, os.sched_getaffinity(0))
            os.sched_setscheduler(worker, os.SCHED_OTHER, os.sched_param(0))
    assert crowded < 8 * alone + 1e-3, f"{crowded * 1e3:.2f} ms beside a busy neighbour, {alone * 1e3:.2f} ms alone"


@pytest.mark.parametrize("first", ["torch", "vllm"])
def test_waiting_threads_sleep(first):
    """The kernels' and torch's own, whichever is imported first: no core is kept busy between operations."""
    process = python(
        f"""
        import {first}
        import os, time, torch
        from vllm.kernels.cpu import ops
        torch.set_num_threads(2)
        assert ops.kernels_available()
        packed, x, row = ops.pack_linear_weight(torch.randn(3072, 576)), torch.randn(1 << 18), torch.randn(1, 576)
        for op in (lambda: ops.linear(row, packed), x.exp):
            op()
            waits = 0.0
            for _ in range(20):
                op()
                start = time.process_time()
                time.sleep(0.01)
                waits += time.process_time() - start
            print(f"{{waits / 20 * 1e3:.3f}}")
        """,
        OMP_WAIT_POLICY=None,
        GOMP_SPINCOUNT=None,
        OMP_NUM_THREADS=None,
    )
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    kernels_ms, torch_ms = map(float, output.splitlines()[-2:])
    assert kernels_ms < 1, f"the kernels' threads are busy for {kernels_ms} ms of a wait of 10"
    assert torch_ms < 1, f"torch's threads are busy for {torch_ms} ms of a wait of 10"


def test_twins_run_where_there_are_no_kernels(monkeypatch):
    """The public functions on the twins' path, dtype by dtype, against the same references."""
    monkeypatch.setenv("VLLM_KERNELS", "reference")
    table.choose.cache_clear()
    for dtype in DTYPES:
        weight, x = torch.randn(24, 16).to(dtype), torch.randn(5, 16).to(dtype)
        packed = operators.pack_linear_weight(weight)
        assert packed.kind == "plain"
        magnitude = x.double().abs() @ weight.double().abs().T
        assert_close(operators.linear(x, packed), x.double() @ weight.double().T, magnitude)
        out = torch.empty(5, 24)
        assert operators.linear(x, packed, out=out) is out
        assert torch.equal(operators.embedding(torch.tensor([3, 0]), packed), weight[[3, 0]])
        want = reference.rms_norm(x.double(), x[0].double(), 1e-6)
        assert_close(operators.rms_norm(x, x[0], 1e-6), want, 2 * want.abs(), roundings=2)
        residual = x.clone()
        assert operators.fused_add_rms_norm(x, residual, x[0], 1e-6)[1] is residual
        assert_close(residual, 2 * x.double())
        for name in ("silu_and_mul", "gelu_tanh_and_mul"):
            want = getattr(reference, name)(x.double())
            # 1 + tanh cancels where the gate is negative: the twin's error is one of the larger sum
            assert_close(getattr(operators, name)(x), want, 4 * want.abs() + 1, roundings=2)
        case = Paged([40, 9], [7, 1], 4, 2, 32, 8, dtype, pad_rows=2)
        want, magnitude = case.want(9)
        assert_close(case.run(9, attention=operators.paged_attention), want, 8 * magnitude)
        w13, w2 = torch.randn(3, 20, 16).to(dtype), torch.randn(3, 16, 10).to(dtype)
        ids, weights = torch.tensor([[0, 2], [-1, 1], [-1, -1], [1, 0], [2, 1]]), torch.rand(5, 2)
        want, magnitude = naive_experts(x, w13, w2, ids, weights)
        weights[ids < 0] = NAN
        got = operators.fused_experts(
            x, operators.pack_expert_weights(w13, True), operators.pack_expert_weights(w2), ids, weights
        )
        assert_close(got, want, magnitude * (1 + 8 * torch.finfo(dtype).eps / SUM))


def python(code: str, **env: str | None) -> subprocess.Popen:
    """A process over this one's variables and ``env``, in which None unsets."""
    root = str(Path(ops.__file__).parents[3])
    variables = {**os.environ, "PYTHONPATH": root, **env}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={name: value for name, value in variables.items() if value is not None},
    )


def test_where_plain_torch_is_asked_for_nothing_is_built(tmp_path):
    process = python(
        """
        import torch
        from vllm.kernels import ops
        packed = ops.pack_linear_weight(torch.eye(4))
        assert packed.kind == "plain"
        assert torch.equal(ops.linear(torch.eye(4), packed), torch.eye(4))
        assert ops.preferred_block_size("cpu", 64, 16) == 16
        """,
        VLLM_KERNELS="reference",
        VLLM_CACHE_ROOT=str(tmp_path),
    )
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert not list(tmp_path.iterdir())


def test_four_processes_build_once(tmp_path):
    """One compiler run for all."""
    compiler, source, cache = tmp_path / "cxx", tmp_path / "source", tmp_path / "cache"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/runs\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    source.mkdir()
    (source / "seven.cpp").write_text('extern "C" __attribute__((visibility("default"))) int seven() { return 7; }')
    code = f"""
        import pathlib
        from vllm.kernels.cpu import build
        build.SOURCE_DIR = pathlib.Path({str(source)!r})
        assert build.load().seven() == 7
    """
    processes = [python(code, VLLM_CACHE_ROOT=str(cache), CXX=str(compiler)) for _ in range(4)]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    runs = [line for line in (tmp_path / "runs").read_text().splitlines() if line != "--version"]
    assert len(runs) == 2, runs  # one source, one link
    assert sorted(path.suffix for path in (cache / "kernels").iterdir()) == [".lock", ".so"]


@pytest.mark.parametrize("fault", ["none", "broken", "readonly"])
def test_no_build_falls_back_with_one_line(fault, tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no such luck >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/proc/nowhere" if fault == "readonly" else str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(broken) if fault == "broken" else "")
    if fault == "none":
        monkeypatch.setenv("PATH", str(tmp_path))
    lines: list[str] = []
    monkeypatch.setattr(build.logger, "warning", lambda message, *args: lines.append(message % args))
    assert build.load() is None
    assert len(lines) == 1
    reason = {"none": "no C++ compiler", "broken": "no such luck", "readonly": "/proc/nowhere"}[fault]
    assert reason in lines[0]


def test_a_changed_source_gets_another_name(monkeypatch, tmp_path):
    """No stale library: the name follows the sources and the flags."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_compile", lambda compiler, target: target.touch())
    first = build.build()
    assert build.build() == first
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DOTHER"))
    second = build.build()
    monkeypatch.setattr(build, "SOURCE_DIR", tmp_path)
    (tmp_path / "one.cpp").write_text("// one")
    third = build.build()
    (tmp_path / "one.cpp").write_text("// two")
    assert len({first, second, third, build.build()}) == 4


# ---------------------------------------------------------------------------------------------------------------------
# The likeliest token


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_max_is_the_first_of_the_largest(dtype, threads):
    for V in (1, 5, 64, 8192, 8193, 50001):
        logits = wide_rows(7, V, dtype)
        logits[1] = logits[1, 0]
        logits[2, V // 2 :] = 90.0
        logits[3] = -torch.inf
        logits[4, [0, -1]] = torch.inf
        logits[5, V // 3] = NAN
        values, ids = ops.row_max(logits)
        clean = [0, 1, 2, 3, 4, 6]
        top = logits.double().amax(1)
        assert torch.equal(values[clean].double(), top[clean])
        assert torch.equal(ids[clean], (logits.double() == top[:, None]).int().argmax(1)[clean])
        assert values[5].isnan()
        assert 0 <= ids[5] < V
    assert [x.shape for x in ops.row_max(torch.empty(0, 9))] == [(0,), (0,)]


# ---------------------------------------------------------------------------------------------------------------------
# Lists of operators


def test_a_list_of_operators_runs_in_order_up_to_the_first_that_refuses():
    library, table, ids = ops._kernels(), ops.pack_linear_weight(torch.randn(10, 40)), torch.tensor([7, 0, 9])
    weight, rows, out = torch.randn(40), torch.empty(3, 40), torch.full((3, 20), NAN)
    records = {
        "vc_embedding": ops._i10(0, 3, 10, 40, ids.data_ptr(), table.address, rows.data_ptr(), 1, 0, 0),
        "vc_rms_norm": ops._i15_f(
            0, 0, 3, 1, 40, rows.data_ptr(), 40, 0, 0, 0, weight.data_ptr(), rows.data_ptr(), 40, 0, 1, 1e-6
        ),
        "vc_silu_and_mul": ops._i8(0, 3, 20, rows.data_ptr(), 40, out.data_ptr(), 20, 1),
    }
    kept = [ctypes.create_string_buffer(record) for record in records.values()]
    places = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in records]
    calls = torch.tensor([[place, ctypes.addressof(record)] for place, record in zip(places, kept, strict=True)])

    def run(count: int) -> int:
        return library.vc_run(struct.pack("2q", count, calls.data_ptr()))

    assert run(0) == 0
    assert out.isnan().all()
    assert run(3) == 0
    assert out.equal(ops.silu_and_mul(ops.rms_norm(ops.embedding(ids, table), weight, 1e-6)))
    ids[1] = 10
    assert run(3) == 1
    calls = calls.flip(0)
    assert run(3) == 3
