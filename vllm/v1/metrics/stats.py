# SPDX-License-Identifier: Apache-2.0
"""When things happened to a request."""

from __future__ import annotations

import time
from dataclasses import dataclass


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

    def record_tokens(self, num_tokens: int, now: float) -> None:
        """``num_tokens`` came at the monotonic time ``now``."""
        self.num_generation_tokens += num_tokens
        self.last_token_ts = now
        if not self.first_token_ts:
            self.first_token_ts = now
            self.first_token_latency = time.time() - self.arrival_time
