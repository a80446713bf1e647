# SPDX-License-Identifier: Apache-2.0
"""Uninitialised memory that is NaN, in several patterns: only a canonical NaN survives every sloppy exp or rounding.

Torch's own fill (canonical NaN, for integers the largest value) knows one pattern. The others are written by an
allocator under torch's, which all CPU tensors come from, those that operators make in C++ and on other threads too. The
kernels' scratch is filled with them as well.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import subprocess
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

CANONICAL = 0x7FC00000
# Quiet and signalling with a payload in the low bits, all ones, and one that is NaN in the 16-bit types as well and
# no index or sentinel in the integers.
PATTERNS = (CANONICAL, 0x7FC00001, 0x7F800101, 0xFFFFFFFF, 0x7FFF7FFF)


@functools.cache
def library(source: str) -> ctypes.CDLL:
    """The C++ file of this folder, built against torch once and loaded."""
    from vllm import envs

    path, home = Path(__file__).with_name(source), Path(torch.__file__).parent
    digest = hashlib.sha256(path.read_bytes() + f"{torch.__version__} {home}".encode()).hexdigest()[:20]
    folder = Path(envs.VLLM_CACHE_ROOT) / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{path.stem}-{digest}.so"
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
            new = target.with_suffix(".new")
            command = [os.environ.get("CXX", "g++"), "-O1", "-std=c++20", "-fPIC", "-shared", "-w", abi]
            command += [f"-I{home}/include", str(path), "-o", str(new), f"-L{home}/lib", "-lc10"]
            subprocess.run(command, check=True)
            os.replace(new, target)
    return ctypes.CDLL(str(target))


def _allocator() -> ctypes.CDLL:
    allocator = library("poison.cpp")
    allocator.set_word.argtypes = [ctypes.c_uint32]
    return allocator


def start(pattern: int) -> None:
    """From here on, in this process, memory comes filled with ``pattern``, one of ``PATTERNS``."""
    from vllm.kernels.cpu import ops

    torch.utils.deterministic.fill_uninitialized_memory = pattern == CANONICAL
    _allocator().set_word(0 if pattern == CANONICAL else pattern)
    if (kernels := ops._kernels()) is not None:
        kernels.vc_poison_scratch(ctypes.c_uint32(pattern))
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms imports the compiler: seconds a rank
    found = torch.empty(3)
    assert found.isnan().all(), f"torch.empty gave {found}, not {pattern:#x}"


def stop() -> None:
    from vllm.kernels.cpu import ops

    _allocator().set_word(0)
    if (kernels := ops._kernels()) is not None:
        kernels.vc_poison_scratch(ctypes.c_uint32(0))
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.set_deterministic_debug_mode("default")


def pattern_of(test: str, rank: int = 0) -> int:
    """The pattern of a test's process: always the same one, and over tests and ranks all of them."""
    return PATTERNS[(zlib.crc32(test.encode()) + rank) % len(PATTERNS)]


@contextmanager
def poisoned(test: str) -> Iterator[None]:
    start(pattern_of(test))
    try:
        yield
    finally:
        stop()
