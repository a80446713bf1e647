# SPDX-License-Identifier: Apache-2.0
"""Forms of answers, tools, thoughts and /v1/responses, with OpenAI's client: from a random model that is held to them,
and from a script, which says what a model would."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from engine_fakes import byte_tokenizer
from http_server import ENGINE_ARGS, Server, serving
from inline_engine import InlineEngine
from pydantic import BaseModel

from vllm.entrypoints.openai.chat_answer import Plan
from vllm.entrypoints.openai.cli_args import FrontendArgs
from vllm.entrypoints.openai.errors import APIError
from vllm.entrypoints.openai.protocol import ChatCompletionRequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.structured_output import Grammars

HELLO: Any = [{"role": "user", "content": "hello"}]


class Step(BaseModel):
    kind: Literal["add", "stop"]
    count: Literal[1, 2, 3]


def function(name: str, **properties: Any) -> Any:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [
    function("weather", city={"enum": ["Paris", "Oslo"]}, days={"enum": [1, 2]}),
    function("now"),
]


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def is_call(name: str, arguments: str) -> bool:
    value = json.loads(arguments)
    if name == "now":
        return value == {}
    return name == "weather" and value["city"] in ("Paris", "Oslo") and value["days"] in (1, 2) and len(value) == 2


TIGHT = {"disable_any_whitespace": True}


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[ab]{3}c"}}, "[ab]{3}c"),
        ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]/'}}, "x[0-9]"),
        ({"structured_outputs": {"json": {"enum": [1, "a"]}, **TIGHT}}, '1|"a"'),
        ({"guided_regex": "[ab]{3}c"}, "[ab]{3}c"),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"guided_grammar": 'start: "x" /[0-9]/'}, "x[0-9]"),
        ({"guided_json": {"enum": ["a"]}, "guided_whitespace_pattern": " ?"}, ' ?"a" ?'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 7}}}},
            r"\s*7\s*",
        ),
    ],
)
def test_forms(server: Server, fields: dict[str, Any], pattern: str) -> None:
    body = {"seed": 1, "max_tokens": 60, **fields}
    for text in (
        server.post("/v1/chat/completions", {"messages": HELLO, **body})["choices"][0]["message"]["content"],
        server.post("/v1/completions", {"prompt": "hello", **body})["choices"][0]["text"],
        "".join(e["choices"][0]["text"] for e in server.stream("/v1/completions", {"prompt": "hello", **body})),
    ):
        assert re.fullmatch(pattern, text), text


def test_json_object(server: Server) -> None:
    body = {"messages": HELLO, "response_format": {"type": "json_object"}, "max_tokens": 9, "seed": 1}
    text = server.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    assert text.startswith("{")


def test_parse_helper(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(model="chars", messages=HELLO, response_format=Step, seed=3, max_tokens=200)
    assert isinstance(parsed.choices[0].message.parsed, Step)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format: type 'xml'"),
        ({"structured_outputs": {"regex": "("}}, "unclosed group"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "regex and choice"),
        ({"structured_outputs": {"regexp": "a"}}, "regexp"),
        ({"structured_outputs": {"regex": "a"}, "guided_json": {}}, "structured_outputs and guided_json"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"tools": TOOLS}, "--enable-auto-tool-choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "weather"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "no function"),
        ({"tools": TOOLS, "tool_choice": "perhaps"}, "perhaps"),
    ],
)
def test_refused(server: Server, fields: dict[str, Any], words: str) -> None:
    error = server.post("/v1/chat/completions", {"messages": HELLO, **fields}, status=400)
    assert words in error["error"]["message"]


def test_structural_tags_are_refused_by_name(server: Server) -> None:
    fields = {"response_format": {"type": "structural_tag", "structures": []}}
    error = server.post("/v1/chat/completions", {"messages": HELLO, **fields}, status=501)
    assert "structural_tag" in error["error"]["message"]


def called(stream: Any) -> tuple[list[tuple[str, str, str]], str, str, Any]:
    """(id, name, arguments) of the calls, content, thoughts and the reason of the end, of a client's stream."""
    calls: list[list[str]] = []
    content, thoughts, reason = "", "", None
    for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            thoughts += getattr(choice.delta, "reasoning_content", None) or ""
            assert getattr(choice.delta, "reasoning", None) == getattr(choice.delta, "reasoning_content", None)
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or ():
                if call.id:
                    assert call.index == len(calls)
                    calls.append([call.id, call.function.name, ""])
                assert call.id or call.function.name is None
                calls[call.index][2] += call.function.arguments
    return [(i, n, a) for i, n, a in calls], content, thoughts, reason


