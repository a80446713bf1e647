# SPDX-License-Identifier: Apache-2.0
"""Beam search over the engine's log-probabilities; the bookkeeping of one prompt."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from vllm.logprobs import SampleLogprobs
from vllm.sampling_params import BeamSearchParams


@dataclass
class BeamSearchSequence:
    """``tokens``: prompt and output. ``cum_logprob``: of the output. ``text``: of all of it, once it is finished."""

    tokens: list[int]
    logprobs: SampleLogprobs = field(default_factory=list)
    lora_request: Any = None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The best first."""

    sequences: list[BeamSearchSequence]


class BeamSearch:
    """The beams of one prompt. The rules are transformers': of the likeliest candidates of a step an end token among
    the first ``beam_width`` ends its sequence, the first ``beam_width`` others go on, and a sequence's score is its
    log-probability over (output length) ** ``length_penalty``. It ends when no running beam can beat a finished one.
    """

    def __init__(self, prompt_token_ids: list[int], params: BeamSearchParams, end_token_ids: Collection[int]) -> None:
        self.params, self.num_prompt = params, len(prompt_token_ids)
        self.end_token_ids = frozenset() if params.ignore_eos else frozenset(end_token_ids)
        self.running = [BeamSearchSequence(prompt_token_ids)]
        self.finished: list[tuple[float, BeamSearchSequence]] = []

    @property
    def num_candidates(self) -> int:
        """Enough that ``beam_width`` are left where every end token is among them."""
        return self.params.beam_width * max(2, 1 + len(self.end_token_ids))

    def advance(self, logprobs: list[SampleLogprobs]) -> None:
        """``logprobs[i]``: what followed ``running[i]``, one position."""
        width, at_end = self.params.beam_width, len(self.running[0].tokens) + 1 - self.num_prompt
        candidates = sorted(
            (
                (-(beam.cum_logprob + entry.logprob), i, token_id)
                for i, (beam, rows) in enumerate(zip(self.running, logprobs, strict=True))
                for token_id, entry in rows[0].items()
            ),
        )[: self.num_candidates]
        going_on: list[BeamSearchSequence] = []
        for place, (cost, i, token_id) in enumerate(candidates):
            beam = self.running[i]
            ended = token_id in self.end_token_ids
            if (ended or at_end == self.params.max_tokens) and place >= width:
                continue
            sequence = BeamSearchSequence(
                [*beam.tokens, token_id],
                [*beam.logprobs, logprobs[i][0]],
                cum_logprob=-cost,
                finish_reason="stop" if ended else "length",
            )
            if ended or at_end == self.params.max_tokens:
                self.finished.append((self._score(sequence.cum_logprob, at_end), sequence))
            elif len(going_on) < width:
                going_on.append(sequence)
        self.finished = sorted(self.finished, key=lambda pair: -pair[0])[:width]
        self.running = going_on if self._can_improve(going_on, at_end) else []

    def _score(self, cum_logprob: float, length: int) -> float:
        return cum_logprob / length**self.params.length_penalty

    def _can_improve(self, beams: list[BeamSearchSequence], length: int) -> bool:
        if len(self.finished) < self.params.beam_width or not beams:
            return bool(beams)
        best_length = self.params.max_tokens if self.params.length_penalty > 0 else length + 1
        return self._score(beams[0].cum_logprob, best_length) > self.finished[-1][0]


__all__ = ["BeamSearchOutput", "BeamSearchSequence"]
