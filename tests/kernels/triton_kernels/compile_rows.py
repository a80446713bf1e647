# SPDX-License-Identifier: Apache-2.0
"""Calls the row-wise operators with tensors that have no values, and prints how each kernel compiles for a card that
need not be there: a line ``operator kernel bytes-of-code spilled-loads``. What asks the device for a value raises."""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm.kernels import triton as operators
from vllm.kernels import weights
from vllm.kernels.triton import activation, norms, rotary, routing, sampling

cache, embedding = (sys.modules[f"vllm.kernels.triton.{name}"] for name in ("cache", "embedding"))
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64", torch.int32: "*i32"}
TYPES[torch.uint8] = "*u8"


class Launcher:
    """In a kernel's place: compiles it for the arguments of a launch."""

    def __init__(self, kernel: Any, operator: list[str]) -> None:
        self.kernel, self.operator = kernel, operator

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(type(size) is int and size > 0 for size in grid), grid
        return self.launch

    def launch(self, *args: Any, num_warps: int = 4, **kwargs: Any) -> None:
        values = {**dict(zip(self.kernel.arg_names, args, strict=False)), **kwargs}
        types, constants = {}, {}
        for i, parameter in enumerate(self.kernel.params):
            value = values[parameter.name]
            if isinstance(value, Tensor):
                types[parameter.name] = TYPES[value.dtype]
            elif parameter.is_constexpr or value is None:
                types[parameter.name], constants[(i,)] = "constexpr", value
            else:
                types[parameter.name] = "fp32" if isinstance(value, float) else "i32" if value < 2**31 else "i64"
        source = ASTSource(self.kernel, types, constants)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
        spills = made.asm["ptx"].count("ld.local")
        print(self.operator[0], self.kernel.__name__, len(made.asm["cubin"]), spills)


def main() -> None:
    operator = [""]
    for module, name in (
        (norms, "_norm_kernel"),
        (activation, "_gated_kernel"),
        (rotary, "_rotary_kernel"),
        (cache, "_write_kernel"),
        (cache, "_zero_kernel"),
        (embedding, "_embedding_kernel"),
        (routing, "_topk_kernel"),
        (sampling, "_row_max_kernel"),
        (sampling, "_penalties_kernel"),
        (sampling, "_sample_kernel"),
        (sampling, "_logprobs_kernel"),
    ):
        setattr(module, name, Launcher(getattr(module, name), operator))

    def new(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    T = 26
    x, D = new(T, 2048), 2048
    qkv = new(T, 48, 128)
    ids = new(T, dtype=torch.int64)
    logits, real, starts = new(T, 151936), new(T, dtype=torch.float32), new(T + 1, dtype=torch.int32)
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("rms_norm", (qkv[:, :32], new(128, dtype=torch.float32), 1e-6, qkv[:, :32])),
        ("fused_add_rms_norm", (x, new(T, D), new(D), 1e-6)),
        ("silu_and_mul", (new(T, 2 * 768),)),
        ("gelu_tanh_and_mul", (new(T, 2 * 10240),)),
        ("rotary_embedding", (ids, qkv[:, :32], qkv[:, 32:40], new(40960, 128, dtype=torch.float32))),
        ("rotary_embedding", (ids, qkv, qkv[:, :1], new(40960, 64, dtype=torch.float32), True)),
        ("reshape_and_cache", (qkv[:, 32:40], qkv[:, 40:], *2 * (new(64, 8, 16, 128),), ids)),
        (
            "reshape_and_cache",
            (qkv[:, 32:40], qkv[:, 40:], *2 * (new(64, 8, 16, 128, dtype=torch.float8_e4m3fn),), ids, 0.5, 0.25),
        ),
        ("zero_padding_rows", (qkv, ids)),
        ("embedding", (ids, weights.pack_linear_weight(new(37984, D)), (37984, 75968))),
        ("topk_softmax", (new(T, 128), 8, True, ids)),
        ("topk_sigmoid", (new(T, 256), 8, True, ids, new(256, dtype=torch.float32))),
        ("grouped_topk", (new(T, 256), 8, True, ids, 8, 4, 2, True, new(256, dtype=torch.float32))),
        ("row_max", (logits,)),
        ("apply_penalties", (logits.float(), starts, ids, real, real, real, real)),
        ("sample", (logits, real, ids, real, ids, ids, ids, real, real)),
        ("log_probabilities", (logits, 20, ids)),
    ]
    for operator[0], args in calls:
        getattr(operators, operator[0])(*args)


if __name__ == "__main__":
    main()
