# SPDX-License-Identifier: Apache-2.0
"""Thoughts, content and calls in a model's text: what is expected is written by hand, and holds however it is cut."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.entrypoints.openai.parsers import (
    TOOL_PARSERS,
    ArrayReader,
    HermesReader,
    NamedReader,
    Part,
    Reader,
    ReasoningReader,
    XmlReader,
)

TOOLS = {
    "weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "full": {"type": "boolean"}}},
    "now": {"properties": {}},
}


def said(reader: Reader, pieces: list[str]) -> dict[str, Any]:
    """What the parts add up to."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for i, piece in enumerate(pieces):
        for kind, text in reader.feed(piece, final=i == len(pieces) - 1):
            if kind == "name":
                found["calls"].append((text, ""))
            elif kind == "arguments":
                name, before = found["calls"][-1]
                found["calls"][-1] = (name, before + text)
            else:
                found[kind] += text
    return {key: value for key, value in found.items() if value}


MAKE = {
    "hermes": lambda: HermesReader(TOOLS),
    "xml": lambda: XmlReader(TOOLS),
    "array": ArrayReader,
    "named": lambda: NamedReader("weather"),
    "plain": Reader,
    "qwen3": lambda: ReasoningReader("qwen3", "", HermesReader(TOOLS)),
    "qwen3-opened": lambda: ReasoningReader("qwen3", "<|im_start|>assistant\n<think>\n", HermesReader(TOOLS)),
    "qwen3-closed": lambda: ReasoningReader("qwen3", "assistant\n<think>\n\n</think>\n\n", HermesReader(TOOLS)),
    "deepseek": lambda: ReasoningReader("deepseek_r1", "", Reader()),
    "thinking-array": lambda: ReasoningReader("qwen3", "", ArrayReader()),
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
ARGS = '{"city": "Paris", "days": 2}'
END = "</tool_call>"
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("plain", "a <tool_call> b", {"content": "a <tool_call> b"}),
    ("hermes", "just text < 3 <tool", {"content": "just text < 3 <tool"}),
    ("hermes", " text \n", {"content": " text \n"}),
    ("hermes", CALL, {"calls": [("weather", ARGS)]}),
    ("hermes", f"Let me see.\n\n{CALL}\n", {"content": "Let me see.", "calls": [("weather", ARGS)]}),
    ("hermes", f"{CALL}\n{CALL}", {"calls": [("weather", ARGS)] * 2}),
    ("hermes", f"{CALL}\nDone. ", {"content": "\nDone. ", "calls": [("weather", ARGS)]}),
    (
        "hermes",
        r'<tool_call>{"name":"w\u00e9","arguments":{"a":"</tool_call> } \" <","b":[{}]}}</tool_call>',
        {"calls": [("wé", r'{"a":"</tool_call> } \" <","b":[{}]}')]},
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"city": "é"}, "name": "weather"}</tool_call>',
        {"calls": [("weather", '{"city": "é"}')]},
    ),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', {"calls": [("now", "{}")]}),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', {"calls": [("now", "null")]}),
    ("hermes", r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>', {"calls": [("f", '{"a": 1}')]}),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, ', {"calls": [("f", '{"a": [1, ')]}),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> x',
        {"content": " x", "calls": [("f", '{"a": 1')]},
    ),
    # The first mark of the end counts, as it must in a stream.
    (
        "hermes",
        f'<tool_call>{{"name": "a{END}", "arguments": {{}}}}{END}',
        {"content": f'<tool_call>{{"name": "a{END}", "arguments": {{}}}}{END}'},
    ),
    ("hermes", "<tool_call>no JSON</tool_call> x", {"content": "<tool_call>no JSON</tool_call> x"}),
    ("hermes", '<tool_call>{"name": "f"', {"content": '<tool_call>{"name": "f"'}),
    (
        "xml",
        "Well.\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "<parameter=full>\ntrue\n</parameter>\n</function>\n</tool_call>",
        {"content": "Well.", "calls": [("weather", '{"city": "Paris", "days": 2, "full": true}')]},
    ),
    ("xml", "<tool_call>\n<function=now>\n</function>\n</tool_call>", {"calls": [("now", "{}")]}),
    (
        "xml",
        "<function=weather><parameter=city>\n12\n</parameter></function>",
        {"calls": [("weather", '{"city": "12"}')]},
    ),
    (
        "xml",
        "<tool_call><function=weather><parameter=city>\na\nb <c>\n\n</parameter><parameter=days>\n2",
        {"calls": [("weather", '{"city": "a\\nb <c>\\n"}')]},
    ),
    ("xml", "a < b", {"content": "a < b"}),
    ("xml", "<tool_call>\n</tool_call>x", {"content": "x"}),
    (
        "array",
        '[{"name": "weather", "parameters": {"city": "]"}}, {"name":"now","parameters":{}}]',
        {"calls": [("weather", '{"city": "]"}'), ("now", "{}")]},
    ),
    ("named", ARGS, {"calls": [("weather", ARGS)]}),
    ("named", "", {"calls": [("weather", "")]}),
    ("qwen3", "<think>\nhm </thin\n</think>\n\nYes.", {"reasoning": "hm </thin", "content": "Yes."}),
    ("qwen3", "No thoughts </think>", {"content": "No thoughts </think>"}),
    ("qwen3", f"<think>a</think>\n{CALL}", {"reasoning": "a", "calls": [("weather", ARGS)]}),
    ("qwen3", "\n<think>cut short </th", {"reasoning": "cut short </th"}),
    ("qwen3", "<thi", {"content": "<thi"}),
    ("qwen3-opened", "hm\n</think>\n\nYes.", {"reasoning": "hm", "content": "Yes."}),
    ("qwen3-closed", "Yes. <think>", {"content": "Yes. <think>"}),
    ("deepseek", "hm</think>Yes.", {"reasoning": "hm", "content": "Yes."}),
    ("deepseek", "<think>hm</think>Yes.", {"reasoning": "hm", "content": "Yes."}),
    ("deepseek", "hm", {"reasoning": "hm"}),
    (
        "thinking-array",
        '<think>x</think>[{"name":"now","parameters":{}}]',
        {"reasoning": "x", "calls": [("now", "{}")]},
    ),
]


