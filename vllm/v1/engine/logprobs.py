# SPDX-License-Identifier: Apache-2.0
"""From rows of log-probabilities to what the client gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.logprobs import Logprob
from vllm.v1.outputs import LogprobsLists


class TokenText:
    """The text of single tokens, each decoded once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, token_id: int) -> str:
        text = self._known.get(token_id)
        if text is None:
            text = self._known[token_id] = self._tokenizer.decode([token_id])
        return text


def logprob_dicts(
    rows: LogprobsLists, num_logprobs: int, token_text: Callable[[int], str | None]
) -> list[dict[int, Logprob]]:
    """One dict for each row: the chosen token, then the ``num_logprobs`` likeliest (-1: all that there are)."""
    dicts = []
    for ids, logprobs, rank in zip(rows.token_ids, rows.logprobs, rows.ranks, strict=True):
        width = len(ids) if num_logprobs == -1 else num_logprobs + 1
        row = {ids[0]: Logprob(logprobs[0], rank, token_text(ids[0]))}
        for place in range(1, min(width, len(ids))):
            if ids[place] not in row:
                row[ids[place]] = Logprob(logprobs[place], place, token_text(ids[place]))
        dicts.append(row)
    return dicts
