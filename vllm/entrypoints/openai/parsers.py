# SPDX-License-Identifier: Apache-2.0
"""What a model writes, in parts: thoughts, content and calls of tools.

Each reader takes text in pieces of any size and gives ``Part``s. What it says depends on the text so far alone: where
that could still become a mark, it waits. So a stream says the same as the whole text at once, however it is cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Part(NamedTuple):
    """A further piece of the ``content`` or ``reasoning``, the ``name`` that begins a call, or more ``arguments``."""

    kind: str
    text: str


# The marks around thoughts; whether thoughts come first without a mark, as where the template's prompt ends with it.
REASONING: dict[str, tuple[str, str, bool]] = {
    "qwen3": ("<think>", "</think>", False),
    "glm45": ("<think>", "</think>", False),
    "deepseek_r1": ("<think>", "</think>", True),
    "minimax_m2": ("<think>", "</think>", True),
    "seed_oss": ("<seed:think>", "</seed:think>", False),
}


def cut(text: str, marks: tuple[str, ...]) -> tuple[str, str, str]:
    """(before, mark, rest) at the first of ``marks``; without one, ``rest`` is what a mark may yet begin with."""
    found = min(((at, mark) for mark in marks if (at := text.find(mark)) >= 0), default=None)
    if found is not None:
        at, mark = found
        return text[:at], mark, text[at + len(mark) :]
    for at in range(max(0, len(text) - max(map(len, marks)) + 1), len(text)):
        if any(mark.startswith(text[at:]) for mark in marks):
            return text[:at], "", text[at:]
    return text, "", ""


def thinks_first(name: str, prompt: str) -> bool | None:
    """Whether the output begins inside thoughts, after ``prompt``; None: as the model likes."""
    start, end, first = REASONING[name]
    tail = prompt.rstrip()
    return False if tail.endswith(end) else True if first or tail.endswith(start) else None


class Reader:
    """``feed`` returns what a further piece of text says; with ``final`` nothing comes after it. This one reads content
    alone."""

    def __init__(self) -> None:
        self._text, self._state = "", "content"

    def feed(self, text: str, final: bool = False) -> list[Part]:
        self._text += text
        return [part for part in self._read(final) if part.text or part.kind == "name"]

    def _read(self, final: bool) -> list[Part]:
        return [Part("content", self._take())]

    def _take(self) -> str:
        text, self._text = self._text, ""
        return text


class ReasoningReader(Reader):
    """Thoughts of the model ``name``, then what ``after`` reads. White space next to the marks belongs to neither."""

    def __init__(self, name: str, prompt: str, after: Reader) -> None:
        super().__init__()
        self._start, self._end, _ = REASONING[name]
        self._first, self._after = thinks_first(name, prompt), after
        self._begun = False
        self._state = "content" if self._first is False else "start"

    def _read(self, final: bool) -> list[Part]:
        parts: list[Part] = []
        if self._state == "start":
            shown = self._text.lstrip()
            if not final and self._start.startswith(shown) and shown != self._start:
                return []
            if shown.startswith(self._start):
                self._text, self._state = shown[len(self._start) :], "reasoning"
            else:
                self._state = "reasoning" if self._first else "content"
        if self._state == "reasoning":
            if not self._begun:
                self._text = self._text.lstrip()
                self._begun = bool(self._text)
            before, mark, rest = cut(self._text, (self._end,))
            if mark:
                parts.append(Part("reasoning", before.rstrip()))
                self._text, self._state = rest, "gap"
            else:
                said = (self._text if final else before).rstrip()
                parts.append(Part("reasoning", said))
                self._text = self._text[len(said) :]
        if self._state == "gap":
            self._text = self._text.lstrip()
            self._state = "content" if self._text else "gap"
        text = self._take() if self._state == "content" else ""
        return parts + (self._after.feed(text, final) if text or final else [])


class _Value:
    """Where a JSON value ends, in text that comes in pieces; outside of strings, ``<`` ends a broken one."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped = 0, False, False

    def end(self, text: str) -> int | None:
        """The index after the value's last character; None: all of ``text`` is of the value."""
        for i, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped, self._in_string = char == "\\", char != '"'
                if char == '"' and not self._depth:
                    return i + 1
            elif char == '"':
                self._in_string = True
            elif char == "<" or (not self._depth and char in ",}]"):
                return i
            elif char in "{}[]":
                self._depth += 1 if char in "{[" else -1
                if not self._depth:
                    return i + 1
        return None


