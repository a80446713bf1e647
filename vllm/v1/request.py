# SPDX-License-Identifier: Apache-2.0
"""One sequence that the scheduler runs. A user's request with ``n`` > 1 is ``n`` of these."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm.v1.structured_output import Matcher


class RequestStatus(enum.IntEnum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED_STOPPED = 3
    FINISHED_LENGTH_CAPPED = 4
    FINISHED_ABORTED = 5
    FINISHED_ERROR = 6

    @property
    def is_finished(self) -> bool:
        return self >= RequestStatus.FINISHED_STOPPED

    @property
    def finish_reason(self) -> str | None:
        """Upstream's words: ``stop``, ``length``, ``abort``, ``error``."""
        return _FINISH_REASON.get(self)


_FINISH_REASON = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


@dataclass(eq=False)
class Request:
    """A sequence and how far it has come.

    ``all_token_ids`` is prompt then output; ``num_computed_tokens`` of them have their KV in the cache; the tokens
    from there on are what the next steps run. ``block_ids`` lists the cache blocks that hold them, in order, and
    ``state_slot`` the recurrent-state slot of a hybrid model (-1: none).

    The scheduler's own: the first ``num_cached_blocks`` full blocks were offered to the prefix cache and end the prefix
    ``prefix_id`` (None: this request offers no more); ``max_num_tokens`` is the length, prompt included, at which it
    ends; ``num_prompt_logprobs`` rows of prompt log-probabilities were given out; ``queued_ts`` (monotonic seconds) it
    was queued, and waited ``queued_seconds`` for its first step. The sampler's: ``drawn_seed``, drawn once for a
    request that has no seed of its own, so that a preemption does not change its random stream. ``matcher`` knows which
    tokens the request's grammar allows next, if it has one.

    Where steps are scheduled ahead, ``num_in_flight`` further tokens are sampled by steps that the scheduler has not
    taken in, and ``num_computed_tokens`` counts what these run. ``reads_tokens``: what is sampled next depends on the
    tokens in a way that the host works out (grammar, penalties, bad words), so none may be in flight.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_id: int | None = None
    arrival_time: float = field(default_factory=time.time)
    status: RequestStatus = RequestStatus.WAITING
    stop_reason: int | str | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int = -1
    num_preemptions: int = 0
    block_ids: list[int] = field(default_factory=list)
    state_slot: int = -1
    prefix_id: int | None = None
    num_cached_blocks: int = 0
    max_num_tokens: int = 0
    num_prompt_logprobs: int = 0
    drawn_seed: int | None = None
    queued_ts: float = 0.0
    queued_seconds: float = 0.0
    matcher: Matcher | None = None
    num_in_flight: int = 0
    reads_tokens: bool = field(init=False)
    all_token_ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.all_token_ids = list(self.prompt_token_ids)
        params = self.sampling_params
        self.reads_tokens = (
            params.structured_outputs is not None or params.is_penalised or bool(params.bad_words_token_ids)
        )

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.all_token_ids[len(self.prompt_token_ids) :]

    @property
    def max_tokens(self) -> int:
        assert self.sampling_params.max_tokens is not None, "max_tokens is resolved before a request is made"
        return self.sampling_params.max_tokens
