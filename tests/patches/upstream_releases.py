# SPDX-License-Identifier: Apache-2.0
"""Upstream releases in a cache outside the repository: the Python files of each source distribution.

``python tests/patches/upstream_releases.py`` fetches every release of the series and prints ``patches/pristine.toml``.
The cache is ``$VLLM_PATCHES_CACHE``, by default ``~/.cache/vllm-arc/upstream``.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

CACHE = Path(os.environ.get("VLLM_PATCHES_CACHE", "~/.cache/vllm-arc/upstream")).expanduser()

# pip wants the metadata of a source distribution before it hands the archive over. This stand-in backend copies the
# metadata that the archive already holds, so that no build requirement is installed and no setup code runs.
_BACKEND = """
import os, shutil
def get_requires_for_build_wheel(config_settings=None):
    return []
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    os.makedirs(os.path.join(folder, "vllm-0.dist-info"))
    shutil.copy("PKG-INFO", os.path.join(folder, "vllm-0.dist-info", "METADATA"))
    return "vllm-0.dist-info"
"""


class CannotFetch(Exception):
    pass


def _download(release: str, folder: Path) -> Path:
    backend = folder / "backend" / "setuptools"
    backend.mkdir(parents=True)
    (backend / "__init__.py").touch()
    (backend / "build_meta.py").write_text(_BACKEND)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "vllm"]
    command += ["--no-build-isolation", "--disable-pip-version-check", "-d", str(folder), f"vllm=={release}"]
    run = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(backend.parent)}, capture_output=True, text=True, check=False
    )
    archives = list(folder.glob("vllm-*.tar.gz"))
    if run.returncode or len(archives) != 1:
        raise CannotFetch(f"vllm {release} is neither cached nor to be had: {run.stderr.strip()[-300:]}")
    return archives[0]


def fetch(release: str) -> Path:
    """The folder with ``vllm/**/*.py`` of ``release``, fetched on first use. Raises CannotFetch."""
    home = CACHE / release
    if home.is_dir():
        return home
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="fetching-") as name:
        folder = Path(name)
        kept = folder / "kept"
        with tarfile.open(_download(release, folder)) as archive:
            for member in archive:
                path = member.name.partition("/")[2]
                if member.isfile() and path.startswith("vllm/") and path.endswith(".py") and ".." not in path:
                    source = archive.extractfile(member)
                    assert source is not None
                    (kept / path).parent.mkdir(parents=True, exist_ok=True)
                    (kept / path).write_bytes(source.read())
        try:
            kept.rename(home)
        except OSError:
            if not home.is_dir():  # else another process was first
                raise
    return home


def small_tree(release: str, paths: list[str], root: Path) -> Path:
    """A copy at ``root`` of just ``paths`` of a fetched release, and of the two files that make it a package."""
    home = fetch(release)
    for path in ["vllm/__init__.py", "vllm/_version.py", *paths]:
        if (home / path).is_file():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(home / path, root / path)
    return root


def hashes(root: Path) -> dict[str, str]:
    """SHA-256 of every file below ``root``, compiled files aside."""
    files = sorted(path for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def pristine(releases: list[str], paths: list[str]) -> str:
    lines = ["# SPDX-License-Identifier: Apache-2.0", "# SHA-256 of every file the series touches, as released."]
    for release in releases:
        lines += ["", f'["{release}"]']
        for path in paths:
            file = fetch(release) / path
            if file.is_file():
                lines.append(f'"{path}" = "{hashlib.sha256(file.read_bytes()).hexdigest()}"')
    return "\n".join(lines)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from patches.series import HERE as root
    from patches.series import tomllib

    touched = {
        line[len("+++ b/") :].strip()
        for file in root.glob("*.patch")
        for line in file.read_text().splitlines()
        if line.startswith("+++ b/")
    }
    print(pristine(tomllib.loads((root / "series.toml").read_text())["releases"], sorted(touched)))
