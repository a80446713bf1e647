# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels as an Arc B60 would get them, compiled without one to SPIR-V; run with the unpacked ``triton-xpu``
wheel in front of ``PYTHONPATH``. A line for each: name, bytes, and whether it multiplies on the matrix unit.

What asks the driver which card there is has a stand-in. That wheel is older than the release whose ``triton.knobs`` the
kernels read."""

from __future__ import annotations

import sys
import types
from typing import Any

import compiling
import torch
import triton
from triton.backends import backends
from triton.backends.compiler import GPUTarget

from vllm.kernels import weights
from vllm.kernels.triton import activation, attention, cache, experts, gdn, norms, rotary, routing, sampling

triton.knobs = types.SimpleNamespace(runtime=types.SimpleNamespace(interpret=False))
(intel,) = (found.compiler for found in backends.values() if found.compiler.__name__ == "XPUBackend")
intel.__init__.__globals__["compile_module_from_src"] = lambda *_: types.SimpleNamespace(parse_device_arch=lambda _: "")
MATRIX = "has_subgroup_matrix_multiply_accumulate"
B60 = {
    "name": "Intel(R) Arc(TM) Pro B60 Graphics", "max_work_group_size": 1024, "max_num_sub_groups": 64,
    "sub_group_sizes": [16, 32], "has_fp64": True, "has_bfloat16_conversions": True, "has_subgroup_2d_block_io": True,
    MATRIX: True, f"{MATRIX}_tensor_float32": True,
}  # fmt: skip
TARGET = GPUTarget("xpu", B60, 32)
T, BF16 = 26, torch.bfloat16


def new(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def attend(
    T: int, R: int, H: int, J: int, D: int, DV: int, page: int = 16, window: int = 0, sinks: bool = False,
    cap: float = 0.0, dtype: torch.dtype = BF16,
) -> None:  # fmt: skip
    q, keys, values, out = new(T, H, D), new(9, J, page, D), new(9, J, page, DV), new(T, H, DV)
    q, keys, values, out = (x.to(dtype) for x in (q, keys, values, out))
    table, starts, lens = (new(*shape, dtype=torch.int32) for shape in ((R, 256), (R + 1,), (R,)))
    some = new(H, dtype=dtype) if sinks else None
    attention.paged_attention(q, keys, values, table, starts, lens, 1.0, out, window, None, some, cap)


def run_experts(T: int, dtype: torch.dtype = BF16) -> None:
    w13, w2 = new(64, 1536, 2048, dtype=dtype), new(64, 2048, 768, dtype=dtype)
    ids, shares = new(T, 8, dtype=torch.int32), new(T, 8, dtype=torch.float32)
    packed = weights.pack_expert_weights(w13, True), weights.pack_expert_weights(w2)
    experts.fused_experts(new(T, 2048, dtype=dtype), *packed, ids, shares)


def run_delta_net() -> None:
    G, H, D, K, small = 16, 32, 128, 4, torch.float32
    C = 2 * G * D + H * D
    of = weights.GDNWeights(
        new(K, C, dtype=small), new(H, dtype=small), new(H, dtype=small), new(D, dtype=small), 1e-6, G, D
    )
    tables = new(4, dtype=torch.int32), new(3, dtype=torch.int32)
    gdn.gated_delta_net(new(T, C + H * D + 2 * H), of, new(8, K - 1, C), new(8, H, D, D, dtype=small), *tables)


def run_sampling(dtype: torch.dtype = BF16) -> None:
    logits, real, whole = new(T, 151936, dtype=dtype), new(T, dtype=torch.float32), new(T, dtype=torch.int64)
    sampling.row_max(logits)
    sampling.sample(logits, real, whole, real, whole, whole, whole, real, real)
    sampling.log_probabilities(logits, 20, whole)
    if dtype is torch.float32:
        sampling.apply_penalties(logits, new(T + 1, dtype=torch.int32), whole, real, real, real, real)


qkv, ids = new(T, 48, 128), new(T, dtype=torch.int64)
wide = new(4096, 128, dtype=torch.float32)
embed, sample = (sys.modules[f"vllm.kernels.triton.{name}"] for name in ("embedding", "sampling"))
CALLS: list[tuple[Any, Any]] = [
    (norms, lambda: norms.rms_norm(qkv[:, :32], new(128, dtype=torch.float32), 1e-6)),
    (norms, lambda: norms.fused_add_rms_norm(new(T, 2048), new(T, 2048), new(2048), 1e-6)),
    (activation, lambda: activation.silu_and_mul(new(T, 1536))),
    (rotary, lambda: rotary.rotary_embedding(ids, qkv[:, :32], qkv[:, 32:40], wide)),
    (cache, lambda: cache.reshape_and_cache(qkv[:, 32:40], qkv[:, 40:], *2 * (new(64, 8, 16, 128),), ids)),
    (embed, lambda: embed.embedding(ids, weights.pack_linear_weight(new(37984, 2048)), (37984, 75968))),
    (routing, lambda: routing.topk_softmax(new(T, 128), 8, True, ids)),
    (gdn, run_delta_net),
    (sampling, run_sampling),
    (sampling, lambda: run_sampling(torch.float32)),
    (attention, lambda: attend(2048, 4, 64, 8, 128, 128)),
    (attention, lambda: attend(300, 8, 64, 8, 64, 64, window=128, sinks=True)),
    (attention, lambda: attend(300, 2, 16, 2, 256, 256, page=64, cap=30.0)),
    (attention, lambda: attend(300, 2, 16, 1, 576, 512)),
    (experts, lambda: run_experts(8)),
    (experts, lambda: run_experts(300)),
    (experts, lambda: run_experts(2048)),
]


def main() -> None:
    seen: set[str] = set()
    for module, call in CALLS:
        for launch in compiling.launches(module, call):
            made = compiling.compile_launch(launch, TARGET)
            if (line := f"{launch.kernel.__name__} {len(made.asm['spv'])} {'.dpas<' in made.asm['ttgir']}") not in seen:
                seen.add(line)
                print(line, flush=True)


if __name__ == "__main__":
    main()
