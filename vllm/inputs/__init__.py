# SPDX-License-Identifier: Apache-2.0
"""The forms that a prompt may have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
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
    """The prompts of a call: one prompt of any form, or several (integers are one prompt, as in ``[1, 2]``)."""
    if isinstance(prompts, (str, bytes, Mapping)):
        return [prompts]
    several = as_list(prompts)
    if several is None:
        raise TypeError(f"prompts is a {type(prompts).__name__}; give one prompt or a list of prompts")
    return [several] if several and isinstance(_scalar(several[0]), Integral) else several


def as_list(values: Any) -> list[Any] | None:
    """The elements of a list, tuple, generator, array, tensor, pandas Series and their like; None of anything else.

    Texts and mappings are no such thing, nor is what has no order (sets) or yields column names (data frames).
    """
    if callable(tolist := getattr(values, "tolist", None)):
        values = tolist()
    if isinstance(values, (str, bytes, bytearray, Mapping, Set)) or hasattr(values, "columns"):
        return None
    return list(values) if isinstance(values, Iterable) else None


def _scalar(value: Any) -> Any:
    """The number in an array or tensor without dimensions."""
    return value.tolist() if getattr(value, "ndim", None) == 0 and hasattr(value, "tolist") else value


def check_text(name: str, text: str) -> str:
    """``text``, or ``ValueError`` where it holds a surrogate, which no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} holds the surrogate {text[error.start]!r} at character {error.start}, half of a character; "
            "text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace') joins halves and replaces lone ones"
        ) from None
    return text


_TOKENIZER_KWARGS = ("add_special_tokens", "truncation", "max_length", "split_special_tokens")


def split_tokenization_kwargs(kwargs: Mapping[str, Any] | None) -> tuple[dict[str, Any], int | None]:
    """(what goes to the tokenizer, ``truncate_prompt_tokens``) of ``tokenization_kwargs``.

    Raises ``ValueError`` for names that would have no effect or a bad one; there, None and False say nothing.
    """
    given = dict(kwargs or {})
    truncate = given.pop("truncate_prompt_tokens", None)
    unknown = {name: value for name, value in given.items() if name not in _TOKENIZER_KWARGS}
    if any(value is not None and value is not False for value in unknown.values()):
        known = ", ".join((*_TOKENIZER_KWARGS, "truncate_prompt_tokens"))
        raise ValueError(f"tokenization_kwargs has {unknown}; it may have {known}")
    return {name: value for name, value in given.items() if name in _TOKENIZER_KWARGS}, truncate


def parse_prompt(prompt: Any) -> tuple[str | None, list[int] | None]:
    """(text, token ids) of one prompt, of which at least one is given.

    Raises ``TypeError`` for something that is no prompt and ``NotImplementedError`` for kinds of upstream's that this
    engine does not have (images, embeddings, encoder prompts, cache salts).
    """
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, Mapping):
        for key in _UNSUPPORTED:
            if not _asks_nothing(prompt.get(key)):
                raise NotImplementedError(f"the prompt has {key!r}, which this engine does not support; leave it out")
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if text is not None and not isinstance(text, str):
            raise TypeError(f"the prompt's 'prompt' is a {type(text).__name__}; give a string")
        if token_ids is not None:
            return text, _token_ids(token_ids)
        if text is not None:
            return text, None
        raise TypeError(f"the prompt has the keys {sorted(map(str, prompt))}; give 'prompt' or 'prompt_token_ids'")
    if as_list(prompt) is not None:
        return None, _token_ids(prompt)
    raise TypeError(f"a prompt is a {type(prompt).__name__}; give a string, token ids, or a dict with one of them")


def _asks_nothing(value: Any) -> bool:
    """None, an empty container, or a dict of such: ``{"image": None}``."""
    if isinstance(value, Mapping):
        return all(_asks_nothing(part) for part in value.values())
    return value is None or (isinstance(value, (str, list, tuple)) and not value)


def _token_ids(given: Any) -> list[int]:
    values = as_list(given)
    if values is None:
        raise TypeError(f"prompt_token_ids is a {type(given).__name__}; give a list of integers")
    if all(type(value) is int for value in values):
        return values
    values = [_scalar(value) for value in values]
    wrong = [value for value in values if not isinstance(value, Integral) or isinstance(value, bool)]
    if wrong:
        raise TypeError(f"prompt_token_ids holds {wrong[0]!r}; give a list of integers")
    return [int(value) for value in values]


__all__ = [
    "PromptType",
    "TextPrompt",
    "TokensPrompt",
    "as_list",
    "check_text",
    "parse_prompt",
    "split_prompts",
    "split_tokenization_kwargs",
]
