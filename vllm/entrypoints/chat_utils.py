# SPDX-License-Identifier: Apache-2.0
"""From a conversation to a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.inputs import TokensPrompt
from vllm.renderers.hf import resolve_chat_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vllm.config import ModelConfig


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


def split_conversations(messages: Sequence[Any]) -> list[list[dict[str, Any]]]:
    """One conversation (a list of messages) or several, as several."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise TypeError(f"messages is a {type(messages).__name__}; give a list of {{'role': ..., 'content': ...}}")
    return [list(messages)] if messages and isinstance(messages[0], Mapping) else [list(one) for one in messages]


def render_chat(
    conversation: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    model_config: ModelConfig,
    *,
    chat_template: str | None = None,
    chat_template_content_format: str = "auto",
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: list[Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> TokensPrompt:
    """The prompt that the chat template makes of ``conversation``.

    ``chat_template_content_format``: ``auto`` and ``string`` join a message's text parts by line breaks, ``openai``
    hands them to the template as they are. Raises ``ValueError`` for a conversation or template that does not work.
    """
    if continue_final_message and add_generation_prompt:
        raise ValueError("continue_final_message=True continues the last message; set add_generation_prompt=False")
    template = resolve_chat_template(tokenizer, chat_template, tools, model_config=model_config)
    if template is None:
        raise ValueError(
            f"the tokenizer of {model_config.tokenizer!r} has no chat template; give chat_template=..., or a rendered "
            "prompt to generate()"
        )
    keep_parts = chat_template_content_format == "openai"
    messages = [_message(message, keep_parts) for message in conversation]
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
    token_ids = tokenizer(text, add_special_tokens=False).input_ids
    return TokensPrompt(prompt=text, prompt_token_ids=list(token_ids))


def _message(message: Mapping[str, Any], keep_parts: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"{message!r} is no chat message; give {{'role': 'user', 'content': '...'}}")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return dict(message)
    parts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text")
        if text is None:
            raise NotImplementedError(f"message part of type {part.get('type')!r} is not supported; give text")
        parts.append(text)
    joined = [{"type": "text", "text": text} for text in parts] if keep_parts else "\n".join(parts)
    return {**message, "content": joined}
