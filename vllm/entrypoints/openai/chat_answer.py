# SPDX-License-Identifier: Apache-2.0
"""What a chat's answer must be, and how its text becomes a message: tools, thoughts and grammars."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.openai.cli_args import FrontendArgs
from vllm.entrypoints.openai.errors import APIError
from vllm.entrypoints.openai.parsers import (
    REASONING,
    TOOL_MARKS,
    TOOL_PARSERS,
    ArrayReader,
    NamedReader,
    Part,
    Reader,
    ReasoningReader,
    thinks_first,
)
from vllm.outputs import CompletionOutput
from vllm.sampling_params import SamplingParams, StructuredOutputsParams, structured_params

if TYPE_CHECKING:
    from vllm.entrypoints.openai.protocol import ChatCompletionRequest, Sampling

_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


def structure_of(request: Sampling) -> StructuredOutputsParams | None:
    """What ``response_format``, ``structured_outputs`` or older ``guided_…`` fields ask for; one of them."""
    given: dict[str, dict[str, Any]] = {}
    if request.structured_outputs:
        given["structured_outputs"] = dict(request.structured_outputs)
    for name, field in _GUIDED.items():
        if (value := getattr(request, name)) is not None:
            given[name] = {field: value}
            if request.guided_whitespace_pattern is not None:
                given[name]["whitespace_pattern"] = request.guided_whitespace_pattern
    if (form := request.response_format) is not None:
        kind = form.get("type")
        if kind == "json_object":
            given["response_format"] = {"json_object": True}
        elif kind == "json_schema":
            described = form.get("json_schema")
            schema = described.get("schema") if isinstance(described, dict) else None
            if not isinstance(schema, dict):
                raise APIError(400, "response_format: json_schema needs an object 'schema'", "response_format")
            given["response_format"] = {"json": schema}
        elif kind == "structural_tag":
            raise APIError(501, "response_format: structural_tag is not supported; use json_schema", "response_format")
        elif kind != "text":
            raise APIError(
                400, f"response_format: type {kind!r:.100}; give text, json_object or json_schema", "response_format"
            )
    if len(given) > 1:
        raise APIError(400, f"{' and '.join(given)} are given; give one of them")
    for name, fields in given.items():
        try:
            return structured_params(fields)
        except ValueError as error:
            raise APIError(400, f"{name}: {error}", name) from None
    return None


class Plan:
    """What the answer to a chat may be; raises ``APIError`` for a request that cannot be answered so. ``tools``: the
    parameters' schemas by name; ``forced``: the tool that must be called, any of them for an empty name."""

    def __init__(self, request: ChatCompletionRequest, args: FrontendArgs) -> None:
        self.request, self.args = request, args
        self.tools = dict(_tool(tool) for tool in request.tools or ())
        self.forced: str | None = None
        self.parses_calls = False
        choice = request.tool_choice
        if isinstance(choice, dict):
            named = choice.get("function")
            self.forced = named.get("name") if isinstance(named, dict) else choice.get("name")
            if choice.get("type") != "function" or self.forced not in self.tools:
                raise APIError(
                    400, f"tool_choice={choice!r:.200} names none of the tools {list(self.tools)}", "tool_choice"
                )
        elif choice == "required":
            self.forced = ""
        elif choice not in (None, "auto", "none"):
            raise APIError(
                400, f"tool_choice={choice!r:.100}; give none, auto, required or a function's name", "tool_choice"
            )
        if not self.tools:
            if choice not in (None, "auto", "none"):
                raise APIError(400, f"tool_choice={choice!r:.100} needs tools", "tool_choice")
        elif self.forced is None and choice != "none":
            if not args.enable_auto_tool_choice or args.tool_call_parser is None:
                raise APIError(
                    400,
                    "tools with tool_choice=auto need a server with --enable-auto-tool-choice and --tool-call-parser; "
                    "give tool_choice none, required or a function's name",
                    "tool_choice",
                )
            self.parses_calls = True

    @property
    def structure(self) -> StructuredOutputsParams | None:
        """The grammar of the answer, after its thoughts."""
        asked = structure_of(self.request)
        if self.forced is None:
            if asked is not None and self.parses_calls:
                raise APIError(
                    400,
                    "a form of the answer leaves no room for tools; give tool_choice=none, or no form",
                    "tool_choice",
                )
            return asked
        if asked is not None:
            raise APIError(400, f"tool_choice={self.request.tool_choice!r:.100} is a form of the answer; give no other")
        if self.forced:
            return StructuredOutputsParams(json=self.tools[self.forced])
        definitions: dict[str, Any] = {}
        calls = []
        for name, schema in self.tools.items():
            parameters = dict(schema)
            for key in ("$defs", "definitions"):
                for definition, value in (parameters.pop(key, None) or {}).items():
                    if definitions.setdefault(key, {}).setdefault(definition, value) != value:
                        raise APIError(
                            400, f"tools: two of them define {definition!r:.100} in {key}; give it two names", "tools"
                        )
            properties = {"name": {"const": name}, "parameters": parameters}
            call = {"type": "object", "properties": properties, "required": list(properties)}
            calls.append({**call, "additionalProperties": False})
        most = {"maxItems": 1} if self.request.parallel_tool_calls is False else {}
        array = {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}}
        return StructuredOutputsParams(json={**definitions, **array})

    def prepare(self, params: SamplingParams, prompt: str, tokenizer: Any) -> None:
        """Complete ``params`` for the rendered ``prompt``: the grammar, and marks among the text."""
        structure, parser = self.structure, self.args.reasoning_parser
        marks: tuple[str, ...] = TOOL_MARKS if self.parses_calls else ()
        if parser is not None:
            start, end, _ = REASONING[parser]
            marks += (start, end)
            first = thinks_first(parser, prompt)
            if structure is not None and first is not False:
                start_id, structure.thinking_ends = _token_id(tokenizer, start), _token_id(tokenizer, end)
                structure.thinking_starts = None if first else start_id
                if first and structure.thinking_ends is None:
                    raise APIError(400, f"a form of the answer after thoughts needs {end} as a token of the tokenizer")
                if not first and start_id is None:
                    structure.thinking_ends = None  # no thoughts without the token that begins them
        params.structured_outputs = structure
        if marks and any(token.special and token.content in marks for token in tokenizer.added_tokens_decoder.values()):
            params.skip_special_tokens = False

    def answer(self, prompt: str) -> ChatAnswer:
        """For one choice."""
        reader: Reader
        if self.forced is not None:
            reader = NamedReader(self.forced) if self.forced else ArrayReader()
        else:
            reader = TOOL_PARSERS[self.args.tool_call_parser or ""](self.tools) if self.parses_calls else Reader()
        if self.args.reasoning_parser is not None:
            reader = ReasoningReader(self.args.reasoning_parser, prompt, reader)
        return ChatAnswer(self.request, reader, is_named=bool(self.forced))


