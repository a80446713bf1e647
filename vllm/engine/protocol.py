# SPDX-License-Identifier: Apache-2.0
"""What a server needs of an engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any, Protocol

from vllm.config import ModelConfig, VllmConfig
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.metrics.engine_metrics import EngineMetrics


class EngineClient(Protocol):
    """``AsyncLLM`` and what stands in for it.

    ``generate`` raises before its first output: ``ValueError`` for a request that cannot run, ``EngineDeadError`` where
    the engine is lost (then also later). Closing or cancelling it aborts the request.
    """

    vllm_config: VllmConfig
    model_config: ModelConfig
    tokenizer: Any
    generation_config: Mapping[str, Any]

    @property
    def metrics(self) -> EngineMetrics | None:
        """None where nothing is counted."""

    @property
    def rank_stats(self) -> list[dict[str, float]]:
        """What each DP rank told last of itself; see ``vllm.v1.metrics.stats.rank_stats``."""

    @property
    def rank_waits(self) -> dict[int, list[int]]:
        """Rank → the ranks that hold it up."""

    @property
    def errored(self) -> bool: ...

    @property
    def dead_error(self) -> BaseException | None: ...

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        data_parallel_rank: int | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]: ...

    async def abort(self, request_id: str | Iterable[str]) -> None: ...

    async def check_health(self) -> None: ...
