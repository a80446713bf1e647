# SPDX-License-Identifier: Apache-2.0
"""What engines are given call by call, what comes of it, and a stand-in device that is late by random delays."""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from vllm import SamplingParams
from vllm.v1.transfers import ThreadStream, _ThreadEvent


@dataclass(frozen=True)
class Arrival:
    """A request that comes before call ``at``, and is aborted before call ``aborted_at`` unless it has ended."""

    at: int
    prompt: tuple[int, ...]
    params: dict[str, Any]
    aborted_at: int | None = None


@dataclass
class Result:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reason: str | None = None
    stop_reason: Any = None
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    num_cached_tokens: int | None = None


def _values(rows: Any) -> list[Any]:
    return [None if row is None else {token: (one.logprob, one.rank) for token, one in row.items()} for row in rows]


def drive(llm: Any, arrivals: list[Arrival], calls: int = 0, resets: Collection[int] = ()) -> list[Result]:
    """Call by call until nothing is left, ``calls`` times at least; the results in the order of ``arrivals``. Cached
    prefixes are forgotten before the calls of ``resets``."""
    engine, results, call = llm.llm_engine, [Result() for _ in arrivals], 0
    calls = max([calls, *(a.at + 1 for a in arrivals)])
    while call < calls or engine.has_unfinished_requests():
        if call in resets:
            llm.reset_prefix_cache()
        for i, arrival in enumerate(arrivals):
            if arrival.at == call:
                params = SamplingParams(**{"detokenize": engine.tokenizer is not None, **arrival.params})
                engine.add_request(str(i), {"prompt_token_ids": list(arrival.prompt)}, params)
            if arrival.aborted_at == call and results[i].reason is None and arrival.at < call:
                engine.abort_request(str(i))
                results[i].reason = "aborted"
        for output in engine.step():
            done, result = output.outputs[0], results[int(output.request_id)]
            result.token_ids, result.text = list(done.token_ids), done.text
            result.reason, result.stop_reason = done.finish_reason, done.stop_reason
            result.logprobs = _values(done.logprobs or [])
            result.prompt_logprobs = _values(output.prompt_logprobs or [])
            result.num_cached_tokens = output.num_cached_tokens
        call += 1
        assert call < 2000, "the engine does not come to an end"
    scheduler = engine.scheduler
    scheduler.check_integrity()
    assert not scheduler._in_flight
    assert scheduler.kv_cache_manager.pool.num_free == scheduler.kv_cache_config.num_blocks - 1
    assert set(engine.worker.runner.input_batch.row_of) <= scheduler._finished_req_ids
    return results


def compare(ahead: list[Result], one_by_one: list[Result], cached: bool = True) -> None:
    for i, (found, expected) in enumerate(zip(ahead, one_by_one, strict=True)):
        if not cached:
            found.num_cached_tokens = expected.num_cached_tokens
        if "aborted" in (found.reason, expected.reason):
            count = min(len(found.token_ids), len(expected.token_ids))
            assert found.token_ids[:count] == expected.token_ids[:count], i
        else:
            assert found == expected, i


@contextmanager
def late(seconds: float, seed: int = 0) -> Iterator[None]:
    """The thread begins each piece of work up to ``seconds`` late."""
    rng, launch = random.Random(seed), ThreadStream.launch

    def delayed(self: ThreadStream, work: Callable[[], Any]) -> None:
        delay = rng.random() * seconds * (rng.random() < 0.3)
        launch(self, lambda: (time.sleep(delay), work()) if delay else work())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThreadStream, "launch", delayed)
        yield


@contextmanager
def latest() -> Iterator[None]:
    """The thread begins each piece of work only once the host waits for it, or for a later one."""
    launch, record, synchronize = ThreadStream.launch, _ThreadEvent.record, _ThreadEvent.synchronize
    changed, launched, wanted = threading.Condition(), Counter[ThreadStream](), Counter[ThreadStream]()
    places: dict[_ThreadEvent, int] = {}

    def want(stream: ThreadStream, count: float) -> None:
        with changed:
            wanted[stream] = max(wanted[stream], count)  # type: ignore[assignment]
            changed.notify_all()

    def delayed(self: ThreadStream, work: Callable[[], Any]) -> None:
        launched[self] = place = launched[self] + 1

        def run() -> None:
            with changed:
                changed.wait_for(lambda: wanted[self] >= place)
            work()

        launch(self, run)

    def noted(self: _ThreadEvent) -> None:
        places[self] = launched[self._stream]
        record(self)

    def waiting(self: _ThreadEvent) -> None:
        want(self._stream, places.get(self, 0))
        synchronize(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThreadStream, "launch", delayed)
        patch.setattr(_ThreadEvent, "record", noted)
        patch.setattr(_ThreadEvent, "synchronize", waiting)
        try:
            yield
        finally:
            for stream in list(launched):
                want(stream, math.inf)
