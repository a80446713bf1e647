# SPDX-License-Identifier: Apache-2.0
"""From the tokens of one completion to its text, as they come."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from vllm.sampling_params import SamplingParams

_REPLACEMENT = "\ufffd"
_CONTEXT = 8
_MAX_WINDOW = 32
# A UTF-8 character has at most four bytes, so that of those that a tail of tokens left open at most three are known.
_CHARACTER_BYTES = 4
# A first byte of UTF-8 may ask for a continuation byte of a certain range: E0, F0, ED and F4 do.
_CONTINUATIONS = (range(0xA0, 0xC0), range(0x90, 0xA0), range(0x80, 0x90))


def continuation_ids(tokenizer: Any) -> list[int]:
    """Tokens of one UTF-8 continuation byte each; empty where the tokenizer has none under a name that is known.

    The names are those of byte fallback, of bytes written as characters, and of the byte-level alphabet, in which the
    bytes from 0x80 to 0xA0 follow U+0121.
    """
    to_id = getattr(tokenizer, "convert_tokens_to_ids", None)
    if to_id is None:
        return []
    found = []
    for values in _CONTINUATIONS:
        names = [name for byte in values for name in (f"<0x{byte:02X}>", chr(byte), chr(byte + 0xA2))]
        for token_id in map(to_id, names):
            if token_id not in (None, tokenizer.unk_token_id) and not tokenizer.decode([token_id]).strip(_REPLACEMENT):
                found.append(token_id)
                break
    return found


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
    comes before. Replacement characters at the end that later tokens may change are held back; the others, which are
    the model's own or stand for bytes that nothing can complete, are text. ``continuations`` gives tokens of one
    continuation byte each, which show the difference; without any, those that a whole character's worth of tokens did
    not change are text.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt_token_ids: Sequence[int],
        continuations: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        self._decode = decode
        self._continuations = continuations
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
        self._num_open_tokens = self._num_open_tokens + len(token_ids) if text.endswith(_REPLACEMENT) else 0
        held = self._num_open(text, finished)
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
        if piece and not held:
            self._last_piece, self._next_piece = self._next_piece, len(self._window)
            if len(self._window) > _MAX_WINDOW:
                self._cut(self._last_piece, held)
        elif len(self._window) > 4 * _MAX_WINDOW:
            self._cut(len(self._window) - _CONTEXT, held)
        return piece

    def _num_open(self, text: str, finished: bool) -> int:
        """How many characters at the end of ``text``, the window's, a later token may change."""
        if not text.endswith(_REPLACEMENT):
            return 0
        continuations = self._continuations()
        start = len(text.rstrip(_REPLACEMENT))
        if not continuations:
            settles = finished or self._num_open_tokens >= _CHARACTER_BYTES
            return min(len(text) - start, _CHARACTER_BYTES - 1) if settles else len(text) - start
        completed = [
            self._decode([*self._window, *[token_id] * size])
            for token_id in continuations
            for size in range(1, _CHARACTER_BYTES)
        ]
        while start < len(text) and all(other[start : start + 1] == _REPLACEMENT for other in completed):
            start += 1
        return len(text) - start

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

    def __init__(
        self,
        tokenizer: Any,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        continuations: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        continuations = continuations or functools.cache(lambda: continuation_ids(tokenizer))
        self._decoder = IncrementalDecoder(make_decode(tokenizer, params), prompt_token_ids, continuations)
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
