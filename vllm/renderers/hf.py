# SPDX-License-Identifier: Apache-2.0
"""Chat templates of Hugging Face tokenizers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vllm.config import ModelConfig


def resolve_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | None,
    tools: list[dict[str, Any]] | None,
    *,
    model_config: ModelConfig,
) -> str | None:
    """The Jinja text to render a chat with: the given one (or the tokenizer's of that name), else the tokenizer's own.

    None where the tokenizer has none.
    """
    if chat_template is None and not tokenizer.chat_template:
        return None
    return tokenizer.get_chat_template(chat_template, tools=tools)
