# SPDX-License-Identifier: Apache-2.0
"""One upstream source tree: which release it is, which patches stand in it, and changing it all or nothing."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .series import Patch, Series, load_series

UNDO = ".patches-undo"


class Refused(Exception):
    """The tree is left as it is; the message is one line that says what to do."""


@dataclass(frozen=True)
class Tree:
    """``texts``: the touched files of this release as they stand; ``applied``: names of patches that are in whole."""

    root: Path
    release: str
    texts: Mapping[str, str]
    applied: frozenset[str]
    half_applied: frozenset[str]
    modified: tuple[str, ...]

    def state(self, patch: Patch) -> tuple[str, str]:
        if patch.name in self.half_applied:
            return "half applied", "some of its hunks stand in the tree and some do not"
        state, why = patch.states[self.release]
        return ("applied", patch.title) if patch.name in self.applied else (state, why)

    def check(self) -> None:
        """Raise Refused unless the tree is its release plus whole patches of this series."""
        if self.half_applied:
            names = ", ".join(sorted(self.half_applied))
            raise Refused(f"half applied: {names}: restore its files from release {self.release}, then apply again")
        if self.modified:
            raise Refused(
                f"{self.modified[0]} is not as release {self.release} ships it"
                + (f", nor are {len(self.modified) - 1} more files" if len(self.modified) > 1 else "")
                + ": restore it, or judge each patch yourself with `git apply --check`"
            )


def find_root(path: Path) -> Path:
    """The folder that holds the ``vllm`` package, from itself or from the package's own folder."""
    whole = path.resolve()
    root = whole.parent if whole.name == "vllm" and (whole / "__init__.py").is_file() else whole
    if (root / "vllm" / "__init__.py").is_file():
        return root
    raise Refused(f"no vllm package in {path}: give a vLLM checkout, or the folder that holds the installed package")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read(root: Path, paths: Iterable[str]) -> dict[str, str]:
    texts = {}
    for path in paths:
        try:
            texts[path] = (root / path).read_bytes().decode()
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise Refused(f"cannot read {root / path}: {error}: restore it from the release") from None
    return texts


def _inspect(root: Path, release: str, series: Series) -> Tree:
    pristine = series.pristine[release]
    texts = _read(root, pristine)
    bare = dict(texts)
    applied: set[str] = set()
    half_applied: set[str] = set()
    for patch in series.patches:
        if patch.states[release][0] != "needed":
            continue
        standing = [hunk for hunk in patch.hunks if hunk.applied(texts.get(hunk.path, ""))]
        if standing:
            (applied if len(standing) == len(patch.hunks) else half_applied).add(patch.name)
        for hunk in standing:
            bare[hunk.path] = hunk.revert(bare[hunk.path]) or bare[hunk.path]
    modified = tuple(path for path, digest in pristine.items() if _sha256(bare.get(path, "")) != digest)
    return Tree(root, release, texts, frozenset(applied), frozenset(half_applied), modified)


def inspect(path: Path) -> Tree:
    """Find the release of the tree at ``path`` and the patches in it.

    The release is the one ``vllm/_version.py`` names; a checkout without that file is recognised by the contents of
    the files that the series touches. Raises Refused for a tree that is neither.
    """
    series = load_series()
    root = find_root(path)
    known = f"known are {', '.join(series.releases)}"
    with contextlib.suppress(FileNotFoundError):
        text = (root / "vllm" / "_version.py").read_text(encoding="utf-8")
        named = re.search(r"^(?:__version__ = )?version = ['\"]([^'\"+]+)", text, re.MULTILINE)
        release = named[1] if named else "without a version"
        if release not in series.releases:
            raise Refused(f"release {release} is not in the series ({known}): judge a patch with `git apply --check`")
        return _inspect(root, release, series)
    trees = [_inspect(root, release, series) for release in series.releases]
    for tree in trees:
        if not tree.modified:
            return tree
    raise Refused(f"{root} has no vllm/_version.py and is none of the releases ({known}): check out a release tag")


