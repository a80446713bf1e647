# SPDX-License-Identifier: Apache-2.0
"""``python -m patches status|apply|revert TREE``: the fixes in an upstream vLLM tree. ``table`` prints the matrix."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .series import load_series
from .tree import Refused, Tree, inspect, interrupted, locked, select, with_patches, without_patches, write


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="patches", description="Fixes for upstream vLLM, applied all or nothing.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("status", "tell the release of TREE and, patch by patch: needed, applied, or upstream has it"),
        ("apply", "apply every patch that the release of TREE needs"),
        ("revert", "take every applied patch out again"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("tree", type=Path, metavar="TREE", help="a vLLM checkout or installed package")
        if name == "apply":
            command.add_argument("--only", metavar="N,N", help="these patches, by number or name")
            command.add_argument("--dry-run", action="store_true", help="check everything, write nothing")
    commands.add_parser("table", help="print the matrix of patches and releases")
    return parser


def table() -> str:
    """The matrix of patches and releases as a Markdown table, with the reasons below it."""
    series = load_series()
    marks = {"needed": "**needed**", "upstream has it": "upstream", "not applicable": "–"}
    rows = [["patch", "fix", *series.releases], ["---"] * (2 + len(series.releases))]
    reasons = []
    for patch in series.patches:
        states = [patch.states[release] for release in series.releases]
        rows.append([f"[{patch.name}]({patch.name}.patch)", patch.fix, *(marks[state] for state, _ in states)])
        reasons.append(f"- **{patch.name}**: {patch.title}.")
        for state, why in dict.fromkeys(states):
            held = [release for release in series.releases if patch.states[release] == (state, why)]
            span = held[0] if len(held) == 1 else f"{held[0]} to {held[-1]}"
            reasons.append(f"  - {span}: {state}: {why}.")
    return "\n".join(["| " + " | ".join(row) + " |" for row in rows] + ["", *reasons])


def _status(tree: Tree) -> None:
    print(f"vLLM {tree.release} at {tree.root}")
    for patch in load_series().patches:
        state, why = tree.state(patch)
        print(f"{patch.name:<32} {state:<16} {why}")
    if interrupted(tree.root):
        raise Refused("a call was killed half way: any `apply` or `revert` rolls it back first")
    tree.check()


def _apply(tree: Tree, only: str | None, dry_run: bool) -> None:
    tree.check()
    patches = select(tree, only.split(",") if only is not None else None)
    changed = with_patches(tree, patches)
    if not dry_run:
        write(tree.root, changed)
    verb = "would apply" if dry_run else "applied"
    print(f"vLLM {tree.release} at {tree.root}: {verb} {', '.join(patch.name for patch in patches)}")


def _revert(tree: Tree) -> None:
    tree.check()
    write(tree.root, without_patches(tree))
    print(f"vLLM {tree.release} at {tree.root}: reverted {', '.join(sorted(tree.applied))}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0, or 1 where the tree was refused (one line on stderr, the tree untouched)."""
    args = _parser().parse_args(argv)
    try:
        if args.command == "table":
            print(table())
        elif args.command == "status":
            _status(inspect(args.tree))
        else:
            with locked(args.tree):
                tree = inspect(args.tree)
                if args.command == "apply":
                    _apply(tree, args.only, args.dry_run)
                else:
                    _revert(tree)
    except Refused as refusal:
        print(f"patches: {refusal}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.filename is None:  # not about the tree: a closed pipe, say
            raise
        print(f"patches: {error}: give a tree that you may read and write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
