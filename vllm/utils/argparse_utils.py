# SPDX-License-Identifier: Apache-2.0
"""Command lines as upstream's users write them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from vllm.utils.suggestions import nearest


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Takes ``--max_model_len`` for ``--max-model-len``, and ``--option.key.sub VALUE`` for JSON (VALUE itself is JSON
    where it can be read as such, else a string; keys of one option add up)."""

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[override]
        args = sys.argv[1:] if args is None else args
        return super().parse_known_args(self._plain(args), namespace)

    def _plain(self, args: Sequence[str]) -> list[str]:
        """The same with dashes, and with one JSON value for each option that has dotted keys."""
        plain: list[str] = []
        nested: dict[str, dict[str, Any]] = {}
        words = iter(args)
        for word in words:
            if word == "--":
                plain += [word, *words]
                break
            name, equals, value = word.partition("=")
            if not name.startswith("--"):
                plain.append(word)
                continue
            option, *keys = name.split(".")
            option = self._spelt(option)
            if not keys:
                plain.append(option + equals + value)
                continue
            value = value if equals else next(words, "")
            at = nested.setdefault(option, {})
            for key in keys[:-1]:
                at = at.setdefault(key, {})
            at[keys[-1]] = _json_or_text(value)
        for option, given in nested.items():
            plain = [f"{option}={json.dumps(given)}", *plain]
        return plain

    def _spelt(self, option: str) -> str:
        dashed = "--" + option[2:].replace("_", "-")
        return dashed if dashed in self._option_string_actions else option


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


class Parser(FlexibleArgumentParser):
    """Names the nearest option where one is unknown, and takes no abbreviations."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog, description=description, allow_abbrev=False)

    def parse_args(self, args=None, namespace=None):  # type: ignore[override]
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            self.error(f"unknown argument {unknown[0]!r}{nearest(name, self._option_string_actions)}")
        return parsed
