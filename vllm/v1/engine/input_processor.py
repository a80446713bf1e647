# SPDX-License-Identifier: Apache-2.0
"""From what a client gives to what the scheduler takes: tokenise, check, complete the sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.inputs import PromptType, check_text, parse_prompt, split_tokenization_kwargs
from vllm.sampling_params import SamplingParams, check_truncation
from vllm.v1.structured_output import Grammars, as_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class EngineInput:
    """A checked prompt. ``params`` belongs to it alone and has ``max_tokens`` set and the model's end tokens added."""

    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_id: int | None


class InputProcessor:
    """``generation_config`` gives the model's end tokens; the tokenizer's, where there is one, is the main of them."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        tokenizer: PreTrainedTokenizerBase | None,
        generation_config: Mapping[str, Any],
    ) -> None:
        self.model_config = vllm_config.model_config
        self.tokenizer = tokenizer
        self.grammars = Grammars(lambda: tokenizer)
        self.eos_token_id: int | None = None if tokenizer is None else tokenizer.eos_token_id
        ends = generation_config.get("eos_token_id")
        ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        self.other_eos_token_ids = [token_id for token_id in ends if token_id != self.eos_token_id]

    def process_inputs(
        self,
        prompt: PromptType,
        params: SamplingParams,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> EngineInput:
        """Raises ``ValueError``, with the value and the remedy, for whatever could not run."""
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params is a {type(params).__name__}; give a SamplingParams")
        kwargs, truncate = split_tokenization_kwargs(tokenization_kwargs)
        text, token_ids = self._read(prompt, kwargs)
        params = params.clone()
        if truncate is not None:
            check_truncation(truncate)
            params.truncate_prompt_tokens = truncate
        token_ids = self._truncate(token_ids, params)
        self._check_prompt(token_ids)
        self._complete(params, len(token_ids))
        return EngineInput(text, token_ids, params, self.eos_token_id)

    def process_prompt(self, prompt: PromptType) -> list[int]:
        """The token ids of ``prompt``, which leave room for a token."""
        _, token_ids = self._read(prompt)
        self._check_prompt(token_ids)
        return token_ids

    def _read(
        self, prompt: PromptType, tokenization_kwargs: Mapping[str, Any] | None = None
    ) -> tuple[str | None, list[int]]:
        text, token_ids = parse_prompt(prompt)
        if token_ids is None:
            assert text is not None, f"prompt {prompt!r} has neither text nor token ids"
            token_ids = self._tokenise(text, tokenization_kwargs or {})
        return text, token_ids

    def _tokenise(self, text: str, kwargs: Mapping[str, Any]) -> list[int]:
        if self.tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer, and skip_tokenizer_init=True; pass prompt_token_ids")
        return list(self.tokenizer(check_text("the prompt", text), **kwargs).input_ids)

    def _truncate(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        keep = params.truncate_prompt_tokens
        if keep is None:
            return token_ids
        if keep == -1:
            keep = max(self.model_config.max_model_len - (params.max_tokens or 1), 1)
        return token_ids[-keep:]

    def _check_prompt(self, token_ids: list[int]) -> None:
        max_model_len, vocab_size = self.model_config.max_model_len, self.model_config.vocab_size
        if not token_ids:
            raise ValueError("the prompt is empty: it has no tokens; give at least one")
        if len(token_ids) >= max_model_len:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens and max_model_len={max_model_len} holds prompt and output: "
                f"shorten it to {max_model_len - 1} tokens or fewer (truncate_prompt_tokens={max_model_len - 1} keeps "
                "its end) or raise max_model_len"
            )
        lowest, highest = min(token_ids), max(token_ids)
        if lowest < 0 or highest >= vocab_size:
            raise ValueError(
                f"the prompt has token id {lowest if lowest < 0 else highest}, outside the model's vocabulary of "
                f"{vocab_size}; give ids from 0 to {vocab_size - 1}, from this model's tokenizer"
            )

    def _complete(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        room = self.model_config.max_model_len - num_prompt_tokens
        params.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.min_tokens > params.max_tokens:
            raise ValueError(
                f"min_tokens={params.min_tokens} cannot be reached: after {num_prompt_tokens} prompt tokens "
                f"max_model_len={self.model_config.max_model_len} leaves room for {room}; lower it or shorten "
                "the prompt"
            )
        if self.tokenizer is not None:
            params.update_from_tokenizer(self.tokenizer)
        elif params.bad_words or params.stop:
            raise ValueError(
                f"bad_words={params.bad_words} and stop={params.stop} need a tokenizer, and skip_tokenizer_init=True; "
                "use stop_token_ids"
            )
        params.verify(self.model_config.vocab_size, self.model_config.max_logprobs)
        if params.structured_outputs is not None:
            params.structured_outputs = as_text(params.structured_outputs)
            self.grammars.check(params.structured_outputs)
        if not params.ignore_eos:
            params.stop_token_ids = list(dict.fromkeys([*(params.stop_token_ids or ()), *self.other_eos_token_ids]))
