# SPDX-License-Identifier: Apache-2.0
"""``/v1/responses``: a chat in other words. Nothing is stored, so a conversation comes whole in ``input``."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from pydantic import model_validator
from starlette.requests import Request

from vllm.entrypoints.openai.errors import APIError, as_api_error
from vllm.entrypoints.openai.protocol import ChatCompletionRequest, Dicts, Sampling
from vllm.entrypoints.openai.serving import Job, as_json
from vllm.entrypoints.openai.serving_chat import ServingChat

# Fields that ask for what is not here, and the values that ask for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (None,),
    "conversation": (None,),
    "prompt": (None,),
    "background": (None, False),
    "truncation": (None, "disabled"),
    "max_tool_calls": (None,),
    "top_logprobs": (None, 0),
}
_IGNORED_INCLUDES = {"reasoning.encrypted_content"}


class ResponsesRequest(Sampling):
    input: str | Dicts | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: dict[str, Any] | None = None
    tools: Dicts | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    user: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_response(self) -> Any:
        for name, harmless in _REFUSED.items():
            if (value := (self.model_extra or {}).get(name)) not in harmless:
                why = "nothing is stored, send the whole conversation as input" if "_id" in name else "leave it out"
                raise APIError(400, f"{name}={value!r:.100} is not supported by this server: {why}", name)
        if others := [name for name in self.include or () if name not in _IGNORED_INCLUDES]:
            raise APIError(400, f"include={others} is not supported by this server; leave it out", "include")
        if not self.input:
            raise APIError(400, "input: give a string or a list of items", "input")
        if self.n not in (None, 1):
            raise APIError(400, f"n={self.n}: a response is one", "n")
        return self

    def as_chat(self) -> ChatCompletionRequest:
        own = set(ResponsesRequest.__annotations__) | {"response_format", "stream_options"}
        fields = {name: getattr(self, name) for name in self.model_fields_set if name not in own and name != "n"}
        for name in ("parallel_tool_calls", "chat_template_kwargs"):
            fields[name] = getattr(self, name)
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input or []
        messages = list(_messages(items))
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        form = (self.text or {}).get("format") or {"type": "text"}
        if form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": {"name": form.get("name"), "schema": form.get("schema")}}
        choice = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "function":
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        return ChatCompletionRequest.model_validate(
            {
                **fields,
                "messages": messages,
                "max_completion_tokens": self.max_output_tokens,
                "response_format": form,
                "tools": [_chat_tool(tool) for tool in self.tools or ()],
                "tool_choice": choice,
                **({"stream_options": {"include_usage": True}} if self.stream else {}),
                **({"reasoning_effort": self.reasoning.get("effort")} if self.reasoning else {}),
            }
        )


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise APIError(400, f"tools: type {tool.get('type')!r:.100} is not supported; give functions", "tools")
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _messages(items: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A chat's messages; calls that follow one another are of one message."""
    calls: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type") or "message"
        if calls and kind not in ("function_call", "reasoning"):
            yield {"role": "assistant", "content": "", "tool_calls": calls}
            calls = []
        if kind == "message":
            content = item.get("content")
            if isinstance(content, list):
                content = [_content(part) for part in content]
            yield {"role": item.get("role"), "content": content}
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            calls.append({"id": item.get("call_id"), "type": "function", "function": function})
        elif kind == "function_call_output":
            output = item.get("output")
            yield {
                "role": "tool",
                "tool_call_id": item.get("call_id"),
                "content": output if isinstance(output, str) else json.dumps(output, ensure_ascii=False),
            }
        elif kind != "reasoning":
            raise APIError(400, f"input: an item of type {kind!r:.100} is not supported", "input")
    if calls:
        yield {"role": "assistant", "content": "", "tool_calls": calls}


def _content(part: Any) -> dict[str, Any]:
    if not isinstance(part, dict) or part.get("type") not in ("input_text", "output_text", "text"):
        raise APIError(400, f"input: {part!r:.100} is not supported; only text is", "input")
    return {"type": "text", "text": part.get("text")}