_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\S)')


class _JsonCall:
    """One ``{"name": …, "arguments": …}``, whose arguments are given as they are written, in pieces."""

    def __init__(self) -> None:
        self.text, self.has_name = "", False
        self._value, self._quoted = _Value(), ""

    def take(self, text: str, end_mark: str = "") -> tuple[list[Part], str | None]:
        """What ``text`` adds, and what follows the arguments; None: they go on, or have not begun in ``self.text``,
        where an ``end_mark`` comes first or may yet come."""
        self.text += text
        parts = []
        if not self.has_name:
            head, at = _HEAD.match(self.text), self.text.find(end_mark) if end_mark else -1
            if head is None or 0 <= at < head.end() + 1 - len(end_mark):
                return [], None
            self.has_name = True
            parts.append(Part("name", str(_loads(head[1]))))
            self._quoted = '"' if self.text[head.end()] == '"' else ""
            self.text = self.text[head.end() :]
            is_first = True
        else:
            is_first = False
        end = self._value.end(self.text)
        piece, rest = (self.text, None) if end is None else (self.text[:end], self.text[end:])
        self.text = ""
        if self._quoted:  # the JSON of an object, in a string
            self._quoted = piece if is_first else self._quoted + piece
            piece = str(_loads(self._quoted)) if rest is not None else ""
        return [*parts, Part("arguments", piece)], rest


def _loads(text: str) -> Any:
    """The value, or ``text`` where it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


class _CallsInContent(Reader):
    """Content until one of ``marks``; what follows a mark is the subclass's, which goes back to the state content.
    White space next to calls is not content."""

    marks: tuple[str, ...]

    def __init__(self) -> None:
        super().__init__()
        self._is_after_call = False

    def _read(self, final: bool) -> list[Part]:
        parts: list[Part] = []
        state = None
        while state != (self._state, self._text):
            state = (self._state, self._text)
            parts += self._read_content(final) if self._state == "content" else self._read_call(final)
        return parts

    def _read_content(self, final: bool) -> list[Part]:
        before, mark, rest = cut(self._text, self.marks)
        if mark:
            self._text, self._state, self._is_after_call = rest, self.state_after(mark), True
            return [Part("content", before.rstrip())]
        said = self._text if final else before.rstrip()
        self._text = self._text[len(said) :]
        if self._is_after_call and not said.strip():
            return []
        self._is_after_call = False
        return [Part("content", said)]

    def state_after(self, mark: str) -> str:
        return "call"

    def _read_call(self, final: bool) -> list[Part]:
        raise NotImplementedError


class HermesReader(_CallsInContent):
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, any number of them."""

    marks = ("<tool_call>",)
    _END = "</tool_call>"

    def __init__(self, tools: Mapping[str, Any]) -> None:
        super().__init__()
        self._call = _JsonCall()

    def _read_call(self, final: bool) -> list[Part]:
        if self._state == "tail":
            _, mark, rest = cut(self._text, (self._END, *self.marks))
            self._text = rest if not final or mark else ""
            if mark:
                self._state = "content" if mark == self._END else "call"
            return []
        parts, rest_or_none = self._call.take(self._take(), self._END)
        if self._call.has_name:
            if rest_or_none is not None:
                self._text, self._state, self._call = rest_or_none, "tail", _JsonCall()
            return parts
        body, mark, rest = self._call.text.partition(self._END)
        if not mark and not final:
            return []
        self._text, self._state, self._call = rest, "content", _JsonCall()
        call = _loads(body.strip())
        if isinstance(call, dict) and isinstance(call.get("name"), str):
            arguments = call.get("arguments", call.get("parameters", {}))
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            return [Part("name", call["name"]), Part("arguments", text)]
        return [Part("content", self.marks[0] + body + mark)]


