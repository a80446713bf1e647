# SPDX-License-Identifier: Apache-2.0
"""Builds the CPU kernels of this folder with the machine's C++ compiler and loads them; ``python -m vllm.csrc.build``
builds them ahead of the first use.

The library lies in ``VLLM_CACHE_ROOT`` under a name that is a hash of the sources, the compiler, its flags and the
processor's features, so that a changed source or another machine never meets an old build. Processes that start
together wait for one build. It is linked to the OpenMP library that torch has loaded: a second pool of threads in the
process would fight the first for the cores.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from vllm import envs
from vllm.logger import init_logger
from vllm.platforms.host_limits import usable_processors

logger = init_logger(__name__)

SOURCE_DIR = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-w")


class BuildError(RuntimeError):
    """The kernels cannot be built here; the message says why."""


def openmp_library() -> str:
    """Path of the OpenMP library that torch's CPU build runs on."""
    found = {
        line.split(maxsplit=5)[5].strip()
        for line in Path("/proc/self/maps").read_text().splitlines()
        if re.search(r"/lib(gomp|iomp5|omp)[^/]*\.so[^/]*$", line)
    }
    if not found:
        raise BuildError(f"torch {torch.__version__} has loaded no OpenMP library")
    torch_home = str(Path(torch.__file__).parent)
    return min(found, key=lambda path: (not path.startswith(torch_home), path))


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "c++"):
        if name and (path := shutil.which(name)):
            return path
    raise BuildError("no C++ compiler (CXX, g++, c++) on PATH")


def _cpu_features() -> str:
    text = Path("/proc/cpuinfo").read_text()
    match = re.search(r"^(flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return f"{platform.machine()} {match.group(2) if match else ''}"


def _run(commands: list[list[str]]) -> None:
    """Runs the commands, one for each processor at a time; raises with the first failure's last words."""

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)

    with ThreadPoolExecutor(usable_processors()) as pool:
        for done in pool.map(run, commands):
            if done.returncode != 0:
                raise BuildError(f"{' '.join(done.args)} exited with {done.returncode}: {done.stderr.strip()[-1000:]}")


def _compile(compiler: str, target: Path, openmp: str) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
        sources = sorted(SOURCE_DIR.glob("*.cpp"))
        objects = [str(Path(folder, f"{source.stem}.o")) for source in sources]
        _run([[compiler, *FLAGS, "-c", str(s), "-o", o] for s, o in zip(sources, objects, strict=True)])
        library = str(Path(folder, target.name))
        _run([[compiler, "-shared", *objects, "-o", library, openmp, f"-Wl,-rpath,{Path(openmp).parent}"]])
        os.replace(library, target)


def build() -> Path:
    """Path of the built library, built now if it is not there.

    Raises:
        BuildError: no compiler, no OpenMP, or the compiler refused.
        OSError: the cache folder cannot be written.
    """
    compiler, openmp = _compiler(), openmp_library()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256("\n".join([version, _cpu_features(), openmp, *FLAGS]).encode())
    for source in sorted(SOURCE_DIR.glob("*.[ch]*")):
        digest.update(source.name.encode() + source.read_bytes())
    root = Path(envs.VLLM_CACHE_ROOT) / "kernels"
    root.mkdir(parents=True, exist_ok=True)
    target = root / f"cpu-{digest.hexdigest()[:20]}.so"
    if not target.exists():
        with open(target.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                logger.info("building the CPU kernels into %s (once per machine and version)", target)
                _compile(compiler, target, openmp)
    return target


def load() -> ctypes.CDLL | None:
    """The kernels, or None (with one log line) where the plain torch twins run instead."""
    if not envs.VLLM_CPU_KERNELS:
        logger.info("VLLM_CPU_KERNELS=0: plain torch operations instead of the CPU kernels")
        return None
    try:
        return ctypes.CDLL(str(build()))
    except (BuildError, OSError) as error:
        logger.warning("no CPU kernels, plain torch operations run instead (slower): %s", error)
        return None


if __name__ == "__main__":
    print(build())
