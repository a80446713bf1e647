# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels as other x86 processors run them: their source is built for each, and for what this one lacks with
the instructions in C++ (``avx512.h``); the kernels' own tests then run on that build."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vllm.kernels.cpu import build
from vllm.platforms.host_limits import usable_processors

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="processors of x86"),
]
TESTS = Path(__file__).parents[1]
# name → the compiler's flags
PROCESSORS = {
    "without AVX2": "-march=x86-64",
    "AVX2": "-march=x86-64-v3",
    **{
        name: f"-march=x86-64-v3 -include {TESTS / 'avx512.h'} -DEMULATED={emulated}"
        for name, emulated in (
            ("AVX2 and VNNI", 256),
            ("AVX-512", 512),
            ("AVX-512 and VNNI", 5120),
            ("AVX-512 and BF16", 5121),
        )
    },
}
FILES = ("test_cpu_quantized.py", "test_cpu_blocks.py", "test_cpu_ops.py", "test_fp8_kv_cache.py")
# What has instructions of its own; the rest is the compiler's vectors, of whatever width.
SOME = "quantized or blocks or matrix_unit or linear_against or experts or (fp8_kv and cpu and (written or code))"


@pytest.mark.parametrize("name", PROCESSORS)
def test_kernels(name: str, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec "{build._compiler()}" "$@" -O1 {PROCESSORS[name]}\n')
    compiler.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", "-k", SOME, *FILES],
        cwd=TESTS / "kernels",
        env={**os.environ, "CXX": str(compiler), "VLLM_CACHE_ROOT": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert list(tmp_path.glob("kernels/*.so"))


@pytest.mark.parametrize("processor", ["skylake-avx512", "icelake-server", "sapphirerapids", "alderlake"])
def test_compiles_without_warnings(processor: str) -> None:
    """With the instructions themselves. ``uninitialized``: GCC 12 says so of its own header's registers."""
    flags = [flag for flag in build.FLAGS if not flag.startswith(("-w", "-O", "-march"))]
    flags += ["-O1", f"-march={processor}", "-Wall", "-Werror", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]

    def compiled(source: Path) -> str:
        command = [build._compiler(), *flags, "-S", str(source), "-o", os.devnull]
        return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False).stderr

    with ThreadPoolExecutor(usable_processors()) as pool:
        said = "".join(pool.map(compiled, sorted(build.SOURCE_DIR.glob("*.cpp"))))
    assert not said, said[:4000]