def _tool(tool: Any) -> tuple[str, dict[str, Any]]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function" or not isinstance(function.get("name"), str):
        raise APIError(400, f"tools: {tool!r:.200} is no function with a name", "tools")
    parameters = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, dict):
        raise APIError(400, f"tools: parameters of {function['name']!r:.100} are no schema", "tools")
    return function["name"], parameters


def _token_id(tokenizer: Any, text: str) -> int | None:
    token_id = tokenizer.convert_tokens_to_ids(text)
    return token_id if token_id is not None and tokenizer.convert_ids_to_tokens(token_id) == text else None


class ChatAnswer:
    """From the text of one choice to its message."""

    def __init__(self, request: ChatCompletionRequest, reader: Reader, is_named: bool) -> None:
        self.request, self.reader, self.is_named = request, reader, is_named
        self.num_calls = 0

    def _parts(self, completion: CompletionOutput) -> list[Part]:
        parts = self.reader.feed(completion.text, completion.finished())
        return [part for part in parts if part.kind != "reasoning" or self.request.include_reasoning is not False]

    def delta(self, completion: CompletionOutput) -> dict[str, Any]:
        """What a further piece adds to the message; empty where nothing can be said yet."""
        texts: dict[str, str] = {}
        calls: dict[int, dict[str, Any]] = {}
        for kind, text in self._parts(completion):
            if kind == "name":
                self.num_calls += 1
            index = self.num_calls - 1
            if kind not in ("name", "arguments"):
                texts[kind] = texts.get(kind, "") + text
            elif index and self.request.parallel_tool_calls is False:
                continue
            elif kind == "name":
                function = {"name": text, "arguments": ""}
                calls[index] = {"index": index, "id": _call_id(), "type": "function", "function": function}
            else:
                function = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})["function"]
                function["arguments"] += text
        return {**_with_old_name(texts), **({"tool_calls": list(calls.values())} if calls else {})}

    def message(self, completion: CompletionOutput) -> dict[str, Any]:
        """The whole message, without its role."""
        delta = self.delta(completion)
        calls = [{k: v for k, v in call.items() if k != "index"} for call in delta.get("tool_calls", ())]
        content = delta.get("content", None if calls or "reasoning" in delta else "")
        return {**delta, "content": content, **({"tool_calls": calls} if calls else {})}

    def end(self, completion: CompletionOutput) -> dict[str, Any]:
        """``finish_reason`` and ``stop_reason``, after the last ``delta`` or ``message``."""
        reason = completion.finish_reason
        called = reason == "stop" and self.num_calls and not self.is_named
        return {"finish_reason": "tool_calls" if called else reason, "stop_reason": completion.stop_reason}


def _with_old_name(texts: Mapping[str, str]) -> dict[str, str]:
    return {**texts, **({"reasoning_content": texts["reasoning"]} if "reasoning" in texts else {})}


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex}"
