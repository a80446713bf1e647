# SPDX-License-Identifier: Apache-2.0
"""The forms that a prompt may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias, TypedDict


class _PromptOptions(TypedDict, total=False):
    multi_modal_data: Any
    mm_processor_kwargs: Any
    multi_modal_uuids: Any
    cache_salt: str


class TextPrompt(_PromptOptions):
    """A text, to be tokenised; the options are upstream's and not supported here."""

    prompt: str


class _PromptText(TypedDict, total=False):
    prompt: str


class TokensPrompt(_PromptOptions, _PromptText):
    """Token ids; ``prompt`` is their text where the caller has it, and is only handed back."""

    prompt_token_ids: list[int]


PromptType: TypeAlias = str | TextPrompt | list[int] | TokensPrompt

_UNSUPPORTED = ("prompt_embeds", "encoder_prompt", "token_type_ids", *_PromptOptions.__annotations__)


def split_prompts(prompts: Any) -> list[Any]:
    """The prompts of a call: one prompt of any form, or a sequence of prompts (a list of integers is one prompt)."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise TypeError(f"prompts is a {type(prompts).__name__}; give one prompt or a list of prompts")
    if prompts and isinstance(prompts[0], Integral):
        return [prompts]
    return list(prompts)


def parse_prompt(prompt: Any) -> tuple[str | None, list[int] | None]:
    """(text, token ids) of one prompt, of which at least one is given.

    Raises ``TypeError`` for something that is no prompt and ``NotImplementedError`` for kinds of upstream's that this
    engine does not have (images, embeddings, encoder prompts, cache salts).
    """
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, Mapping):
        for key in _UNSUPPORTED:
            if prompt.get(key) is not None:
                raise NotImplementedError(f"the prompt has {key!r}, which this engine does not support; leave it out")
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if text is not None and not isinstance(text, str):
            raise TypeError(f"the prompt's 'prompt' is a {type(text).__name__}; give a string")
        if token_ids is not None:
            return text, _token_ids(token_ids)
        if text is not None:
            return text, None
        raise TypeError(f"the prompt has the keys {sorted(map(str, prompt))}; give 'prompt' or 'prompt_token_ids'")
    if isinstance(prompt, Sequence):
        return None, _token_ids(prompt)
    raise TypeError(f"a prompt is a {type(prompt).__name__}; give a string, token ids, or a dict with one of them")


def _token_ids(values: Any) -> list[int]:
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise TypeError(f"prompt_token_ids is a {type(values).__name__}; give a list of integers")
    if all(type(value) is int for value in values):
        return list(values)
    wrong = [value for value in values if not isinstance(value, Integral) or isinstance(value, bool)]
    if wrong:
        raise TypeError(f"prompt_token_ids holds {wrong[0]!r}; give a list of integers")
    return [int(value) for value in values]


__all__ = ["PromptType", "TextPrompt", "TokensPrompt", "parse_prompt", "split_prompts"]
