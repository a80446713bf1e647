# SPDX-License-Identifier: Apache-2.0
"""What a served engine's ranks tell of themselves: counts on the rank that has the request, who waits for whom."""

from __future__ import annotations

import asyncio

import pytest
import served
import tiny_models as tiny
from prometheus_client.parser import text_string_to_metric_families

from vllm.entrypoints.openai.watch import describe_ranks
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.prometheus import Exposition

DELTA = RequestOutputKind.DELTA


async def watch(llm: AsyncLLM) -> None:
    async def run(name: str, dp_rank: int, length: int) -> list[int]:
        stream = llm.generate(
            served.prompt(9),
            served.greedy(length, output_kind=DELTA),
            name,
            data_parallel_rank=dp_rank,
        )
        return [token async for output in stream for token in output.outputs[0].token_ids]

    def count(name: str, dp_rank: int, **labels: str) -> float:
        assert llm.metrics is not None
        text = Exposition(lambda: llm.metrics.snapshot("m", range(2), 256, 16)).text().decode()  # type: ignore[union-attr]
        wanted = {"engine": str(dp_rank), "model_name": "m", **labels}
        families = text_string_to_metric_families(text)
        return next(s.value for family in families for s in family.samples if (s.name, s.labels) == (name, wanted))

    def states() -> list[tuple[str, list[int]]]:
        return [(rank["state"], rank["waits_for"]) for rank in describe_ranks(llm, "m")["ranks"]]

    reports: list[dict[str, float]] = []

    def at_rest() -> bool:
        reports[:] = llm.rank_stats
        return all(reports) and not any(r["running"] for r in reports) and reports[0]["step"] == reports[1]["step"]

    assert await run("one", 1, 6) == list(tiny.greedy(served.MODEL, tiny.prompt(9), 6))
    await served.until(at_rest)
    first, second = reports
    assert [second[name] for name in ("prompt_tokens", "generation_tokens", "dummy_steps")] == [9, 6, 0]
    assert [first[name] for name in ("prompt_tokens", "generation_tokens", "dummy_steps")] == [0, 0, 6]
    await served.until(lambda: states() == [("idle", [])] * 2)
    assert [count("vllm:time_to_first_token_seconds_count", rank) for rank in (0, 1)] == [0, 1]
    assert [count("vllm:inter_token_latency_seconds_count", rank) for rank in (0, 1)] == [0, 5]
    assert [count("vllm:request_success_total", rank, finished_reason="length") for rank in (0, 1)] == [0, 1]

    with served.stopping_after(5):
        stream = llm.generate(
            {"prompt_token_ids": [1, 2]}, served.greedy(200, output_kind=DELTA), "left", data_parallel_rank=1
        )
        await anext(stream)
        await stream.aclose()
    assert [count("vllm:request_success_total", rank, finished_reason="abort") for rank in (0, 1)] == [0, 1]
    with pytest.raises(ValueError, match="data_parallel_rank=7"):
        await run("nowhere", 7, 3)
    assert count("vllm:request_success_total", 0, finished_reason="abort") == 0, "what no rank had is counted nowhere"

    with served.stopped(served.processes(llm)["rank 1"]):
        task = asyncio.create_task(run("held", 0, 120))
        await served.until(lambda: states()[0] == ("waiting", [1]))
        late = asyncio.create_task(run("late", 0, 2))
        await served.until(lambda: "late" in llm.ranks.protocol.requests)
        await served.heard(llm, 0)
        await asyncio.sleep(0.4)
    assert [len(await task), len(await late)] == [120, 2]
    assert count("vllm:request_queue_time_seconds_sum", 0) > 0.3, "it waited for the end of the step"
    assert llm.rank_stats[0]["wait_seconds"] > 0


@pytest.mark.multiprocess
def test_what_served_ranks_tell(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("VLLM_SILENCE_TIMEOUT_S", "300")  # one rank is stopped for as long as it takes
    with served.environment(**served.poisoned()):
        llm = served.start(1, 2)
    try:
        asyncio.run(watch(llm))
    finally:
        llm.shutdown(5)
