# SPDX-License-Identifier: Apache-2.0
"""Requests that come and go at ranks that are processes of their own."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import served
import tiny_models as tiny

from vllm import RequestOutput, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM, _Client, arguments_as_json
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

pytestmark = [pytest.mark.multiprocess, pytest.mark.alone]
LENGTHS = (3, 9, 17, 40, 70)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((1, 1, True), id="1x1-ahead"),
        pytest.param((1, 2, False), id="1x2", marks=pytest.mark.slow),
        pytest.param((2, 2, False), id="2x2"),
        pytest.param((2, 2, True), id="2x2-ahead", marks=pytest.mark.slow),
    ],
)
def llm(request: pytest.FixtureRequest) -> Iterator[AsyncLLM]:
    before = served.remains()
    with served.environment(**served.poisoned(), VLLM_SILENCE_TIMEOUT_S="300"):  # tests stop a rank
        llm = served.start(*request.param[:2], async_scheduling=request.param[2])
    pids = served.processes(llm)
    assert len(pids) == 1 + request.param[0] * request.param[1]
    yield llm
    llm.shutdown(5)
    assert llm.ranks.dead is None
    assert not served.left_of(pids.values()), pids
    assert served.remains() == before
    with pytest.raises(EngineDeadError, match="shut"):
        asyncio.run(served.tokens(llm, 5, 3, "late"))


def test_tokens_are_transformers_while_others_come_and_go(llm: AsyncLLM) -> None:
    chance = random.Random(5)

    async def client(number: int) -> None:
        await asyncio.sleep(chance.random() * 0.5)
        length, count, leaves = chance.choice(LENGTHS), chance.randint(1, 30), chance.random() < 0.3
        expected = list(tiny.greedy(served.MODEL, tiny.prompt(length), 30))[:count]
        stream = llm.generate(served.prompt(length), served.greedy(count), f"client-{number}")
        got: list[int] = []
        async for output in stream:
            got = list(output.outputs[0].token_ids)
            assert got == expected[: len(got)]
            if leaves and len(got) > count // 2:
                break
        await stream.aclose()
        assert leaves or got == expected

    async def many() -> None:
        await asyncio.gather(*[client(number) for number in range(48)])
        await served.until(lambda: all(stats["running"] == stats["waiting"] == 0 for stats in llm.stats()))

    asyncio.run(many())
    assert not llm.ranks.protocol.requests
    assert not llm._clients
    assert all(stats["kv_usage"] == 0 for stats in llm.stats())


def test_kinds_of_output(llm: AsyncLLM) -> None:
    expected = list(tiny.greedy(served.MODEL, tiny.prompt(9), 12))

    async def outputs(kind: RequestOutputKind) -> list[list[int]]:
        params = served.greedy(12, output_kind=kind)
        return [
            list(output.outputs[0].token_ids)
            async for output in llm.generate(served.prompt(9), params, f"kind-{kind.name}")
        ]

    async def all_kinds() -> None:
        assert await outputs(RequestOutputKind.FINAL_ONLY) == [expected]
        assert (await outputs(RequestOutputKind.CUMULATIVE))[-1] == expected
        parts = await outputs(RequestOutputKind.DELTA)
        assert [token for part in parts for token in part] == expected

    asyncio.run(all_kinds())


async def ended(llm: AsyncLLM, request_id: str) -> None:
    """Its last output waits for whoever reads it."""

    def has_ended() -> bool:
        with llm.ranks.lock:  # under which it is handed to the loop
            return request_id not in llm._clients

    await served.until(has_ended)
    await asyncio.sleep(0)  # what was handed to the loop comes first


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_who_is_behind_finds_one_output(llm: AsyncLLM, kind: RequestOutputKind) -> None:
    """A server that is slower than its engine would else fall further behind with each token, and an output each of all
    that waits would keep the event loop from others."""

    async def behind() -> list[RequestOutput]:
        stream = llm.generate(served.prompt(9), served.greedy(30, output_kind=kind), "behind")
        first = await anext(stream)
        await ended(llm, "behind")
        return [first, *[output async for output in stream]]

    found = asyncio.run(behind())
    assert len(found) <= 2
    assert found[-1].finished
    parts = found if kind is RequestOutputKind.DELTA else found[-1:]
    assert [token for output in parts for token in output.outputs[0].token_ids] == list(
        tiny.greedy(served.MODEL, tiny.prompt(9), 30)
    )


def test_the_end_of_one_that_is_over_is_not_the_end_of_another(llm: AsyncLLM) -> None:
    """A client leaves when its request has ended and its last output waits; the id has been given again since."""

    async def again() -> list[int]:
        first = llm.generate(served.prompt(9), served.greedy(3), "again")
        await anext(first)
        await ended(llm, "again")
        second = llm.generate(served.prompt(9), served.greedy(20), "again")
        found = [await anext(second)]
        await first.aclose()
        found += [output async for output in second]
        return list(found[-1].outputs[0].token_ids)

    assert asyncio.run(asyncio.wait_for(again(), 120)) == list(tiny.greedy(served.MODEL, tiny.prompt(9), 20))


def test_outputs_before_an_error_are_heard() -> None:
    async def hear() -> None:
        client = _Client(RequestOutputKind.CUMULATIVE)
        outputs = [RequestOutput("r", None, [1], None, [], finished=False) for _ in range(3)]
        for came in (*outputs, EngineGenerateError("the request was aborted")):
            client.put(came)
        assert await client.get() is outputs[0]
        for _ in range(2):
            with pytest.raises(EngineGenerateError, match="was aborted"):
                await client.get()

    asyncio.run(hear())


def test_several_completions_and_their_seeds(llm: AsyncLLM) -> None:
    async def draw(request_id: str) -> list[tuple[int, ...]]:
        params = SamplingParams(n=3, seed=7, max_tokens=8, ignore_eos=True, detokenize=False)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        found = [output async for output in llm.generate(served.prompt(9), params, request_id)]
        assert len(found) == 1
        return [tuple(completion.token_ids) for completion in found[0].outputs]

    first, second = asyncio.run(draw("one")), asyncio.run(draw("two"))
    assert first == second
    assert len(set(first)) == 3


def test_parameters_reach_the_sampler(llm: AsyncLLM) -> None:
    expected = tiny.greedy(served.MODEL, tiny.prompt(9), 4)

    async def first_token(**params: Any) -> int:
        one = served.greedy(1, **params)
        found = [output async for output in llm.generate(served.prompt(9), one, f"params-{len(params)}-{params}")]
        return found[-1].outputs[0].token_ids[0]

    async def check() -> None:
        assert await first_token() == expected[0]
        assert await first_token(allowed_token_ids=[77]) == 77
        assert await first_token(logit_bias={91: 100.0}) == 91
        params = served.greedy(4, logprobs=2, prompt_logprobs=1)
        *_, last = [output async for output in llm.generate(served.prompt(9), params, "logprobs")]
        assert [len(entry) for entry in last.outputs[0].logprobs] == [2] * 4
        assert last.prompt_logprobs is not None
        assert len(last.prompt_logprobs) == 9

    asyncio.run(check())


def test_a_pinned_request_runs_on_its_rank(llm: AsyncLLM) -> None:
    async def check() -> None:
        num_ranks = len(llm.stats())
        for rank in range(num_ranks):
            before = [stats.get("generation_tokens", 0) for stats in llm.stats()]
            await served.tokens(llm, 5, 6, f"pinned-{rank}", data_parallel_rank=rank)
            await served.until(lambda: llm.stats()[rank]["running"] == 0)  # noqa: B023
            after = [stats.get("generation_tokens", 0) for stats in llm.stats()]
            assert [b - a for a, b in zip(before, after, strict=True)] == [6 * (r == rank) for r in range(num_ranks)]
        with pytest.raises(ValueError, match=f"there are ranks 0 to {num_ranks - 1}"):
            await served.tokens(llm, 5, 6, "nowhere", data_parallel_rank=num_ranks)

    asyncio.run(check())


def test_a_bad_request_costs_its_sender_only(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = list(tiny.greedy(served.MODEL, tiny.prompt(17), 40))

    async def check() -> None:
        with served.stopped(served.processes(llm)["rank 0"]):
            good = [asyncio.create_task(served.tokens(llm, 17, 40, f"good-{i}")) for i in range(4)]
            await served.until(lambda: len(llm.ranks.protocol.requests) == 4)
            with pytest.raises(ValueError, match="max_model_len=256"):
                await served.tokens(llm, 300, 2, "too long")
            with pytest.raises(ValueError, match="vocabulary"):
                async for _ in llm.generate({"prompt_token_ids": [10**6]}, served.greedy(2), "no token"):
                    pass
            with pytest.raises(NotImplementedError, match="priority"):
                await served.tokens(llm, 5, 2, "urgent", priority=1)
        # What no check of the front end finds comes back from the rank.
        process = llm.input_processor.process_inputs
        with monkeypatch.context() as patch:
            patch.setattr(
                llm.input_processor,
                "process_inputs",
                lambda *args: dataclasses.replace(process(*args), prompt_token_ids=[]),
            )
            with pytest.raises(ValueError, match="prompt of 0 tokens"):
                await served.tokens(llm, 5, 2, "empty")
        assert await asyncio.gather(*good) == [expected] * 4

    asyncio.run(check())


def test_whoever_leaves_frees_its_place(llm: AsyncLLM) -> None:
    async def check() -> None:
        async def read(request_id: str) -> None:
            async for _ in llm.generate(served.prompt(9), served.greedy(200), request_id):
                started.set()

        for how in ("cancelled", "aborted"):
            started, before = asyncio.Event(), sum(stats.get("generation_tokens", 0) for stats in llm.stats())
            with served.stopping_after(20):
                task = asyncio.create_task(read(how))
                await started.wait()
                if how == "cancelled":
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                else:
                    await llm.abort(how)
                    with pytest.raises(EngineGenerateError, match="aborted"):
                        await task
                for dp_rank in range(len(llm.stats())):
                    await served.heard(llm, dp_rank)
            assert not llm.ranks.protocol.requests
            await served.until(lambda: all(stats["running"] == stats["kv_usage"] == 0 for stats in llm.stats()))
            generated = sum(stats["generation_tokens"] for stats in llm.stats()) - before
            assert generated < 30, f"{generated} tokens for a client that left after the first"
            assert await served.tokens(llm, 9, 3, how) == list(tiny.greedy(served.MODEL, tiny.prompt(9), 3))

    asyncio.run(check())


def test_a_loop_that_is_closed_takes_its_own_requests_with_it(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others hear what is theirs, be it an output or an abort."""
    dropped, drop = list[str](), llm._drop
    monkeypatch.setattr(llm, "_drop", lambda ids: (dropped.extend(names := list(ids)), drop(names)))
    loop = asyncio.new_event_loop()

    async def begin(allow: Callable[[int], None], *names: str) -> list[Any]:
        streams = [llm.generate(served.prompt(9), served.greedy(200), name) for name in names]
        first = [asyncio.ensure_future(anext(stream)) for stream in streams]
        await served.until(lambda: all(name in llm._clients for name in names))
        for dp_rank in range(len(llm.rank_stats)):
            await served.heard(llm, dp_rank)
        allow(30)
        await asyncio.gather(*first)
        return streams

    async def others(allow: Callable[[int], None]) -> None:
        (stays,) = await begin(allow, "stays")
        with llm.ranks.lock:  # so that no output comes first
            loop.close()
            await llm.abort(["left-0", "stays"])
        with pytest.raises(EngineGenerateError, match="aborted"):
            async for _ in stays:
                pass
        allow(200)
        assert await served.tokens(llm, 9, 30, "other") == list(tiny.greedy(served.MODEL, tiny.prompt(9), 30))
        await served.until(lambda: all(stats["running"] == stats["waiting"] == 0 for stats in llm.stats()))

    with served.stopping_after(0) as allow:
        left = loop.run_until_complete(begin(allow, "left-0", "left-1"))
        asyncio.run(others(allow))
    del left  # nobody closed them
    assert "left-1" in dropped
    assert not llm._clients