class XmlReader(_CallsInContent):
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>``; values are text or JSON,
    as the tool's schema has their types."""

    marks = ("<tool_call>", "<function=")

    def __init__(self, tools: Mapping[str, Any]) -> None:
        super().__init__()
        self._tools = tools
        self._types: Mapping[str, Any] = {}
        self._num_parameters = 0

    def state_after(self, mark: str) -> str:
        return "name" if mark == "<function=" else "call"

    def _read_call(self, final: bool) -> list[Part]:
        before = (self._state, self._text)
        parts = self._step(final)
        if final and (self._state, self._text) == before:  # nothing more comes of it
            self._text, self._state = "", "content"
            return [self._close()] if before[0] in ("parameters", "value") else []
        return parts

    def _step(self, final: bool) -> list[Part]:
        if self._state == "call":
            _, mark, self._text = cut(self._text, ("<function=", "</tool_call>"))
            if mark:
                self._state = "name" if mark == "<function=" else "content"
        elif self._state == "name":
            name, mark, rest = self._text.partition(">")
            if mark:
                self._text, self._state, self._num_parameters = rest, "parameters", 0
                schema = self._tools.get(name.strip()) or {}
                self._types = schema.get("properties") or {}
                return [Part("name", name.strip())]
        elif self._state == "parameters":
            _, mark, self._text = cut(self._text, ("<parameter=", "</function>", "</tool_call>"))
            if mark == "<parameter=":
                self._state = "value"
            elif mark:
                self._state = "call" if mark == "</function>" else "content"
                return [self._close()]
        else:
            key, mark, rest = self._text.partition(">")
            value, end, after = rest.partition("</parameter>")
            if end:
                self._text, self._state = after, "parameters"
                return [self._parameter(key.strip(), value)]
        return []

    def _parameter(self, key: str, value: str) -> Part:
        value = value.removeprefix("\n").removesuffix("\n")
        schema = self._types.get(key)
        kind = schema.get("type") if isinstance(schema, dict) else None
        read = value if kind in (None, "string") and schema is not None else _loads(value)
        self._num_parameters += 1
        begin = "{" if self._num_parameters == 1 else ", "
        return Part(
            "arguments", f"{begin}{json.dumps(key, ensure_ascii=False)}: {json.dumps(read, ensure_ascii=False)}"
        )

    def _close(self) -> Part:
        return Part("arguments", "}" if self._num_parameters else "{}")


class ArrayReader(Reader):
    """``[{"name": …, "parameters": …}, …]``: calls and nothing else, as a grammar makes them."""

    def __init__(self) -> None:
        super().__init__()
        self._call: _JsonCall | None = None

    def _read(self, final: bool) -> list[Part]:
        parts: list[Part] = []
        while self._text:
            if self._call is None:
                self._text = self._text.lstrip(" \n\r\t[]},")
                self._call = _JsonCall() if self._text else None
            else:
                more, rest = self._call.take(self._take())
                parts += more
                if rest is not None:
                    self._text, self._call = rest, None
        return parts


class NamedReader(Reader):
    """All of the text is the arguments of the tool ``name``."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def _read(self, final: bool) -> list[Part]:
        parts = [Part("name", self._name)] if self._state == "content" else []
        self._state = "arguments"
        return [*parts, Part("arguments", self._take())]


TOOL_PARSERS: dict[str, Callable[[Mapping[str, Any]], Reader]] = {
    "hermes": HermesReader,
    "qwen3_coder": XmlReader,
    "qwen3_xml": XmlReader,
}
TOOL_MARKS = ("<tool_call>", "</tool_call>")
