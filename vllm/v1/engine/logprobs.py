# SPDX-License-Identifier: Apache-2.0
"""From rows of log-probabilities to what the client gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm.logprobs import Logprob
from vllm.v1.engine.detokenizer import IncrementalDecoder
from vllm.v1.outputs import LogprobsLists

# A token that holds a part of a character needs those with the other bytes, three at most, and text before them.
_OTHER_BYTES = 3
CONTEXT = 16
_REPLACEMENT = "\ufffd"


class TokenText:
    """The text of single tokens: decoded alone and once, or after its context where it holds a part of a character.

    The token that completes a character then has the whole of it, and those with its first bytes have no text.
    """

    def __init__(self, tokenizer: Any, continuations: Callable[[], Sequence[int]]) -> None:
        self._tokenizer = tokenizer
        self._continuations = continuations
        self._known: dict[int, str] = {}

    def __call__(self, token_id: int, context: Sequence[int]) -> str:
        text = self._known.get(token_id)
        if text is None:
            text = self._known[token_id] = self._tokenizer.decode([token_id])
        if _REPLACEMENT in text:
            start = max(len(context) - _OTHER_BYTES, 0)
            decoder = IncrementalDecoder(
                self._tokenizer.decode, context[max(start - CONTEXT, 0) : start], self._continuations
            )
            for before in context[start:]:
                decoder.add([before])
            return decoder.add([token_id])
        return text


def logprob_dicts(
    rows: LogprobsLists,
    num_logprobs: int,
    token_text: Callable[[int, Sequence[int]], str | None],
    before: Sequence[int],
) -> list[dict[int, Logprob]]:
    """One dict for each row: the chosen token, then the ``num_logprobs`` likeliest (-1: all that there are).

    ``before``: at least the last ``CONTEXT`` tokens that precede the first row's, or all.
    """
    dicts = []
    context = list(before)
    for ids, logprobs, rank in zip(rows.token_ids, rows.logprobs, rows.ranks, strict=True):
        width = len(ids) if num_logprobs == -1 else num_logprobs + 1
        row = {ids[0]: Logprob(logprobs[0], rank, token_text(ids[0], context))}
        for place in range(1, min(width, len(ids))):
            if ids[place] not in row:
                row[ids[place]] = Logprob(logprobs[place], place, token_text(ids[place], context))
        context.append(ids[0])
        dicts.append(row)
    return dicts
