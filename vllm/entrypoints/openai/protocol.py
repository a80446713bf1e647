# SPDX-License-Identifier: Apache-2.0
"""The bodies of requests. Unknown fields are logged once each and ignored; upstream's that this engine does not have
are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from annotated_types import MaxLen, MinLen
from pydantic import BaseModel, ConfigDict, FailFast, model_validator

from vllm.entrypoints.openai.errors import APIError
from vllm.inputs import split_prompts
from vllm.logger import init_logger
from vllm.sampling_params import RequestOutputKind, SamplingParams

logger = init_logger(__name__)


class _First(FailFast):
    """A list ends at its first wrong element: a long one would have as many errors as elements."""

    __hash__ = object.__hash__  # unions of annotated types need it


_MOST = 1024
Strings = Annotated[list[str], _First(), MaxLen(_MOST)]
TokenIds = Annotated[list[int], _First()]
Dicts = Annotated[list[dict[str, Any]], _First()]

_MAX_LOGGED_NAMES = 200
_logged_names: set[str] = set()

# Fields of OpenAI's and upstream's, with the values that ask for nothing which is not so here.
_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
_REFUSED: dict[str, tuple[Any, ...]] = {
    "priority": (0, None),
    "length_penalty": (1.0, None),
    "modalities": (None, [], ["text"]),
    "routed_experts_prompt_start": (0, None),
    "repetition_detection": (None,),
    **dict.fromkeys(
        """best_of use_beam_search early_stopping suffix prompt_embeds mm_processor_kwargs media_io_kwargs
        logits_processors kv_transfer_params cache_salt vllm_xargs thinking_token_budget logprob_token_ids
        prompt_logprob_token_ids audio functions function_call web_search_options prediction guided_decoding_backend
        lora_request ec_transfer_params return_routed_experts""".split(),  # noqa: SIM905
        _NOTHING,
    ),
}


class Body(BaseModel):
    """``known_elsewhere``: names that the class does not refuse though this engine has nothing behind them."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())
    known_elsewhere: ClassVar[frozenset[str]] = frozenset()

    model: str | None = None

    @model_validator(mode="after")
    def _check_other_fields(self) -> Any:
        for name, value in (self.model_extra or {}).items():
            if name in _REFUSED and name not in self.known_elsewhere:
                harmless = value in _REFUSED[name] or (name == "best_of" and value == getattr(self, "n", None))
                if not harmless:
                    shown = repr(value)[:100]
                    raise APIError(501, f"{name}={shown} is not supported by this server; leave it out", name)
            elif name not in _logged_names and len(_logged_names) < _MAX_LOGGED_NAMES:
                _logged_names.add(name)
                logger.warning("%s has no field %.64r: it is ignored", type(self).__name__, name)
        return self


class StreamOptions(BaseModel):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Sampling(Body):
    """The fields that completions and chats share."""

    max_tokens: int | None = None
    n: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Strings | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: Any = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Strings | None = None
    truncate_prompt_tokens: int | None = None
    echo: bool | None = False
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    request_id: str | None = None
    data_parallel_rank: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Strings | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None

    _direct: ClassVar[tuple[str, ...]] = (
        "n",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "min_tokens",
        "prompt_logprobs",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
        "truncate_prompt_tokens",
    )

    @model_validator(mode="after")
    def _check_stream(self) -> Any:
        if self.stream_options is not None and not self.stream:
            raise APIError(400, "stream_options without stream=true has no meaning; leave it out", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise APIError(400, "prompt_logprobs are not given with stream=true; leave one out", "prompt_logprobs")
        if self.logit_bias is not None and not (isinstance(self.logit_bias, dict) and len(self.logit_bias) <= _MOST):
            raise APIError(400, f"logit_bias: give an object of at most {_MOST} token ids and numbers", "logit_bias")
        return self

    def sampling_params(self, defaults: dict[str, Any], **own: Any) -> SamplingParams:
        """``defaults``: the model's, for what is not given; its ``max_tokens`` is the most for all requests."""
        given = {name: getattr(self, name) for name in self._direct if getattr(self, name) is not None}
        limits = [limit for limit in (own.pop("max_tokens"), defaults.get("max_tokens")) if limit is not None]
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        return SamplingParams(
            **{**defaults, **given, **own, "max_tokens": min(limits, default=None), "output_kind": kind}
        )


class CompletionRequest(Sampling):
    prompt: Any = None
    max_tokens: int | None = 16
    logprobs: int | None = None

    def prompts(self, most: int) -> list[str] | list[list[int]]:
        """One text or token list for each prompt, of which there are ``most`` at most."""
        message = "prompt: give a string, a list of token ids, or a list of those"
        if not isinstance(self.prompt, (str, list)) or not self.prompt:
            raise APIError(400, f"{message}; given: {repr(self.prompt)[:100]}", "prompt")
        prompts = split_prompts(self.prompt)
        if len(prompts) * (self.n or 1) > most:
            given = f"{len(prompts)} prompts with n={self.n or 1}"
            raise APIError(400, f"{given} exceed the {most} completions of one request; split it", "prompt")
        for prompt in prompts:
            is_ids = isinstance(prompt, list) and all(type(token_id) is int for token_id in prompt)
            if not is_ids and not isinstance(prompt, str):
                raise APIError(400, f"{message}; given: {repr(prompt)[:100]}", "prompt")
        return prompts


class ChatTemplateFields(Body):
    """What makes a prompt of a conversation."""

    messages: Annotated[Dicts, MinLen(1)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Dicts | None = None
    tools: Dicts | None = None


class ChatCompletionRequest(Sampling, ChatTemplateFields):
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = True

    @model_validator(mode="after")
    def _check_chat(self) -> Any:
        if self.messages is None:
            raise APIError(400, "messages: give a list of {'role': ..., 'content': ...}", "messages")
        if self.top_logprobs and not self.logprobs:
            raise APIError(400, "top_logprobs needs logprobs=true", "top_logprobs")
        return self


class TokenizeRequest(ChatTemplateFields):
    """A text or a conversation."""

    prompt: str | None = None
    return_token_strs: bool | None = False

    @model_validator(mode="after")
    def _check_one(self) -> Any:
        if (self.prompt is None) == (self.messages is None):
            raise APIError(400, "give either prompt or messages", "prompt")
        return self


class DetokenizeRequest(Body):
    tokens: TokenIds