@pytest.mark.parametrize("parallel", [None, False])
def test_required_tools(client: openai.OpenAI, parallel: bool | None) -> None:
    fields: Any = {"model": "chars", "messages": HELLO, "tools": TOOLS, "tool_choice": "required", "max_tokens": 300}
    fields |= {"logit_bias": {"64": 20.0}}  # "]" as soon as it may come
    if parallel is not None:
        fields["parallel_tool_calls"] = parallel
    for seed in range(2):
        whole = client.chat.completions.create(seed=seed, **fields).choices[0]
        assert (whole.message.content, whole.finish_reason) == (None, "tool_calls")
        calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
        assert all(is_call(*call) for call in calls)
        assert len(calls) == 1 if parallel is False else calls
        streamed, content, _, reason = called(client.chat.completions.create(seed=seed, stream=True, **fields))
        assert ([call[1:] for call in streamed], content, reason) == (calls, "", "tool_calls")
        assert len({i for i, _, _ in streamed}) == len(streamed)


def test_a_named_tool(client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    fields: Any = {"model": "chars", "messages": HELLO, "tools": TOOLS, "tool_choice": choice, "seed": 2}
    whole = client.chat.completions.create(max_tokens=200, **fields).choices[0]
    (call,) = whole.message.tool_calls
    assert is_call(call.function.name, call.function.arguments)
    ((_, name, arguments),), content, _, reason = called(
        client.chat.completions.create(max_tokens=200, stream=True, **fields)
    )
    assert (name, arguments, content, reason) == ("weather", call.function.arguments, "", whole.finish_reason)


def test_no_tool(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="chars", messages=HELLO, tools=TOOLS, tool_choice="none", max_tokens=3, temperature=0
    )
    assert answer.choices[0].message.tool_calls is None


class Scripted(InlineEngine):
    """Says ``script`` in pieces of ``size`` characters, after the engine has taken the request as ever."""

    script, size = "", 3

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any) -> AsyncGenerator[Any]:
        self.params, self.prompt = sampling_params, prompt
        streams = sampling_params.output_kind is RequestOutputKind.DELTA
        size = self.size if streams else len(self.script) + 1
        pieces = [self.script[at : at + size] for at in range(0, len(self.script) + 1, size)]
        for i, piece in enumerate(pieces):
            last = i == len(pieces) - 1
            completion = CompletionOutput(0, piece, [5], None, None, finish_reason="stop" if last else None)
            yield RequestOutput(request_id, None, prompt["prompt_token_ids"], None, [completion], last)


@pytest.fixture(scope="module")
def scripted(char_llama: Path) -> Iterator[Scripted]:
    engine = Scripted(str(char_llama), served_model_name="chars", **ENGINE_ARGS)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def thinking(scripted: Scripted) -> Iterator[openai.OpenAI]:
    options: Any = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    with serving(scripted, **options) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
            yield made


SCRIPT = (
    "<think>\nwhich city?\n</think>\n\nI look.\n<tool_call>\n"
    '{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
CALLS = [("weather", '{"city": "Paris", "days": 2}'), ("now", "{}")]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_thoughts_and_calls_as_the_model_likes(thinking: openai.OpenAI, scripted: Scripted, size: int) -> None:
    scripted.script, scripted.size = SCRIPT, size
    fields: Any = {"model": "chars", "messages": HELLO, "tools": TOOLS}
    choice = thinking.chat.completions.create(**fields).choices[0]
    assert [(c.function.name, c.function.arguments) for c in choice.message.tool_calls] == CALLS
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    assert choice.message.reasoning_content == choice.message.reasoning == "which city?"
    streamed, content, thoughts, reason = called(thinking.chat.completions.create(stream=True, **fields))
    assert [call[1:] for call in streamed] == CALLS
    assert (content, thoughts, reason) == ("I look.", "which city?", "tool_calls")
    one = thinking.chat.completions.create(parallel_tool_calls=False, **fields).choices[0]
    assert [(c.function.name, c.function.arguments) for c in one.message.tool_calls] == CALLS[:1]
    hidden = thinking.chat.completions.create(extra_body={"include_reasoning": False}, **fields).choices[0]
    assert not hasattr(hidden.message, "reasoning_content")
    with thinking.chat.completions.stream(**fields) as stream:  # the client's own reader of a stream
        final = stream.get_final_completion().choices[0]
    assert [(c.function.name, c.function.arguments) for c in final.message.tool_calls] == CALLS


def test_a_form_beside_tools_that_the_model_chooses(thinking: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no room for tools"):
        thinking.chat.completions.create(
            model="chars", messages=HELLO, tools=TOOLS, response_format={"type": "json_object"}
        )


def test_responses_of_thoughts_and_calls(thinking: openai.OpenAI, scripted: Scripted) -> None:
    scripted.script, scripted.size = SCRIPT, 4
    tools: Any = [{"type": "function", **tool["function"], "strict": True} for tool in TOOLS]
    fields: Any = {"model": "chars", "input": "hello", "tools": tools}
    response = thinking.responses.create(**fields)
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item.type for item in response.output] == kinds
    assert response.output_text == "I look."
    assert [(item.name, item.arguments) for item in response.output[2:]] == CALLS
    assert response.output[0].content[0].text == "which city?"
    events = list(thinking.responses.create(stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final = events[-1].response
    assert (events[0].type, events[-1].type, final.status) == ("response.created", "response.completed", "completed")
    assert [(item.name, item.arguments) for item in final.output[2:]] == CALLS
    pieces: dict[str, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            pieces[event.item_id] = pieces.get(event.item_id, "") + event.delta
    assert [pieces[item.id] for item in final.output[:3]] == ["which city?", "I look.", CALLS[0][1]]
    opened = [event.item.type for event in events if event.type == "response.output_item.added"]
    closed = [event.item.type for event in events if event.type == "response.output_item.done"]
    assert opened == closed == kinds
    with thinking.responses.stream(**fields) as stream:
        assert stream.get_final_response().output_text == "I look."
    # The next turn sends it all back.
    again = [{"role": "user", "content": "hello"}, *[item.model_dump() for item in response.output]]
    again += [{"type": "function_call_output", "call_id": response.output[2].call_id, "output": "rain"}]
    scripted.script = "Rain."
    assert thinking.responses.create(**{**fields, "input": again}).output_text == "Rain."


def test_responses_of_the_model(client: openai.OpenAI, server: Server) -> None:
    chat = client.chat.completions.create(
        model="chars",
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}],
        max_tokens=7,
        temperature=0,
    )
    fields: Any = {"model": "chars", "instructions": "be brief", "input": "hello", "temperature": 0}
    response = client.responses.create(max_output_tokens=7, **fields)
    assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.usage.output_tokens, response.usage.input_tokens) == (7, chat.usage.prompt_tokens)
    assert response.store is False
    parts: Any = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]
    assert (
        client.responses.create(max_output_tokens=7, **{**fields, "input": parts}).output_text == response.output_text
    )
    streamed = list(client.responses.create(max_output_tokens=7, stream=True, **fields))
    assert "".join(e.delta for e in streamed if e.type == "response.output_text.delta") == response.output_text
    assert streamed[-1].type == "response.incomplete"
    parsed = client.responses.parse(model="chars", input="hello", text_format=Step, max_output_tokens=200)
    assert isinstance(parsed.output_parsed, Step)


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": "resp_1"},
        {"conversation": "c"},
        {"background": True},
        {"truncation": "auto"},
        {"include": ["file_search_call.results"]},
        {"tools": [{"type": "web_search"}]},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": ""},
    ],
)
def test_responses_refuse_by_name(server: Server, fields: dict[str, Any]) -> None:
    error = server.post("/v1/responses", {"input": "hello", **fields}, status=400)
    assert next(iter(fields)) in error["error"]["message"]