def test_ids_in_use_are_refused(llm: AsyncLLM) -> None:
    async def check() -> None:
        with served.stopped(served.processes(llm)["rank 0"]):
            task = asyncio.create_task(served.tokens(llm, 9, 60, "same"))
            await served.until(lambda: "same" in llm.ranks.protocol.requests)
            with pytest.raises(ValueError, match="'same' is in use"):
                await served.tokens(llm, 5, 2, "same")
        assert len(await task) == 60

    asyncio.run(check())


def test_idle_ranks_sleep_and_wake_at_once(llm: AsyncLLM) -> None:
    """Other programs only add to what a look around costs and how long a wake takes: the quietest of several counts."""
    pids = [pid for name, pid in served.processes(llm).items() if name != "agent"]
    if len(pids) == 1:
        pytest.skip("several ranks do more while idle")
    # Each of its threads looks around a hundred times a second.
    assert [served.thread_names(pid).count("gloo_tcp_loop") for pid in pids] == [1] * len(pids)

    async def share() -> float:
        used, began = [served.cpu_seconds(pid) for pid in pids], time.monotonic()
        await asyncio.sleep(1)
        seconds = time.monotonic() - began
        return max((served.cpu_seconds(pid) - before) / seconds for pid, before in zip(pids, used, strict=True))

    async def wake(number: int) -> tuple[float, float]:
        """Seconds from the request at its rank to its first step, and from the front end to its first token."""
        await asyncio.sleep(0.3)
        began = time.perf_counter()
        stream = llm.generate(served.prompt(3), served.greedy(1), f"wake-{number}")
        *_, last = [output async for output in stream]
        return last.metrics.scheduled_ts - last.metrics.queued_ts, time.perf_counter() - began

    async def check() -> None:
        await served.tokens(llm, 5, 2, "before")
        await served.until(lambda: all(stats["running"] == 0 for stats in llm.stats()))
        await asyncio.sleep(6)  # the watchdog looks less often by then
        steps, shares = [stats["steps"] for stats in llm.stats()], [await share()]
        while min(shares) > 0.008 and len(shares) < 8:
            shares.append(await share())
        assert [stats["steps"] for stats in llm.stats()] == steps
        assert min(shares) < 0.01, f"idle ranks use {shares} of a core"
        to_step, to_token = zip(*[await wake(number) for number in range(10)], strict=True)
        print(f"idle share {min(shares):.4f}; seconds to the first step {to_step}, to the first token {to_token}")
        assert min(to_step) < 0.02, f"from idle to the first step: {to_step} s"
        assert statistics.median(to_step) < 0.1, f"from idle to the first step: {to_step} s"
        assert min(to_token) < 0.2, f"from idle to the first token: {to_token} s"

    asyncio.run(check())


def test_what_only_this_process_has_is_refused() -> None:
    from vllm.engine.arg_utils import EngineArgs

    given = arguments_as_json(EngineArgs("m", max_model_len="1k", dtype=tiny.torch.float32, hf_overrides={"a": 1}))
    assert given == {"model": "m", "max_model_len": 1000, "dtype": "float32", "hf_overrides": {"a": 1}}
    with pytest.raises(ValueError, match=r"hf_overrides=.*is a function"):
        arguments_as_json(EngineArgs("m", hf_overrides=lambda config: config))
