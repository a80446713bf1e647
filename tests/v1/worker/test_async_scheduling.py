# SPDX-License-Identifier: Apache-2.0
"""Steps that are scheduled ahead give what steps one at a time give, whenever the host learns of a request's end.

On CPU a thread stands for the device (``ThreadStream``): here it is late by random delays, so that a step is prepared
while another one runs. What the two engines are given is drawn; memory that nobody wrote is NaN.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import launcher
import late_device
import numpy as np
import pytest
import rank_checks
import tiny_hybrids as hybrids
import tiny_models as tiny
import torch
from drawn import HealthCheck, given, settings, st
from entrypoints.engine_fakes import save_byte_llama

from vllm import SamplingParams
from vllm.v1 import transfers
from vllm.v1.request import RequestStatus

BLOCK = 16
LIMITS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 96,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "num_gpu_blocks_override": 64,
    "block_size": BLOCK,
}


# --- what the engines are given, and what comes of it -----------------------------------------------------------------


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


def drive(llm: Any, arrivals: list[Arrival]) -> list[Result]:
    """Call by call until nothing is left; the results in the order of ``arrivals``."""
    engine, results, call = llm.llm_engine, [Result() for _ in arrivals], 0
    last = max((a.at for a in arrivals), default=0)
    while call <= last or engine.has_unfinished_requests():
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
    rng, launch = random.Random(seed), transfers.ThreadStream.launch

    def delayed(self: transfers.ThreadStream, work: Callable[[], Any]) -> None:
        delay = rng.random() * seconds * (rng.random() < 0.3)
        launch(self, lambda: (time.sleep(delay), work()) if delay else work())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfers.ThreadStream, "launch", delayed)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bytes")
    save_byte_llama(path)
    return path


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[Callable[..., tuple[Any, Any]]]:
    """Of the same settings, one that schedules ahead and one that does not; made once."""
    from vllm import LLM

    made: dict[str, tuple[Any, Any]] = {}

    def make(**kwargs: Any) -> tuple[Any, Any]:
        if repr(kwargs) not in made:
            given = {**LIMITS, **kwargs}
            made[repr(kwargs)] = tuple(LLM(str(folder), async_scheduling=ahead, **given) for ahead in (True, False))
        return made[repr(kwargs)]

    yield make
    for pair in made.values():
        for llm in pair:
            llm.shutdown()


PARAMS = st.fixed_dictionaries(
    {"max_tokens": st.sampled_from([1, 1, 2, 3, 5, 9, 17]), "temperature": st.sampled_from([0.0, 1.0])},
    optional={
        "ignore_eos": st.just(True),
        "stop_token_ids": st.lists(st.integers(3, 259), min_size=20, max_size=40),
        "stop": st.lists(st.sampled_from(list("abcdefghij0123456789 ")), min_size=5, max_size=20),
        "min_tokens": st.just(1),
        "logprobs": st.sampled_from([0, 2]),
        "prompt_logprobs": st.just(1),
        "repetition_penalty": st.just(1.3),
        "frequency_penalty": st.just(0.5),
        "top_k": st.just(30),
    },
)
# Prompts that begin alike, so that prefixes are found.
PROMPTS = st.builds(
    lambda common, length: tiny.prompt(64)[:common] + tiny.prompt(length, seed=1),
    st.sampled_from([0, 16, 33]),
    st.integers(1, 20),
)


@st.composite
def _arrivals(draw: Any, num_calls: int, most: int, aborts: bool) -> list[Arrival]:
    arrivals = []
    for seed in range(draw(st.integers(1, most))):
        at = draw(st.integers(0, num_calls))
        aborted_at = at + draw(st.integers(1, 8)) if aborts and draw(st.integers(0, 3)) == 0 else None
        arrivals.append(Arrival(at, draw(PROMPTS), {"seed": seed, **draw(PARAMS)}, aborted_at))
    return arrivals


FUZZ = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True, "database": None}


@given(arrivals=_arrivals(12, 5, aborts=True))
@settings(max_examples=25, **FUZZ)
@pytest.mark.usefixtures("nan_poison")
def test_the_same_comes_of_steps_ahead(engines: Any, arrivals: list[Arrival]) -> None:
    """Room for all: cached tokens are the same, too."""
    ahead, one_by_one = engines(max_num_seqs=8)
    for llm in (ahead, one_by_one):
        llm.reset_prefix_cache()
    with late(0.002):
        found = drive(ahead, arrivals)
    compare(found, drive(one_by_one, arrivals))


@given(arrivals=_arrivals(6, 7, aborts=True))
@settings(max_examples=15, **FUZZ)
@pytest.mark.usefixtures("nan_poison")
def test_the_same_comes_of_steps_ahead_where_blocks_are_short(engines: Any, arrivals: list[Arrival]) -> None:
    """Requests are preempted, wait for rows, and run in chunks; prefixes are found when they are."""
    ahead, one_by_one = engines(num_gpu_blocks_override=8, max_num_seqs=3, max_num_batched_tokens=20)
    with late(0.002):
        found = drive(ahead, arrivals)
    compare(found, drive(one_by_one, arrivals), cached=False)
