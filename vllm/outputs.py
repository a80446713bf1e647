# SPDX-License-Identifier: Apache-2.0
"""What a client gets for a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.logprobs import PromptLogprobs, SampleLogprobs
from vllm.v1.metrics.stats import RequestStateStats


@dataclass
class CompletionOutput:
    """One completion of a prompt.

    ``finish_reason`` is ``stop``, ``length``, ``abort`` or ``error`` once it has ended. With ``stop``, ``stop_reason``
    holds which of the request's own ``stop`` or ``stop_token_ids`` matched; an end token of the model leaves it None;
    with ``error`` it says in words what was wrong. ``cumulative_logprob`` and ``logprobs`` are None unless
    log-probabilities were asked for.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None
    logprobs: SampleLogprobs | None
    routed_experts: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None
    kv_transfer_params: dict[str, Any] | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None

    def _append(self, later: CompletionOutput) -> None:
        self.text += later.text
        self.token_ids = [*self.token_ids, *later.token_ids]
        if later.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *later.logprobs]
        self.cumulative_logprob = later.cumulative_logprob
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


@dataclass
class RequestOutput:
    """A prompt and its completions, ordered by ``index``.

    ``prompt_logprobs`` has one entry for each prompt token, the first None. ``num_cached_tokens`` counts the prompt
    tokens whose KV came from the prefix cache. ``metrics`` is given with ``disable_log_stats=False``; ``lora_request``
    and the ``encoder_*`` fields stay None.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestStateStats | None = None
    lora_request: Any = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None

    def add(self, next_output: RequestOutput, aggregate: bool) -> None:
        """Take in the request's next output. Its completions are appended where ``aggregate``, as of deltas, whose
        first has the prompt's log-probabilities; else they take the place of these."""
        self.finished, self.metrics = next_output.finished, next_output.metrics
        self.num_cached_tokens = next_output.num_cached_tokens
        if not aggregate:
            self.prompt_logprobs, self.outputs = next_output.prompt_logprobs, next_output.outputs
            return
        own = {completion.index: completion for completion in self.outputs}
        for completion in next_output.outputs:
            if completion.index in own:
                own[completion.index]._append(completion)
            else:
                self.outputs.append(completion)
        self.outputs.sort(key=lambda completion: completion.index)
