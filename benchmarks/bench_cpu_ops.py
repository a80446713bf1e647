# SPDX-License-Identifier: Apache-2.0
"""Measures each CPU kernel beside torch's way of doing the same, in GF/s and GB/s.

    python benchmarks/bench_cpu_ops.py [--dtype bfloat16] [--only linear,attention,experts,rows,calls]

Weights and caches rotate through more memory than the caches of the processor hold, as the layers of a model do. The
figure is the best of several rounds: on a shared machine the others measure the neighbours.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from vllm.kernels.cpu import ops

COLD_BYTES = 256 << 20


def best_seconds(call: Callable[[int], object], budget_s: float = 0.4) -> float:
    """Best time of ``call(i)``, i = 0, 1, ...; each round lasts at least 2 ms."""
    call(0)
    start = time.perf_counter()
    call(1)
    once = time.perf_counter() - start
    loops = max(1, int(0.002 / max(once, 1e-9)))
    best, end, i = float("inf"), time.perf_counter() + budget_s, 0
    while time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(loops):
            call(i)
            i += 1
        best = min(best, (time.perf_counter() - start) / loops)
    return best


def report(name: str, ours: float, theirs: float | None, flops: float = 0, moved: float = 0) -> None:
    rate = f"{flops / ours / 1e9:8.1f} GF/s" if flops else " " * 13
    rate += f" {moved / ours / 1e9:7.1f} GB/s" if moved else ""
    other = f"torch {theirs * 1e6:10.1f} us  {theirs / ours:5.2f}x" if theirs else ""
    print(f"{name:44s} {ours * 1e6:10.1f} us {rate:30s} {other}", flush=True)


def bench_linear(dtype: torch.dtype) -> None:
    size = dtype.itemsize
    for N, K in ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)):
        copies = max(1, COLD_BYTES // (N * K * size))
        weights = [torch.randn(N, K).to(dtype) for _ in range(min(copies, 24))]
        packed = [ops.pack_linear_weight(w) for w in weights]
        n = len(weights)
        for M in (1, 4, 8, 16, 32, 64, 256, 2048):
            if N == 49152 and M > 32:
                continue
            x = torch.randn(M, K).to(dtype)
            ours = best_seconds(lambda i, x=x, p=packed, n=n: ops.linear(x, p[i % n]))
            theirs = best_seconds(lambda i, x=x, w=weights, n=n: F.linear(x, w[i % n]))
            report(f"linear M={M} N={N} K={K}", ours, theirs, 2 * M * N * K, size * (N * K + M * N + M * K))


def bench_attention(dtype: torch.dtype) -> None:
    H, J, D, bs = 9, 3, 64, 16
    for R, query, length in (
        (32, 1, 96),
        (32, 1, 512),
        (1, 1, 512),
        (1, 1, 4096),
        (1, 512, 512),
        (4, 512, 512),
        (1, 64, 2048),
    ):
        per_request = -(-length // bs)
        blocks = max(R * per_request + 1, COLD_BYTES // (2 * J * bs * D * dtype.itemsize))
        size = blocks * J * bs * D
        key_cache, value_cache = (ops.huge_page_empty(size, dtype).normal_().view(blocks, J, bs, D) for _ in range(2))
        order = torch.randperm(blocks - 1) + 1
        tables = [
            order[i * R * per_request : (i + 1) * R * per_request].view(R, per_request).int()
            for i in range((blocks - 1) // (R * per_request))
        ]
        q = torch.randn(R * query, H, D).to(dtype)
        out = torch.empty_like(q)
        start = torch.arange(R + 1, dtype=torch.int32) * query
        lens = torch.full((R,), length, dtype=torch.int32)
        n = len(tables)

        def run(
            i: int,
            f: Callable = ops.paged_attention,
            tables=tables,
            n=n,
            a=(q, key_cache, value_cache),
            b=(start, lens),
            o=out,
        ) -> None:
            f(*a, tables[i % n], *b, D**-0.5, o)

        ours, theirs = best_seconds(run), best_seconds(lambda i, run=run: run(i, ops.paged_attention_ref))
        seen = query * (2 * length - query + 1) / 2
        moved = R * 2 * J * length * D * dtype.itemsize
        report(f"attention {R} x {query} queries, {length} keys", ours, theirs, 4 * R * H * D * seen, moved)


def bench_experts(dtype: torch.dtype) -> None:
    E, S, I, D = 16, 4, 512, 1024
    w13, w2 = torch.randn(E, 2 * I, D).to(dtype) / 32, torch.randn(E, D, I).to(dtype) / 32
    packed13, packed2 = ops.pack_expert_weights(w13, gated=True), ops.pack_expert_weights(w2)
    plain13 = ops.PackedExperts(E, 2 * I, D, dtype, w13, "plain", True)
    plain2 = ops.PackedExperts(E, D, I, dtype, w2, "plain", False)
    for T in (1, 8, 32, 512):
        x = torch.randn(T, D).to(dtype)
        ids = torch.rand(T, E).topk(S).indices
        weights = torch.rand(T, S)
        ours = best_seconds(lambda i, x=x, a=(ids, weights): ops.fused_experts(x, packed13, packed2, *a))
        theirs = best_seconds(lambda i, x=x, a=(ids, weights): ops.fused_experts_ref(x, plain13, plain2, *a))
        moved = ids.unique().numel() * 3 * I * D * dtype.itemsize
        report(f"experts T={T} E={E} S={S} I={I} D={D}", ours, theirs, 6 * T * S * I * D, moved)


def bench_rows(dtype: torch.dtype) -> None:
    H, J, D, P = 9, 3, 64, 2048
    weight, cos_sin = torch.randn(576).to(dtype), torch.randn(P, D)
    for T in (1, 32, 2048):
        x, residual = torch.randn(T, 576).to(dtype), torch.randn(T, 576).to(dtype)
        size = x.nbytes
        report(
            f"rms_norm T={T}",
            best_seconds(lambda i, x=x: ops.rms_norm(x, weight, 1e-5)),
            best_seconds(lambda i, x=x: ops.rms_norm_ref(x, weight, 1e-5)),
            moved=2 * size,
        )
        report(
            f"fused_add_rms_norm T={T}",
            best_seconds(lambda i, x=x, r=residual: ops.fused_add_rms_norm(x, r, weight, 1e-5)),
            best_seconds(lambda i, x=x, r=residual: ops.fused_add_rms_norm_ref(x, r, weight, 1e-5)),
            moved=4 * size,
        )
        gate_up = torch.randn(T, 3072).to(dtype)
        report(
            f"silu_and_mul T={T}",
            best_seconds(lambda i, x=gate_up: ops.silu_and_mul(x)),
            best_seconds(lambda i, x=gate_up: ops.silu_and_mul_ref(x)),
            moved=gate_up.nbytes * 1.5,
        )
        qkv = torch.randn(T, (H + 2 * J) * D).to(dtype)
        q, k, v = (part.unflatten(1, (-1, D)) for part in qkv.split((H * D, J * D, J * D), dim=1))
        positions = torch.randint(0, P, (T,))
        a = (positions, q, k, cos_sin)
        report(
            f"rotary_embedding T={T}",
            best_seconds(lambda i, a=a: ops.rotary_embedding(*a)),
            best_seconds(lambda i, a=a: ops.rotary_embedding_ref(*a)),
            moved=2 * q.nbytes + 2 * k.nbytes,
        )
        caches = [torch.zeros(256, J, 16, D).to(dtype) for _ in range(2)]
        b = (k, v, *caches, torch.randperm(4096)[:T])
        report(
            f"reshape_and_cache T={T}",
            best_seconds(lambda i, b=b: ops.reshape_and_cache(*b)),
            best_seconds(lambda i, b=b: ops.reshape_and_cache_ref(*b)),
            moved=4 * k.nbytes,
        )
    table = torch.randn(49152, 576).to(dtype)
    packed = ops.pack_linear_weight(table)
    for T in (1, 32, 2048):
        ids = torch.randint(0, 49152, (T,))
        report(
            f"embedding T={T}",
            best_seconds(lambda i, ids=ids: ops.embedding(ids, packed)),
            best_seconds(lambda i, ids=ids: F.embedding(ids, table)),
            moved=2 * T * 576 * dtype.itemsize,
        )


def bench_calls(dtype: torch.dtype) -> None:
    """The cost of a call itself: shapes so small that nothing else is left."""
    one = torch.zeros(1, 64).to(dtype)
    weight = torch.ones(64).to(dtype)
    packed = ops.pack_linear_weight(torch.zeros(64, 64).to(dtype))
    q, k = torch.zeros(1, 1, 64).to(dtype), torch.zeros(1, 1, 64).to(dtype)
    caches = [torch.zeros(2, 1, 16, 64).to(dtype) for _ in range(2)]
    table, start, lens = torch.ones(1, 1).int(), torch.tensor([0, 1]).int(), torch.tensor([1]).int()
    slots, positions, cos_sin = torch.tensor([16]), torch.tensor([0]), torch.zeros(4, 64)
    residual, gate_up, out = one.clone(), torch.zeros(1, 128).to(dtype), torch.empty_like(q)
    calls: dict[str, Callable[[int], object]] = {
        "linear": lambda i: ops.linear(one, packed),
        "fused_add_rms_norm": lambda i: ops.fused_add_rms_norm(one, residual, weight, 1e-5),
        "silu_and_mul": lambda i: ops.silu_and_mul(gate_up),
        "rotary_embedding": lambda i: ops.rotary_embedding(positions, q, k, cos_sin),
        "reshape_and_cache": lambda i: ops.reshape_and_cache(k, k, *caches, slots),
        "paged_attention": lambda i: ops.paged_attention(q, *caches, table, start, lens, 0.125, out),
    }
    seconds = {name: best_seconds(call, 0.2) for name, call in calls.items()}
    for name, value in seconds.items():
        report(f"call of {name}", value, None)
    layer = seconds["linear"] * 4 + seconds["fused_add_rms_norm"] * 2 + sum(list(seconds.values())[2:])
    print(f"one decode step of 30 layers spends {layer * 30e3:.2f} ms in calls")


BENCHES = {
    "calls": bench_calls,
    "linear": bench_linear,
    "attention": bench_attention,
    "experts": bench_experts,
    "rows": bench_rows,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--only", default=",".join(BENCHES), help="comma-separated part of: " + ", ".join(BENCHES))
    args = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, {args.dtype}, kernels: {ops.kernels_available()}")
    torch.manual_seed(0)
    for name in args.only.split(","):
        if name not in BENCHES:
            parser.error(f"unknown bench {name!r}; known: {', '.join(BENCHES)}")
        BENCHES[name](getattr(torch, args.dtype))


if __name__ == "__main__":
    main()
