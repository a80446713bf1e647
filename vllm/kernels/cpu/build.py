# SPDX-License-Identifier: Apache-2.0
"""Builds the CPU kernels of ``csrc`` with the machine's C++ compiler and loads them;
``python -m vllm.kernels.cpu`` builds them ahead of the first use.

The library lies in ``VLLM_CACHE_ROOT`` under a name that is a hash of the sources, the compiler, its flags and the
processor's features, so that a changed source or another machine never meets an old build. Processes that start
together wait for one build. The kernels have threads of their own (pool.h). Torch's operations run on OpenMP's, which
by default keep a core busy for milliseconds after each of them: ``limit_openmp_spinning`` ends that.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from vllm import envs
from vllm.logger import init_logger
from vllm.platforms.host_limits import usable_processors

logger = init_logger(__name__)

SOURCE_DIR = Path(__file__).parent / "csrc"
_MOST_SPARE_THREADS = 16  # libgomp ends the process where it cannot make one
FLAGS = ("-O3", "-march=native", "-std=c++17", "-pthread", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-w")


class BuildError(RuntimeError):
    """The kernels cannot be built here; the message says why."""


def openmp_library() -> str | None:
    """Path of the GNU OpenMP library that this process has loaded, as torch's CPU builds do."""
    found = re.findall(r"(/\S*/libgomp[^/\s]*\.so\S*)$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    torch_home = str(Path(torch.__file__).parent)
    return min(found, key=lambda path: (not path.startswith(torch_home), path), default=None)


@functools.cache
def limit_openmp_spinning() -> None:
    """Let OpenMP's waiting threads sleep soon, also where torch was loaded before ``vllm`` could set GOMP_SPINCOUNT.

    libgomp's documentation: with more threads than cores they look 100 times instead of 300,000 before they sleep. So a
    thread of this process holds a team of its own, asleep, that makes them more. A variable of the user's stands.
    """
    path, threads = openmp_library(), torch.get_num_threads()
    if path is None or threads == 1 or "GOMP_SPINCOUNT" in os.environ or "OMP_WAIT_POLICY" in os.environ:
        return
    team = len(os.sched_getaffinity(0)) - threads + 2
    if not 2 <= team <= _MOST_SPARE_THREADS:
        logger.info("OMP_WAIT_POLICY=passive keeps torch's threads from fighting others for the cores")
        return

    def hold() -> None:
        ctypes.CDLL(path).GOMP_parallel(ctypes.CDLL(None).sched_yield, None, team, 0)
        held.set()
        threading.Event().wait()

    held = threading.Event()
    threading.Thread(target=hold, name="openmp-team", daemon=True).start()
    held.wait()


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


def _compile(compiler: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
        sources = sorted(SOURCE_DIR.glob("*.cpp"))
        objects = [str(Path(folder, f"{source.stem}.o")) for source in sources]
        _run([[compiler, *FLAGS, "-c", str(s), "-o", o] for s, o in zip(sources, objects, strict=True)])
        library = str(Path(folder, target.name))
        _run([[compiler, "-shared", "-pthread", *objects, "-o", library]])
        os.replace(library, target)


def build() -> Path:
    """Path of the built library, built now if it is not there.

    Raises:
        BuildError: no compiler, or it refused.
        OSError: the cache folder cannot be written.
    """
    compiler = _compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256("\n".join([version, _cpu_features(), *FLAGS]).encode())
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
                _compile(compiler, target)
    return target


def load() -> ctypes.CDLL | None:
    """The kernels, or None (with one log line) where the plain torch twins run instead."""
    limit_openmp_spinning()
    try:
        return ctypes.CDLL(str(build()))
    except (BuildError, OSError) as error:
        logger.warning("no CPU kernels, plain torch operations run instead (slower): %s", error)
        return None
