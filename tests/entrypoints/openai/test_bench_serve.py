# SPDX-License-Identifier: Apache-2.0
"""``vllm bench serve``: figures by hand, loads counted by a server whose delays are known."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import statistics
import threading
from argparse import ArgumentParser, Namespace
from collections import Counter
from pathlib import Path
from typing import Any

import live
import pytest
from engine_fakes import char_tokenizer
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from vllm.benchmarks import serve
from vllm.benchmarks.datasets import Sample, samples
from vllm.benchmarks.serve import Answer, delays, percentile, summarise
from vllm.entrypoints.cli.main import main
from vllm.utils.http_client import Response

FIRST_S, GAP_S = 0.08, 0.03


class Scripted:
    """A server that waits ``FIRST_S`` for the first piece of text and ``GAP_S`` between two. Prompts that hold a ! are
    refused, after one piece with a ?; ``usage``: it says how many tokens there were: two for each piece. After the
    first piece it waits for ``is_noted``."""

    def __init__(self, usage: bool = True, root: Path | None = None) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.under_way = self.most = 0
        self.app = FastAPI()
        self.app.get("/v1/models")(self.models)
        for path in ("/v1/completions", "/v1/chat/completions"):
            self.app.post(path)(self.complete)
        self.usage, self.root = usage, root
        self.is_noted = threading.Event()
        self.is_noted.set()

    async def models(self) -> Any:
        return {"data": [{"id": "scripted", "root": str(self.root)}]}

    async def complete(self, request: Request) -> Any:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        is_chat = "messages" in body
        prompt = body["messages"][0]["content"] if is_chat else body["prompt"]
        if "!" in prompt:
            return JSONResponse({"error": {"message": "no shouting", "code": 400}}, 400)

        def piece(text: str, **more: Any) -> str:
            choice = {"index": 0, "delta": {"content": text}} if is_chat else {"index": 0, "text": text}
            return f"data: {json.dumps({'choices': [choice | more]})}\n\n"

        async def stream() -> Any:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            if is_chat:
                yield piece("")  # the role alone is no text
            count = body.get("max_completion_tokens" if is_chat else "max_tokens") // 2
            for i in range(count):
                assert not i or await asyncio.to_thread(self.is_noted.wait, 60), "nobody notes the first piece"
                await asyncio.sleep(GAP_S if i else FIRST_S)
                yield piece("ab")
                if "?" in prompt:
                    yield 'data: {"error": {"message": "the engine is lost"}}\n\n'
                    return
            yield piece("", finish_reason="length")
            if self.usage:
                yield f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': 2 * count}})}\n\n"
            self.under_way -= 1
            yield "data: [DONE]\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chars")
    char_tokenizer().save_pretrained(path)
    return path


def bench(server: Scripted, folder: Path, tmp_path: Path, *options: str, code: int = 0) -> dict[str, Any]:
    path = tmp_path / "result.json"
    with live.serving(server.app) as url:
        argv = ["bench", "serve", "--base-url", url, "--save-detailed"]
        argv += [] if server.root == folder else ["--tokenizer", str(folder)]
        assert main([*argv, "--result-dir", str(tmp_path), "--result-filename", path.name, *options]) == code
    return json.loads(path.read_text())


def test_figures_by_hand():
    answers = [
        Answer(10, 0.0, 0.100, 0.500, [0.1, 0.3], "abc", 3),
        Answer(20, 0.2, 0.300, 0.300, [], "a", 1),
        Answer(30, 0.5, 0.200, 1.000, [0.4, 0.4], "abcde", 5),
        Answer(40, 0.9, error="HTTP 500"),
    ]
    found = summarise(answers, 2.0, ("ttft", "tpot", "itl", "e2el"), (50, 90, 99.9), {"ttft": 250, "e2el": 900})
    expected = {
        **{"duration": 2.0, "completed": 3, "failed": 1, "total_input_tokens": 60, "total_output_tokens": 9},
        **{"request_throughput": 1.5, "output_throughput": 4.5, "total_token_throughput": 34.5},
        "request_goodput": 0.5,  # the first alone: the second's first token is late, the third's last one
        "max_output_tokens_per_s": 5.0,  # at 0.1, 0.2, 0.5 / 0.5 / 0.7; then 1.1, 1.5
        "max_concurrent_requests": 2,  # 0 to 0.5 and 0.2 to 0.5; the third begins as they end
        **{"mean_ttft_ms": 200, "median_ttft_ms": 200, "std_ttft_ms": statistics.pstdev([100, 200, 300])},
        **{"p50_ttft_ms": 200, "p90_ttft_ms": 280, "p99.9_ttft_ms": 299.8},
        **{"mean_tpot_ms": 200, "median_tpot_ms": 200, "std_tpot_ms": 0, "p90_tpot_ms": 200},  # (0.4 / 2, 0.8 / 4)
        **{"mean_itl_ms": 300, "median_itl_ms": 350, "p50_itl_ms": 350, "p90_itl_ms": 400},  # 100 300 400 400
        **{"mean_e2el_ms": 600, "median_e2el_ms": 500, "p90_e2el_ms": 900},  # 300 500 1000
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert summarise([], 1.0)["p99_ttft_ms"] == 0.0
    assert summarise(answers, 2.0)["request_goodput"] is None
    assert "mean_e2el_ms" not in summarise(answers, 2.0)
    assert percentile([4.0, 1.0, 3.0, 2.0], 25) == 1.75


def test_arrivals():
    assert delays(3, float("inf"), 1.0, 0) == [0.0] * 3
    for burstiness, spread in ((1.0, 1.0), (0.25, 2.0), (4.0, 0.5)):
        times = delays(4001, 10.0, burstiness, 1)
        gaps = [after - before for before, after in itertools.pairwise(times)]
        assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.1)
        assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(spread, rel=0.1)
    assert delays(9, 3.0, 1.0, 5) == delays(9, 3.0, 1.0, 5) != delays(9, 3.0, 1.0, 6)


def test_a_scripted_server(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    server = Scripted()
    options = "--num-prompts 8 --max-concurrency 3 --random-input-len 12 --random-output-len 10 --num-warmups 2"
    more = (
        "--percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,99 --ignore-eos --metadata card=b60 --seed 3"
    )
    goodput = f"--goodput ttft:{1000 * FIRST_S - 1:.0f}"
    result = bench(server, folder, tmp_path, *options.split(), *more.split(), *goodput.split())
    assert (result["completed"], result["failed"], result["card"], result["model_id"]) == (8, 0, "b60", "scripted")
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (96, 80)
    assert result["output_lens"] == [10] * 8
    assert server.most == 3
    assert len(server.bodies) == 1 + 2 + 8, "the check of readiness, the warm-ups, the load"
    assert server.bodies[-1]["ignore_eos"] is True
    assert server.headers[-1]["authorization"] == "Bearer sk-1"
    assert result["request_goodput"] == 0, "no first token can come so early"
    # Five pieces of text: one first, four gaps. They are never early; a first one that is read late has the next ones
    # right behind it, so the gaps alone have no bound.
    e2el = 1000 * (FIRST_S + 4 * GAP_S)
    for name, ms in {"ttft": 1000 * FIRST_S, "e2el": e2el}.items():
        assert 0.9 * ms <= result[f"median_{name}_ms"] <= ms + 10_000, name
    assert [len(gaps) for gaps in result["itls"]] == [4] * 8
    for first, gaps in zip(result["ttfts"], result["itls"], strict=True):
        assert first >= 0.95 * FIRST_S
        assert first + sum(gaps) >= 0.95 * e2el / 1000
    by_hand = {"itl": [gap for gaps in result["itls"] for gap in gaps], "tpot": [sum(g) / 9 for g in result["itls"]]}
    for name, seconds in by_hand.items():
        assert result[f"median_{name}_ms"] == pytest.approx(1000 * statistics.median(seconds)), name
    assert result["duration"] >= 3 * e2el / 1000 * 0.95, "eight requests, three at a time: three rounds"
    shown = capsys.readouterr().out
    assert "time to first token, ms" in shown
    assert "p99" in shown


def test_a_piece_is_noted_before_the_next_one_comes(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    server = Scripted()
    server.is_noted.clear()

    class Noting(Answer):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "ttft" and value:
                server.is_noted.set()

    monkeypatch.setattr(serve, "Answer", Noting)
    options = "--num-prompts 1 --random-input-len 12 --random-output-len 10 --ready-check-timeout-sec 0"
    result = bench(server, folder, tmp_path, *options.split())
    assert result["completed"] == 1
    assert sum(result["itls"][0]) >= 0.95 * 4 * GAP_S


def test_chat_failures_and_counts_without_usage(folder: Path, tmp_path: Path, capsys):
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "one"}, {"prompt": "no!"}, {"prompt": "gone?"}, {"prompt": "two", "output_tokens": 4}]
    path.write_text("\n".join(map(json.dumps, rows)))
    server = Scripted(usage=False)
    options = f"--backend openai-chat --dataset-name custom --dataset-path {path} --custom-output-len 6 --num-prompts 4"
    result = bench(server, folder, tmp_path, *options.split(), "--disable-shuffle", "--ready-check-timeout-sec", "0")
    assert (result["completed"], result["failed"]) == (2, 2)
    assert result["output_lens"] == [6, 0, 0, 4], "a token for each letter of the text"
    assert result["total_output_tokens"] == 10
    assert [len(gaps) for gaps in result["itls"]] == [2, 0, 0, 1]
    assert "no shouting" in result["errors"][1]
    assert "the engine is lost" in result["errors"][2]
    assert {body["messages"][0]["role"] for body in server.bodies} == {"user"}
    assert "2 requests failed, the first: HTTPError: HTTP 400: no shouting" in capsys.readouterr().err
    rows = [{"prompt": "no!"}]
    path.write_text(json.dumps(rows[0]))
    alone = Scripted(root=folder)  # whose card says where the tokenizer lies
    result = bench(alone, folder, tmp_path, *options.split(), "--ready-check-timeout-sec", "0", code=1)
    assert (result["failed"], result["tokenizer_id"]) == (4, str(folder))


def arguments(**given: Any) -> Namespace:
    base = {"seed": 0, "num_prompts": 50, "disable_shuffle": False, "no_oversample": False, "dataset_path": None}
    sizes = {"random_input_len": 40, "random_output_len": 10, "random_range_ratio": 0.0, "random_prefix_len": 0}
    return Namespace(**(base | sizes | {"sharegpt_output_len": None, "custom_output_len": 7} | given))


def test_random_prompts(folder: Path):
    tokenizer = char_tokenizer()
    found = samples(arguments(dataset_name="random", random_prefix_len=8), tokenizer)
    assert {(s.prompt_len, s.output_len) for s in found} == {(48, 10)}
    assert {len(tokenizer.encode(s.prompt, add_special_tokens=False)) for s in found} == {48}
    assert len({s.prompt for s in found}) == 50
    assert len({s.prompt[:8] for s in found}) == 1
    assert found == samples(arguments(dataset_name="random", random_prefix_len=8), tokenizer)
    assert found != samples(arguments(dataset_name="random", random_prefix_len=8, seed=1), tokenizer)
    varied = samples(arguments(dataset_name="random", random_range_ratio=0.5, num_prompts=400), tokenizer)
    assert {s.prompt_len for s in varied} == set(range(20, 61))
    assert {s.output_len for s in varied} == set(range(5, 16))


def test_sharegpt_prompts(tmp_path: Path):
    path = tmp_path / "talks.json"
    talks = [["hello", "worlds"], ["hey", "much too short"], ["alone"], ["b" * 1025, "long"], ["c" * 1000, "d" * 1049]]
    path.write_text(json.dumps([{"conversations": [{"value": text} for text in talk]} for talk in talks]))
    found = samples(arguments(dataset_name="sharegpt", dataset_path=path, num_prompts=3), char_tokenizer())
    assert [(s.prompt, s.prompt_len, s.output_len) for s in found] == [("hello", 5, 6)] * 3
    few = arguments(dataset_name="sharegpt", dataset_path=path, num_prompts=3, no_oversample=True)
    assert len(samples(few, char_tokenizer())) == 1
    one = arguments(dataset_name="sharegpt", dataset_path=path, num_prompts=2, sharegpt_output_len=9)
    # The last talk fits with an answer of 9, so both are there, in an order of the seed's.
    assert Counter((s.prompt_len, s.output_len) for s in samples(one, char_tokenizer())) == {(5, 9): 1, (1000, 9): 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dataset-name", "sharegpt"], "needs --dataset-path"),
        (["--goodput", "itl:3"], "--goodput itl:3: give ttft:MS"),
        (["--percentile-metrics", "ttfb"], "--percentile-metrics ttfb: give some of ttft"),
        (["--request-rate", "0"], "--request-rate 0.0"),
        (["--header", "a"], "--header a: give NAME=VALUE"),
        (["--random-range-ratio", "1"], "--random-range-ratio 1.0: give at least 0 and less than 1"),
        (["--num-prompts", "1", "--ready-check-timeout-sec", "0.1"], "1 requests failed"),
    ],
)
def test_mistakes(options, message, folder: Path, capsys):
    argv = ["bench", "serve", "--base-url", "http://127.0.0.1:9", "--model", "m", "--tokenizer", str(folder)]
    if "--ready-check-timeout-sec" in options:
        message = "http://127.0.0.1:9/v1/completions does not answer as it should"
    assert main([*argv, *options]) == 1
    assert message in capsys.readouterr().err


TEXT, NONE = {"index": 0, "text": "ab"}, {"index": 0, "text": ""}


@pytest.mark.parametrize(
    ("pieces", "tokens", "ttft", "itl", "e2el", "tpot"),
    [
        # (seconds until it comes, its choices): one token a piece
        ([(0.5, [TEXT]), (0.25, [TEXT]), (0.125, [TEXT])], 3, 0.5, [0.25, 0.125], 0.875, 0.375 / 2),
        # what has no text is no token that a client could read: before the first, between two, after the last
        ([(0.5, [NONE]), (0.5, [TEXT]), (0.25, [NONE]), (0.25, [TEXT]), (4, [NONE])], 3, 1, [0.5], 1.5, 0.25),
        # several tokens in one piece: one gap, and the time per token by the server's count
        ([(1, [TEXT]), (2, [TEXT, TEXT])], 9, 1, [2], 3, 2 / 8),
        ([(1, [TEXT])], 1, 1, [], 1, None),
    ],
)
def test_definitions_by_a_clock_of_its_own(
    monkeypatch: pytest.MonkeyPatch, pieces: Any, tokens: int, ttft: float, itl: Any, e2el: float, tpot: Any
):
    """Each time is exact; what the server says of its tokens comes late, and nothing waits for it."""
    clock = [100.0]

    class Response:
        async def events(self) -> Any:
            for seconds, choices in pieces:
                clock[0] += seconds
                yield {"choices": choices}
            clock[0] += 7
            yield {"choices": [], "usage": {"completion_tokens": tokens}}

    @contextlib.asynccontextmanager
    async def request(*_: Any) -> Any:
        yield Response()

    parser = ArgumentParser()
    serve._add_options(parser)
    load = serve._Load(parser.parse_args([]), "m")
    monkeypatch.setattr(serve, "request", request)
    monkeypatch.setattr(serve.time, "perf_counter", lambda: clock[0])
    answer = asyncio.run(load.send(Sample("x", 1, tokens)))
    assert not answer.error
    assert (answer.ttft, answer.itl, answer.latency, answer.tpot, answer.output_len) == (ttft, itl, e2el, tpot, tokens)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_chunks_however_they_come(size: int) -> None:
    """Cut anywhere; a chunk that never ends is told apart from the end."""
    chunks = [b"data: {}\n\n", b"\r\n", b"x" * 300]
    whole = b"".join(b"%x;name=1\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"

    async def read(data: bytes) -> list[bytes]:
        reader = asyncio.StreamReader()
        response = Response(200, {"transfer-encoding": "chunked"}, reader)

        async def feed() -> None:
            for at in range(0, len(data), size):
                reader.feed_data(data[at : at + size])
                await asyncio.sleep(0)
            reader.feed_eof()

        feeding = asyncio.ensure_future(feed())
        found = [piece async for piece in response._pieces()]
        await feeding
        return found

    assert asyncio.run(read(whole)) == chunks
    with pytest.raises(asyncio.IncompleteReadError):
        asyncio.run(read(whole[:-20]))
