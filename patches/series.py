# SPDX-License-Identifier: Apache-2.0
"""The patch files, the function each hunk belongs to, and the release matrix.

A hunk is a unified-diff hunk whose section heading names a function (``Class.method.inner``, or ``<module>``).
``git apply`` ignores the heading and goes by line numbers; here the hunk must match exactly once inside that function,
so it cannot land in a look-alike elsewhere in the file.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
STATES = ("needed", "upstream has it", "not applicable")
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@ (\S+)")


@functools.lru_cache(maxsize=32)
def _tree_of(text: str) -> ast.Module:
    return ast.parse(text)


def _definitions(node: ast.AST) -> Iterator[_Definition]:
    """The definitions directly in ``node``, also those under an ``if`` or ``try``, but not those inside others."""
    for field in ("body", "orelse", "handlers", "finalbody"):
        for child in getattr(node, field, ()):
            if isinstance(child, _Definition):
                yield child
            else:
                yield from _definitions(child)


def span_of(text: str, qualname: str) -> tuple[int, int] | None:
    """First and one-past-last line index (0-based) of the one definition ``qualname``; None where there is none."""
    if qualname == "<module>":
        return 0, text.count("\n")
    try:
        node: ast.AST = _tree_of(text)
    except SyntaxError:
        return None
    for part in qualname.split("."):
        found = [child for child in _definitions(node) if child.name == part]
        if len(found) != 1:
            return None
        node = found[0]
    assert isinstance(node, _Definition)
    assert node.end_lineno is not None
    return node.lineno - 1, node.end_lineno


@dataclass(frozen=True)
class Hunk:
    path: str
    qualname: str
    old: tuple[str, ...]
    new: tuple[str, ...]

    def _find(self, text: str, block: tuple[str, ...]) -> int | None:
        """Line index where ``block`` stands in this hunk's function; None unless exactly once."""
        if "\n".join(block) not in text:  # the common case, without parsing
            return None
        span = span_of(text, self.qualname)
        if span is None:
            return None
        lines = text.split("\n")
        starts = range(span[0], span[1] - len(block) + 1)
        found = [i for i in starts if tuple(lines[i : i + len(block)]) == block]
        return found[0] if len(found) == 1 else None

    def _swap(self, text: str, out: tuple[str, ...], into: tuple[str, ...]) -> str | None:
        at = self._find(text, out)
        if at is None:
            return None
        lines = text.split("\n")
        return "\n".join([*lines[:at], *into, *lines[at + len(out) :]])

    def applied(self, text: str) -> bool:
        return self._find(text, self.new) is not None

    def apply(self, text: str) -> str | None:
        """``text`` with this hunk in; None where its lines do not stand in its function exactly once."""
        return self._swap(text, self.old, self.new)

    def revert(self, text: str) -> str | None:
        return self._swap(text, self.new, self.old)


@dataclass(frozen=True)
class Patch:
    """``states[release]`` is one of STATES with the reason."""

    name: str
    fix: str
    title: str
    hunks: tuple[Hunk, ...]
    states: Mapping[str, tuple[str, str]]

    @property
    def number(self) -> str:
        return self.name[:4]

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(hunk.path for hunk in self.hunks))


@dataclass(frozen=True)
class Series:
    """``pristine[release][path]``: SHA-256 of each touched file as that release ships it."""

    releases: tuple[str, ...]
    patches: tuple[Patch, ...]
    pristine: Mapping[str, Mapping[str, str]]


def parse_hunks(diff: str) -> tuple[Hunk, ...]:
    hunks: list[Hunk] = []
    path = ""
    lines = iter(diff.splitlines())
    for line in lines:
        if line.startswith("+++ b/"):
            path = line[len("+++ b/") :]
        elif head := _HUNK.match(line):
            rows_old, rows_new = (int(rows or 1) for rows in head.groups()[:2])
            old: list[str] = []
            new: list[str] = []
            while len(old) < rows_old or len(new) < rows_new:
                row = next(lines)
                if row[0] in " -":
                    old.append(row[1:])
                if row[0] in " +":
                    new.append(row[1:])
            assert (len(old), len(new)) == (rows_old, rows_new), f"{path}: {line}: holds {len(old)}, {len(new)} rows"
            hunks.append(Hunk(path, head[3], tuple(old), tuple(new)))
    return tuple(hunks)


def _states(entry: dict[str, Any], releases: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    states: dict[str, tuple[str, str]] = {}
    for state, key in zip(STATES, ("needed", "upstream", "inapplicable"), strict=True):
        for span in entry.get(key, ()):
            first, last = (releases.index(span[end]) for end in ("first", "last"))
            for release in releases[first : last + 1]:
                assert release not in states, f"{entry['file']}: {release} has two states"
                states[release] = (state, span["why"])
    assert len(states) == len(releases), f"{entry['file']}: {len(states)} states for {len(releases)} releases"
    return states


@functools.cache
def load_series() -> Series:
    index = tomllib.loads((HERE / "series.toml").read_text(encoding="utf-8"))
    pristine = tomllib.loads((HERE / "pristine.toml").read_text(encoding="utf-8"))
    releases = tuple(index["releases"])
    patches = []
    for entry in index["patch"]:
        file = HERE / entry["file"]
        hunks = parse_hunks(file.read_text(encoding="utf-8"))
        patches.append(Patch(file.stem, entry["fix"], entry["title"], hunks, _states(entry, releases)))
    return Series(releases, tuple(patches), pristine)
