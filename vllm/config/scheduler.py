# SPDX-License-Identifier: Apache-2.0
"""How much work one step may hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerConfig:
    """``max_num_batched_tokens`` bounds the tokens of a step, ``max_num_seqs`` its requests. ``async_scheduling``: a
    step is scheduled and launched before the one before it has ended."""

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    enable_chunked_prefill: bool = True
    async_scheduling: bool = False

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs={self.max_num_seqs}: at least one request must run")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}: "
                "each running request needs one token a step; raise the former or lower the latter"
            )