@pytest.mark.parametrize(("maker", "text", "expected"), CASES)
def test_whole_and_by_character(maker: str, text: str, expected: dict[str, Any]) -> None:
    assert said(MAKE[maker](), [text]) == expected
    assert said(MAKE[maker](), [*text, ""]) == expected


FRAGMENTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', '{"a": "</tool_call>"}',
    "}", "{", '"', "\\", "<function=f>", "<parameter=x>", "</parameter>", "</function>", "\n", " ", "text", "é",
    "<", "[", "]", ",", '{"arguments": {}, "name": "f"}', CALL,
]  # fmt: skip


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    maker=st.sampled_from(sorted(MAKE)),
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join),
    cuts=st.lists(st.integers(0, 200), max_size=12),
)
def test_however_the_text_is_cut(maker: str, text: str, cuts: list[int]) -> None:
    places = [0, *sorted(c for c in cuts if c <= len(text)), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    whole = said(MAKE[maker](), [text])
    assert said(MAKE[maker](), pieces) == whole
    assert said(MAKE[maker](), [*text, ""]) == whole


def test_arguments_come_in_pieces_and_names_once() -> None:
    parts = [part for char in CALL for part in HermesReader(TOOLS).feed("")]
    assert parts == []
    reader = HermesReader(TOOLS)
    parts = [part for char in CALL for part in reader.feed(char)]
    assert parts[0] == Part("name", "weather")
    assert len(parts) == 1 + len(ARGS)
    assert json.loads("".join(text for _, text in parts[1:])) == {"city": "Paris", "days": 2}


def test_registry() -> None:
    assert {"hermes", "qwen3_coder", "qwen3_xml"} <= set(TOOL_PARSERS)