OPEN, CLOSED = "<|assistant|><think>\n", "<|assistant|><think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("parser", "prompt", "has_marks", "expected"),
    [
        ("qwen3", "<|assistant|>", True, (260, 261)),
        ("qwen3", OPEN, True, (None, 261)),
        ("qwen3", CLOSED, True, (None, None)),
        ("qwen3", "<|assistant|>", False, (None, None)),
        ("deepseek_r1", "<|assistant|>", True, (None, 261)),
        ("deepseek_r1", CLOSED, True, (None, None)),
        ("deepseek_r1", "<|assistant|>", False, "as a token"),
        (None, OPEN, True, (None, None)),
    ],
)
@pytest.mark.parametrize("special", [False, True])
def test_where_the_form_begins(parser: str | None, prompt: str, has_marks: bool, expected: Any, special: bool) -> None:
    tokenizer = byte_tokenizer()
    if has_marks:
        tokenizer.add_tokens(["<think>", "</think>"], special_tokens=special)
    request = ChatCompletionRequest(messages=HELLO, response_format={"type": "json_object"})
    plan, params = Plan(request, FrontendArgs(reasoning_parser=parser)), SamplingParams()
    if isinstance(expected, str):
        with pytest.raises(APIError, match=expected):
            plan.prepare(params, prompt, tokenizer)
        return
    plan.prepare(params, prompt, tokenizer)
    structure = params.structured_outputs
    assert structure is not None
    assert (structure.thinking_starts, structure.thinking_ends) == expected
    assert params.skip_special_tokens is not (special and has_marks and parser is not None)


def test_definitions_of_tools_meet_in_one_schema() -> None:
    def tool(name: str, definition: Any) -> Any:
        parameters = {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": definition}}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    def schema(*tools: Any) -> Any:
        request = ChatCompletionRequest(messages=HELLO, tools=list(tools), tool_choice="required")
        structure = Plan(request, FrontendArgs()).structure
        assert structure is not None
        Grammars(byte_tokenizer).check(structure)
        return structure.json

    assert schema(tool("a", {"const": 1}), tool("b", {"const": 1}))["$defs"] == {"X": {"const": 1}}
    with pytest.raises(APIError, match="two of them define 'X'"):
        schema(tool("a", {"const": 1}), tool("b", {"const": 2}))


def test_options_of_parsers() -> None:
    for options, words in (
        ({"tool_call_parser": "x"}, "hermes"),
        ({"reasoning_parser": "x"}, "qwen3"),
        ({"enable_auto_tool_choice": True}, "needs tool_call_parser"),
    ):
        with pytest.raises(ValueError, match=words):
            FrontendArgs(**options)  # type: ignore[arg-type]
