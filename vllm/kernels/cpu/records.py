# SPDX-License-Identifier: Apache-2.0
"""The packed records that the C++ kernels take, when they are kept: run one after the other, compared, shown."""

from __future__ import annotations

import ctypes
import functools
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm.compilation.recording import Call
from vllm.kernels.cpu import ops


class KernelRun:
    """Kernels with their records, all run by one call, in order. ``run`` returns 0, or the number, counted from 1, of
    the first that refused its input; those after it did not run."""

    def __init__(self, kernels: Sequence[tuple[Any, bytes]]) -> None:
        self._records = [ctypes.create_string_buffer(record, len(record)) for _, record in kernels]
        table = (ctypes.c_void_p * (2 * len(kernels)))()
        for place, (kernel, _) in enumerate(kernels):
            table[2 * place] = ctypes.cast(kernel, ctypes.c_void_p).value
            table[2 * place + 1] = ctypes.addressof(self._records[place])
        self._table = table
        self._record = struct.pack("2q", len(kernels), ctypes.addressof(table))
        self._run = ops._library().vc_run

    def run(self) -> int:
        return self._run(self._record)


@functools.cache
def _fields(operator: str) -> list[tuple[str, str]]:
    """Name and C type of each field of the record that kernel ``operator`` takes, as csrc declares them."""
    for path in sorted((Path(__file__).parent / "csrc").glob("*.cpp")):
        text = re.sub(r"//.*", "", path.read_text())
        if not (taken := re.search(rf"OPERATOR\({operator}, (\w+)\)", text)):
            continue
        body = re.search(rf"struct {taken[1]} \{{(.*?)\}};", text, re.DOTALL)
        assert body is not None, f"{operator} takes a {taken[1]}, which {path.name} does not declare"
        found = []
        for declaration in filter(None, (part.strip() for part in body[1].split(";"))):
            kind, names = re.fullmatch(r"((?:const )?\w+)(.*)", declaration, re.DOTALL).groups()  # type: ignore[union-attr]
            for name in names.split(","):
                pointer = "*" in name or kind.endswith("*")
                found.append((name.strip(" *"), "pointer" if pointer else kind))
        return found
    return []


def _values(call: Call) -> dict[str, Any]:
    """The fields of a kernel's record."""
    count = len(call.given) // 8
    names = _fields(call.operator) or [(f"field {i}", "int64_t") for i in range(count)]
    values: dict[str, Any] = {}
    for at, (name, kind) in enumerate(names[:count]):
        (value,) = struct.unpack_from("d" if kind == "double" else "q", call.given, 8 * at)
        values[name] = hex(value) if kind == "pointer" else value
    return values


def describe(call: Call) -> str:
    if isinstance(call.given, bytes):
        return ", ".join(f"{name}={value}" for name, value in _values(call).items())
    return repr(call.given)


def difference(a: Call, b: Call) -> str:
    """The first argument in which two calls of one operator differ, with both values."""
    if isinstance(a.given, bytes) and isinstance(b.given, bytes):
        one, two = _values(a), _values(b)
        name = next((name for name in one if one[name] != two.get(name)), None)
        return f"{name}={one.get(name)} and {two.get(name)}" if name else f"{describe(a)} and {describe(b)}"
    return _unlike(a.given, b.given)


def _unlike(a: Any, b: Any, path: str = "argument") -> str:
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        for place, (x, y) in enumerate(zip(a, b, strict=True)):
            if x != y:
                return _unlike(x, y, f"{path} {place}" if path == "argument" else f"{path}.{place}")
    return f"{path}: {a!r} and {b!r}"
