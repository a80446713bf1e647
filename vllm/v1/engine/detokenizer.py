# SPDX-License-Identifier: Apache-2.0
"""From the tokens of one completion to its text, as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm.sampling_params import SamplingParams

_REPLACEMENT = "\ufffd"
_CONTEXT = 8
_MAX_WINDOW = 32
# A UTF-8 character has at most four bytes, so that of those that a tail of tokens left open at most three are known.
_CHARACTER_BYTES = 4


def make_decode(tokenizer: Any, params: SamplingParams) -> Callable[[Sequence[int]], str]:
    """Token ids to text. A fast tokenizer's own backend, without transformers' layer, takes a fifth of the time."""
    skip = params.skip_special_tokens
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return lambda ids: backend.decode(ids, skip_special_tokens=skip)
    spaces = params.spaces_between_special_tokens
    return lambda ids: tokenizer.decode(
        ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False, spaces_between_special_tokens=spaces
    )


def _num_equal(first: str, second: str) -> int:
    """The length of the common prefix."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


class IncrementalDecoder:
    """Gives the text of prompt and output, less the text of the prompt, piece by piece, in whole characters.

    A window of the last tokens is decoded again with each new one, for decoders join bytes and drop spaces by what
    comes before. Replacement characters at the end stand for bytes that later tokens may complete and are held back;
    those that a whole character's worth of tokens did not complete are the model's.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_token_ids: Sequence[int]) -> None:
        self._decode = decode
        self._window: list[int] = []
        text = ""
        # The context needs text, or a space at its end would be dropped, and should not begin inside a character.
        for size in (*range(_CONTEXT, _CONTEXT + _CHARACTER_BYTES), len(prompt_token_ids)):
            self._window = list(prompt_token_ids[-size:])
            text = decode(self._window)
            if text and not text.startswith(_REPLACEMENT):
                break
        self._num_shown = len(text)
        self._open_prompt: str | None = None
        if text.endswith(_REPLACEMENT):
            # Either the prompt ends inside a character, which may turn all the bytes before it to replacements, or
            # with a replacement character of its own: the next tokens show which.
            self._open_prompt = text
            starts = [decode(self._window[: len(self._window) - size]) for size in range(_CHARACTER_BYTES)]
            self._num_shown = max(len(start.rstrip(_REPLACEMENT)) for start in starts)
        self._num_open_tokens = 0
        self._last_piece = 0
        self._next_piece = 0 if self._open_prompt else len(self._window)

    def add(self, token_ids: Sequence[int], finished: bool = False) -> str:
        """The text that ``token_ids`` add. What is still incomplete when ``finished`` is dropped."""
        self._window += token_ids
        text = self._decode(self._window)
        num_open = len(text) - len(text.rstrip(_REPLACEMENT))
        self._num_open_tokens = self._num_open_tokens + len(token_ids) if num_open else 0
        held = num_open
        if finished or self._num_open_tokens >= _CHARACTER_BYTES:
            held = min(num_open, _CHARACTER_BYTES - 1)
        end = len(text) - held
        if self._open_prompt is not None:
            unchanged = _num_equal(self._open_prompt, text)
            self._num_shown = max(self._num_shown, min(unchanged, end))
        piece = text[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        if piece:
            self._open_prompt = None
        if finished:
            return piece
        if piece and not num_open:
            self._last_piece, self._next_piece = self._next_piece, len(self._window)
            if len(self._window) > _MAX_WINDOW:
                self._cut(self._last_piece, held)
        elif len(self._window) > 4 * _MAX_WINDOW:
            self._cut(len(self._window) - _CONTEXT, held)
        return piece

    def _cut(self, start: int, held: int) -> None:
        """Forget the window's tokens before ``start``."""
        del self._window[:start]
        self._num_shown = len(self._decode(self._window)) - held
        self._last_piece, self._next_piece = 0, len(self._window)


class Detokenizer:
    """The text of one completion and the stop strings in it.

    ``text`` is what there is so far; ``num_stable`` of its characters can be shown before the end, as no stop string
    can begin in them.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._decoder = IncrementalDecoder(make_decode(tokenizer, params), prompt_token_ids)
        self._stop = list(params.stop or ())
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self.text = ""

    def add(self, token_ids: Sequence[int], finished: bool = False) -> str | None:
        """Append the text of ``token_ids``; the stop string that ended it, if one did.

        The stop string whose end comes first counts, so that tokenisation does not matter; ``text`` then ends before
        it, or after it with ``include_stop_str_in_output``. Tokens up to ``min_tokens`` complete no stop string.
        """
        if not self._stop:
            self.text += self._decoder.add(token_ids, finished)
            return None
        last = len(token_ids) - 1
        for i, token_id in enumerate(token_ids):
            piece = self._decoder.add((token_id,), finished and i == last)
            self.text += piece
            self._num_tokens += 1
            if piece and self._num_tokens > self._min_tokens and (stop := self._find_stop(len(piece))):
                return stop
        if not token_ids and finished:
            self.text += self._decoder.add((), finished=True)
        return None

    def _find_stop(self, num_new: int) -> str | None:
        text = self.text
        found = []
        for stop in self._stop:
            start = text.find(stop, max(0, len(text) - num_new - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        if not found:
            return None
        end, start, stop = min(found)
        self.text = text[: end if self._include_stop else start]
        return stop

    @property
    def num_stable(self) -> int:
        if not self._stop or self._include_stop:
            return len(self.text)
        text = self.text
        longest = min(len(text), max(map(len, self._stop)) - 1)
        for size in range(longest, 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stop):
                return len(text) - size
        return len(text)
