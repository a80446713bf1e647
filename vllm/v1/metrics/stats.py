# SPDX-License-Identifier: Apache-2.0
"""What a rank counts of its steps, and when things happened to a request."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.worker.batch_plan import BatchPlan


@dataclass
class StepCounts:
    """A rank's steps since its start. ``steps``: those in which the model ran, ``dummy_steps``: of these the ones on
    padding alone, ``replayed``: those that were captured before; ``real_rows`` and ``padded_rows`` add up to all rows
    that ran; ``wait_seconds``: in the agreement of every step, which is where a rank waits for peers that come later.
    """

    steps: int = 0
    dummy_steps: int = 0
    replayed: int = 0
    real_rows: int = 0
    padded_rows: int = 0
    wait_seconds: float = 0.0

    def record(self, plan: BatchPlan, waited: float) -> None:
        self.wait_seconds += waited
        if plan.num_tokens_padded:
            self.steps += 1
            self.dummy_steps += plan.is_dummy
            self.replayed += plan.cudagraph_mode > 0
            self.real_rows += plan.num_tokens_unpadded
            self.padded_rows += plan.num_tokens_padded - plan.num_tokens_unpadded


@dataclass
class RequestCounts:
    """A scheduler's requests since its start. ``prompt_tokens``: of requests that gave their first token, those found
    in the cache included; ``prefix_queries`` and ``prefix_hits``: tokens looked up in the prefix cache and found there,
    a request once; ``corrupted``: requests that NaN logits ended."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    corrupted: int = 0


def rank_stats(core: Any) -> dict[str, float]:
    """What the front end is told of the rank of ``core``, a ``scheduler`` and a ``worker``, after a step.

    The fields of :class:`StepCounts` and :class:`RequestCounts`, totals since the start; ``step``: of the next step;
    ``running`` and ``waiting`` requests; ``kv_usage``: the share of cache blocks that are held; ``kv_blocks`` in all.
    """
    scheduler, worker = core.scheduler, core.worker
    pool = scheduler.kv_cache_manager.pool
    blocks = pool.num_blocks - 1
    return {
        "step": worker.num_steps,
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "kv_usage": 1 - pool.num_free / max(blocks, 1),
        "kv_blocks": blocks,
        **vars(worker.counts),
        **vars(scheduler.counts),
    }


@dataclass
class RequestStateStats:
    """``RequestOutput.metrics``. ``arrival_time`` is seconds since the epoch, or what the caller gave; the ``_ts`` are
    ``time.monotonic`` seconds, 0 for what has not happened: queued, first scheduled, and the ends of the steps that
    gave the first and the last token. Of several completions: the first of the firsts, the last of the lasts.

    ``first_token_latency``: seconds from arrival to the first token.
    """

    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0

    def copy(self) -> RequestStateStats:
        return RequestStateStats(**vars(self))

    def record_tokens(self, num_tokens: int, now: float) -> None:
        """``num_tokens`` came at the monotonic time ``now``."""
        self.num_generation_tokens += num_tokens
        self.last_token_ts = now
        if not self.first_token_ts:
            self.first_token_ts = now
            self.first_token_latency = time.time() - self.arrival_time
