# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about the unknown ``name``: the known one that it is like, or nothing where none is."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; the nearest is {near[0]!r}" if near else ""
