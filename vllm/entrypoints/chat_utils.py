# SPDX-License-Identifier: Apache-2.0
"""From a conversation to a prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.inputs import TokensPrompt, as_list, check_text
from vllm.renderers.hf import resolve_chat_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vllm.config import ModelConfig
    from vllm.renderers.template_reader import Form

_FORMATS = ("auto", "string", "openai")
# Types of parts that hold text, and the key that it is under.
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_MEDIA = re.compile("(input_)?(image|audio|video|file)")


def load_chat_template(chat_template: str | Path | None) -> str | None:
    """A template given as Jinja text or as the path of a file that holds it."""
    if chat_template is None or (isinstance(chat_template, str) and any(c in chat_template for c in "{}\n")):
        return chat_template
    try:
        return Path(chat_template).read_text()
    except OSError as error:
        raise ValueError(
            f"chat_template={str(chat_template)!r} is neither Jinja text nor a readable file ({error.strerror})"
        ) from error


def split_conversations(messages: Any) -> list[list[Any]]:
    """One conversation (a list of messages) or several, as several."""
    several = as_list(messages)
    if several is None:
        raise TypeError(f"messages is a {type(messages).__name__}; give a list of {{'role': ..., 'content': ...}}")
    if several and (isinstance(several[0], Mapping) or hasattr(several[0], "model_dump")):
        return [several]
    return [list(one) for one in several]


def render_chat(
    conversation: Sequence[Any],
    tokenizer: PreTrainedTokenizerBase,
    model_config: ModelConfig,
    *,
    chat_template: str | None = None,
    chat_template_content_format: str = "auto",
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: list[Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tokenizer_kwargs: Mapping[str, Any] | None = None,
) -> TokensPrompt:
    """The prompt that the chat template makes of ``conversation``.

    ``chat_template_content_format``: ``string`` joins a message's text parts by line breaks, ``openai`` makes parts of
    all content, ``auto`` leaves content as it is where the template takes it so for the message's role, and else gives
    it the other form. Arguments of tool calls become the JSON text or the object that the template wants. Raises
    ``ValueError`` for a conversation or template that does not work.
    """
    if chat_template_content_format not in _FORMATS:
        raise ValueError(f"chat_template_content_format={chat_template_content_format!r}; give one of {_FORMATS}")
    if continue_final_message and add_generation_prompt:
        raise ValueError("continue_final_message=True continues the last message; set add_generation_prompt=False")
    template = resolve_chat_template(tokenizer, chat_template, tools, model_config=model_config)
    if template is None:
        raise ValueError(
            f"the tokenizer of {model_config.tokenizer!r} has no chat template; give chat_template=..., or a rendered "
            "prompt to generate()"
        )
    messages = [
        _message(i, message, template, chat_template_content_format, tools is not None)
        for i, message in enumerate(conversation)
    ]
    try:
        text: Any = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **(chat_template_kwargs or {}),
        )
    except Exception as error:  # a template may raise anything
        raise ValueError(
            f"the chat template cannot render this conversation: {type(error).__name__}: {error}"
        ) from error
    check_text("the conversation", text)
    token_ids = tokenizer(text, **{"add_special_tokens": False, **(tokenizer_kwargs or {})}).input_ids
    return TokensPrompt(prompt=text, prompt_token_ids=list(token_ids))


def _plain(value: Any) -> Any:
    """``value`` with the objects of OpenAI's client in it as dicts; the containers are copies."""
    if callable(dump := getattr(value, "model_dump", None)):
        return _plain(dump(exclude_none=True))
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _message(index: int, given: Any, template: str, content_format: str, tools: bool) -> dict[str, Any]:
    """A copy of the message that has content and arguments in the form that ``template`` wants."""
    from vllm.renderers.template_reader import content_form, needs_content, takes_argument_objects

    message, where = _plain(given), f"messages[{index}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"{given!r} is no chat message; give {{'role': 'user', 'content': '...'}}")
    role, content = message["role"], message.get("content")
    if content is not None:
        parts = _parts(f"{where} ({role})", content)
        form: Form = "text" if isinstance(content, str) else "list"
        if content_format == "auto":
            use_parts = content_form(template, role, form, tools) == "list"
        else:
            use_parts = content_format == "openai"
        message["content"] = parts if use_parts else "\n".join(part["text"] for part in parts)
    calls = [*(message.get("tool_calls") or ()), *filter(None, (message.get("function_call"),))]
    if calls:
        as_object = takes_argument_objects(template, role, tools)
        for number, call in enumerate(calls):
            function = call.get("function", call) if isinstance(call, dict) else None
            if not isinstance(function, dict):
                raise ValueError(f"{where} has the tool call {call!r}; give {{'function': {{'name', 'arguments'}}}}")
            if "arguments" in function:
                name = f"{where}, tool call {number} ({function.get('name')!r})"
                function["arguments"] = _arguments(name, function["arguments"], as_object)
        if content is None and needs_content(template, role, tools):
            message["content"] = ""
    return message


def _parts(where: str, content: Any) -> list[dict[str, Any]]:
    """Content as text parts, each with its other keys."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise ValueError(f"{where} has content of type {type(content).__name__}; give a string or a list of parts")
    parts = []
    for given in content:
        part = {"text": given} if isinstance(given, str) else given
        if not isinstance(part, dict):
            raise ValueError(f"{where} has the content part {part!r}; give {{'type': 'text', 'text': '...'}}")
        kind = str(part.get("type", "text"))
        media = [key for key, value in part.items() if value is not None and _MEDIA.match(str(key))]
        if kind not in _TEXT_PARTS or media:
            what = f"type {kind!r}" if kind not in _TEXT_PARTS else f"the key {media[0]!r}"
            raise NotImplementedError(f"{where} has a content part with {what}, which is not supported; give text")
        text = part.get(_TEXT_PARTS[kind])
        if not isinstance(text, str):
            raise ValueError(f"{where} has the content part {part!r} without text; give {{'type': 'text', 'text': ''}}")
        parts.append({**part, "type": "text", "text": text})
    return parts


def _arguments(where: str, arguments: Any, as_object: bool) -> Any:
    """The arguments of a tool call as an object or as JSON text, whichever they were given as; none are ``{}``."""
    if isinstance(arguments, str) and as_object:
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise ValueError(f"{where} has arguments that are no JSON: {arguments[:200]!r} ({error})") from error
        if arguments is not None and not isinstance(arguments, dict):
            raise ValueError(f"{where} has arguments that are no JSON object: {arguments!r}; give {{'name': value}}")
    if arguments is None:
        arguments = {}
    return arguments if as_object or isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