class ServingResponses:
    def __init__(self, chat: ServingChat) -> None:
        self.chat = chat

    async def make_job(self, raw: Request, request: ResponsesRequest) -> tuple[ChatCompletionRequest, Job]:
        chat = request.as_chat()
        return chat, await self.chat.make_job(raw, chat)

    async def answer(self, request: ResponsesRequest, job: tuple[ChatCompletionRequest, Job]) -> dict[str, Any]:
        answer = await self.chat.answer(*job)
        (choice,) = answer["choices"]
        events = _Events(request, job[1])
        calls = choice["message"].get("tool_calls", ())
        delta = {**choice["message"], "tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]}
        for _ in events.of_delta(delta):
            pass
        return events.ended(choice["finish_reason"], answer["usage"])["response"]

    async def chunks(
        self, request: ResponsesRequest, job: tuple[ChatCompletionRequest, Job]
    ) -> AsyncGenerator[bytes, None]:
        events, reason = _Events(request, job[1]), None
        usage: dict[str, Any] = {}
        number = 0

        def text(event: dict[str, Any]) -> bytes:
            nonlocal number
            body = as_json({**event, "sequence_number": number})
            number += 1
            return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), body)

        begun = False
        try:
            async with contextlib.aclosing(self.chat.chunks(*job)) as chunks:
                async for chunk in chunks:
                    if not begun:
                        begun = True
                        for kind in ("response.created", "response.in_progress"):
                            yield text({"type": kind, "response": events.response("in_progress")})
                    usage = chunk.get("usage") or usage
                    for choice in chunk["choices"]:
                        reason = choice["finish_reason"] or reason
                        for event in events.of_delta(choice["delta"]):
                            yield text(event)
        except Exception as error:
            if not begun:
                raise
            told = as_api_error(error)
            failed = {"code": "server_error", "message": told.message}
            yield text({"type": "response.failed", "response": events.response("failed", error=failed)})
            return
        for event in events.close():
            yield text(event)
        yield text(events.ended(reason, usage))


class _Events:
    """The items of a response as they grow, and the events that tell of it."""

    def __init__(self, request: ResponsesRequest, job: Job) -> None:
        self.request, self.job = request, job
        self.id = f"resp_{uuid.uuid4().hex}"
        self.output: list[dict[str, Any]] = []
        self._is_open = False

    def response(self, status: str, **rest: Any) -> dict[str, Any]:
        request, params = self.request, self.job.params
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.job.created,
            "status": status,
            "model": self.job.model,
            "output": self.output,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "max_output_tokens": request.max_output_tokens,
            "previous_response_id": None,
            "reasoning": request.reasoning or {"effort": None, "summary": None},
            "store": False,
            "text": request.text or {"format": {"type": "text"}},
            "truncation": "disabled",
            "usage": None,
            "user": request.user,
            **rest,
        }

    def ended(self, reason: str | None, usage: dict[str, Any]) -> dict[str, Any]:
        """The last event."""
        for _ in self.close():
            pass
        counted = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        if reason == "length":
            rest: dict[str, Any] = {"incomplete_details": {"reason": "max_output_tokens"}}
            if self.output:
                self.output[-1]["status"] = "incomplete"
        else:
            rest = {}
        status = "incomplete" if rest else "completed"
        return {"type": f"response.{status}", "response": self.response(status, usage=counted, **rest)}

    def of_delta(self, delta: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a chat's delta."""
        for name, kind in (("reasoning", "reasoning"), ("content", "message")):
            if text := delta.get(name):
                if not self._is_open or self.output[-1]["type"] != kind:
                    yield from self._open(kind)
                part = self.output[-1]["content"][0]
                part["text"] += text
                yield self._event(f"{part['type']}.delta", content_index=0, delta=text, **_logprobs(part))
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            if "id" in call:
                yield from self._open("function_call", call_id=call["id"], name=function["name"], arguments="")
            if arguments := function["arguments"]:
                self.output[-1]["arguments"] += arguments
                yield self._event("function_call_arguments.delta", delta=arguments)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        item = self.output[-1]
        return {"type": f"response.{kind}", "item_id": item["id"], "output_index": len(self.output) - 1, **fields}

    def _open(self, kind: str, **fields: Any) -> Iterator[dict[str, Any]]:
        yield from self.close()
        item: dict[str, Any] = {"type": kind, "id": f"{_PREFIX[kind]}_{uuid.uuid4().hex}", "status": "in_progress"}
        own: dict[str, dict[str, Any]] = {
            "message": {"role": "assistant", "content": []},
            "reasoning": {"summary": [], "content": []},
        }
        item |= own.get(kind, fields)
        self.output.append(item)
        self._is_open = True
        yield {"type": "response.output_item.added", "output_index": len(self.output) - 1, "item": _copy(item)}
        if kind != "function_call":
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            if kind == "message":
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item["content"].append(part)
            yield self._event("content_part.added", content_index=0, part=_copy(part))

    def close(self) -> Iterator[dict[str, Any]]:
        """The item that is open is whole."""
        if not self._is_open:
            return
        self._is_open = False
        item = self.output[-1]
        item["status"] = "completed"
        if item["type"] == "function_call":
            yield self._event("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            (part,) = item["content"]
            yield self._event(f"{part['type']}.done", content_index=0, text=part["text"], **_logprobs(part))
            yield self._event("content_part.done", content_index=0, part=_copy(part))
        yield {"type": "response.output_item.done", "output_index": len(self.output) - 1, "item": _copy(item)}


_PREFIX = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


def _logprobs(part: dict[str, Any]) -> dict[str, Any]:
    return {"logprobs": []} if part["type"] == "output_text" else {}


def _copy(value: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(value))
