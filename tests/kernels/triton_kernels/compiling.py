# SPDX-License-Identifier: Apache-2.0
"""The launches of an operator as a CUDA card would get them, compiled without one: on meta tensors, in a process that
has not ``TRITON_INTERPRET`` in its environment."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


class Launch(NamedTuple):
    kernel: JITFunction
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, int]


def launches(module: ModuleType, call: Callable[[], object]) -> list[Launch]:
    """What ``call`` launches of ``module``'s kernels; none of it runs."""
    seen: list[Launch] = []
    kernels = {name: value for name, value in vars(module).items() if isinstance(value, JITFunction)}

    def recorder(kernel: JITFunction) -> Any:
        class Recorder:
            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
                def launch(*args: Any, **kwargs: Any) -> None:
                    arguments = dict(zip(kernel.arg_names, args, strict=False))
                    arguments |= {name: value for name, value in kwargs.items() if name in kernel.arg_names}
                    options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
                    assert set(arguments) == set(kernel.arg_names)
                    seen.append(Launch(kernel, grid, arguments, options))

                return launch

        return Recorder()

    try:
        for name, kernel in kernels.items():
            setattr(module, name, recorder(kernel))
        call()
    finally:
        for name, kernel in kernels.items():
            setattr(module, name, kernel)
    return seen


def compile_launch(launch: Launch, target: int | GPUTarget) -> Any:
    """The compiled kernel, specialised for its arguments as at a launch: a 1 and multiples of 16 are known to it.
    ``target``: a CUDA capability, or any card."""
    signature, constants, attributes = {}, {}, {}
    for i, param in enumerate(launch.kernel.params):
        value = launch.arguments[param.name]
        if isinstance(value, torch.Tensor):
            signature[param.name] = TYPES[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif param.is_constexpr or value is None or (value == 1 and not param.do_not_specialize):
            signature[param.name] = "constexpr"
            constants[(i,)] = value
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        else:
            signature[param.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not param.do_not_specialize:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    target = GPUTarget("cuda", target, 32) if isinstance(target, int) else target
    return triton.compile(source, target=target, options=launch.options)