def select(tree: Tree, only: Iterable[str] | None) -> list[Patch]:
    """The patches to apply: every needed one, or those named by number or name. Raises Refused."""
    patches = load_series().patches
    needed = [patch for patch in patches if patch.states[tree.release][0] == "needed"]
    chosen = needed
    if only is not None:
        by_name = {key: patch for patch in patches for key in (patch.name, patch.number, patch.number.lstrip("0"))}
        chosen = []
        for name in only:
            patch = by_name.get(name.removesuffix(".patch"))
            if patch is None:
                raise Refused(f"no patch {name!r}: `status` lists the names, 0001 to {patches[-1].number}")
            state, why = patch.states[tree.release]
            if state != "needed":
                raise Refused(f"{patch.name} is not for release {tree.release}: {state}: {why}: leave it out of --only")
            if patch not in chosen:
                chosen.append(patch)
    standing = [patch.number for patch in chosen if patch.name in tree.applied]
    if standing:
        missing = [patch.number for patch in chosen if patch.name not in tree.applied]
        remedy = f"--only {','.join(missing)} applies the rest" if missing else "there is nothing to do"
        raise Refused(f"already applied: {', '.join(standing)}: {remedy}, or `revert` first")
    return chosen


def _changed(tree: Tree, patches: Iterable[Patch], *, revert: bool) -> dict[str, str]:
    """New text of every file that changes."""
    texts = dict(tree.texts)
    for patch in patches:
        for hunk in patch.hunks:
            text = (hunk.revert if revert else hunk.apply)(texts[hunk.path])
            assert text is not None, f"{patch.name} does not fit {hunk.path} of {tree.release} at {hunk.qualname}"
            texts[hunk.path] = text
    changed = {path: text for path, text in texts.items() if text != tree.texts[path]}
    for path, text in changed.items():
        compile(text, path, "exec", dont_inherit=True)
    return changed


def with_patches(tree: Tree, patches: Iterable[Patch]) -> dict[str, str]:
    return _changed(tree, patches, revert=False)


def without_patches(tree: Tree) -> dict[str, str]:
    if not tree.applied:
        raise Refused("no patch of this series is applied: there is nothing to revert")
    return _changed(tree, [patch for patch in load_series().patches if patch.name in tree.applied], revert=True)


def _roll_back(root: Path) -> None:
    undo = root / "vllm" / UNDO
    for saved in sorted(undo.rglob("*.py")):
        path = root / saved.relative_to(undo)
        if path.read_bytes() != saved.read_bytes():
            _replace(path, saved.read_bytes())
        for stray in path.parent.glob(".patches-*"):
            if stray.is_file():
                stray.unlink()
    shutil.rmtree(undo)


def _replace(path: Path, content: bytes) -> None:
    handle, name = tempfile.mkstemp(prefix=".patches-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        shutil.copymode(path, name)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def interrupted(root: Path) -> bool:
    return (root / "vllm" / UNDO).exists()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the tree against other calls; first roll back a call that was killed half way."""
    package = find_root(path) / "vllm"
    handle = os.open(package, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"another call is changing {package}: wait until it is done") from None
        if interrupted(package.parent):
            _roll_back(package.parent)
        for stray in package.glob(".patches-*"):
            if stray.is_dir():
                shutil.rmtree(stray)
        yield
    finally:
        os.close(handle)


def write(root: Path, changed: Mapping[str, str]) -> None:
    """Replace the files of ``changed``, all of them or none, whenever the process ends.

    The originals are set aside first, under a name that the next call looks for and rolls back to.
    """
    package = root / "vllm"
    try:
        staging = Path(tempfile.mkdtemp(prefix=".patches-", dir=package))
        try:
            for path in changed:
                saved = staging / path
                saved.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / path, saved)
            staging.rename(package / UNDO)
        except BaseException:
            shutil.rmtree(staging)
            raise
        try:
            for path, text in changed.items():
                _replace(root / path, text.encode())
        except BaseException:
            _roll_back(root)
            raise
        # Renamed first: an undo folder that is half deleted must not be rolled back to.
        done = Path(tempfile.mkdtemp(prefix=".patches-", dir=package))
        (package / UNDO).rename(done / "undo")
        shutil.rmtree(done)
    except OSError as error:
        raise Refused(f"cannot write in {package}: {error.strerror}: run as the owner of a writable tree") from None
