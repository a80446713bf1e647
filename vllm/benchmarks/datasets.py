# SPDX-License-Identifier: Apache-2.0
"""Prompts for ``vllm bench serve``."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Conversations that are no load worth measuring are left out, as others do who publish figures on this data.
_LEAST, _MOST_PROMPT, _MOST_TOTAL = 4, 1024, 2048


@dataclass(frozen=True)
class Sample:
    """``prompt_len`` tokens in; ``output_len`` are asked for."""

    prompt: str
    prompt_len: int
    output_len: int


def samples(args: argparse.Namespace, tokenizer: Any) -> list[Sample]:
    """``num_prompts`` samples of the data set that ``args`` name, the same for the same seed.

    Raises ``ValueError`` where the data holds none, ``OSError`` where it cannot be read.
    """
    rng = random.Random(args.seed)
    if args.dataset_name == "random":
        return list(_random(args, tokenizer, rng))
    if args.dataset_path is None:
        raise ValueError(f"--dataset-name {args.dataset_name} needs --dataset-path FILE")
    read: Callable[..., Iterator[Sample]] = _sharegpt if args.dataset_name == "sharegpt" else _custom
    found = list(read(args, tokenizer))
    if not found:
        raise ValueError(f"{args.dataset_path} holds no prompt that can be used as --dataset-name {args.dataset_name}")
    if not args.disable_shuffle:
        rng.shuffle(found)
    if len(found) < args.num_prompts and not args.no_oversample:
        found += rng.choices(found, k=args.num_prompts - len(found))
    return found[: args.num_prompts]


def _random(args: argparse.Namespace, tokenizer: Any, rng: random.Random) -> Iterator[Sample]:
    """Random words of the tokenizer; lengths are uniform within ``random_range_ratio`` around those given."""
    if not 0 <= args.random_range_ratio < 1:
        raise ValueError(f"--random-range-ratio {args.random_range_ratio}: give at least 0 and less than 1")
    special = set(tokenizer.all_special_ids)
    ids = [token for token in range(len(tokenizer)) if token not in special]

    def length(mean: int) -> int:
        spread = int(mean * args.random_range_ratio)
        return max(rng.randint(mean - spread, mean + spread), 1)

    prefix = [rng.choice(ids) for _ in range(args.random_prefix_len)]
    for _ in range(args.num_prompts):
        wanted, output_len = args.random_prefix_len + length(args.random_input_len), length(args.random_output_len)
        text = _text_of([*prefix, *rng.choices(ids, k=wanted - len(prefix))], tokenizer, ids, rng)
        yield Sample(text, _count(text, tokenizer), output_len)


def _text_of(tokens: list[int], tokenizer: Any, ids: list[int], rng: random.Random) -> str:
    """A text of as many tokens as ``tokens``, nearly those: what is decoded may be split into others."""
    wanted = len(tokens)
    for _ in range(10):
        text = tokenizer.decode(tokens)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) == wanted:
            break
        tokens = tokens[:wanted] + rng.choices(ids, k=max(wanted - len(tokens), 0))
    return text


def _count(text: str, tokenizer: Any) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))


def _sharegpt(args: argparse.Namespace, tokenizer: Any) -> Iterator[Sample]:
    """``[{"conversations": [{"value": prompt}, {"value": answer}, …]}, …]``: the first prompt of each conversation, and
    as many tokens as its answer has."""
    for talk in json.loads(Path(args.dataset_path).read_text()):
        turns = talk.get("conversations", talk.get("conversation", ()))
        if len(turns) < 2:
            continue
        prompt = turns[0]["value"]
        prompt_len = _count(prompt, tokenizer)
        output_len = args.sharegpt_output_len or _count(turns[1]["value"], tokenizer)
        if (
            min(prompt_len, output_len) >= _LEAST
            and prompt_len <= _MOST_PROMPT
            and prompt_len + output_len <= _MOST_TOTAL
        ):
            yield Sample(prompt, prompt_len, output_len)


def _custom(args: argparse.Namespace, tokenizer: Any) -> Iterator[Sample]:
    """A line of JSON each: ``{"prompt": …}``, with ``"output_tokens"`` where it asks for a number of its own."""
    for line in Path(args.dataset_path).read_text().splitlines():
        if line.strip():
            row = json.loads(line)
            output_len = int(row.get("output_tokens") or args.custom_output_len)
            yield Sample(row["prompt"], _count(row["prompt"], tokenizer), output_len)
