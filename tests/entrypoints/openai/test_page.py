# SPDX-License-Identifier: Apache-2.0
"""The page at ``/``, and the paths beside it: what ranks do, told and shown; in a browser where one is installed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import browser
import httpx
import live
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client.parser import text_string_to_metric_families

from vllm.entrypoints.openai.watch import PAGE, content_security_policy, describe_ranks, watch_router
from vllm.v1.metrics.engine_metrics import EngineMetrics

MARKUP = "</span><img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>&lt;b&gt;"
WORDS = ["The", " ranks", " keep", " step", ", ", "and ", MARKUP, " stays", " text."]


def report(**counts: float) -> dict[str, float]:
    names = """step running waiting kv_usage kv_blocks steps dummy_steps real_rows padded_rows wait_seconds
        prompt_tokens generation_tokens prefix_queries prefix_hits preemptions corrupted"""
    return dict.fromkeys(names.split(), 0) | counts


class Ranks:
    """What ``watch_router`` asks of an engine of two DP ranks of two TP ranks, as the test sets it."""

    def __init__(self) -> None:
        self.vllm_config: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(
                tensor_parallel_size=2, data_parallel_size=2, world_size=4, enable_expert_parallel=True
            ),
            model_config=SimpleNamespace(max_model_len=512),
            cache_config=SimpleNamespace(block_size=16),
        )
        self.metrics = EngineMetrics()
        self.errored, self.dead_error = False, None
        self.rank_waits: dict[int, list[int]] = {}
        self.rank_stats = [report(), report()]


def states(ranks: Ranks) -> list[tuple[str, list[int]]]:
    return [(rank["state"], rank["waits_for"]) for rank in describe_ranks(ranks, "m")["ranks"]]


def test_states_of_ranks():
    ranks = Ranks()
    assert states(ranks) == [("idle", []), ("idle", [])]
    ranks.rank_stats[0] = report(running=3, waiting=1)
    assert states(ranks) == [("running", []), ("dummy", [])]
    ranks.rank_stats[1] = report(waiting=2)
    assert states(ranks) == [("running", []), ("queued", [])]
    # All are held up by 3; that 0 and 1 wait for 2 as well is no news, as 2 does not move before 3 does.
    ranks.rank_waits = {0: [2, 3], 1: [2, 3, 0], 2: [3], 3: []}
    assert states(ranks) == [("waiting", [3]), ("waiting", [3])]
    ranks.rank_waits = {0: [1], 1: [2], 2: [3], 3: []}
    assert states(ranks) == [("waiting", [3]), ("waiting", [3])]
    ranks.rank_waits = {0: [2], 1: [], 2: [0], 3: []}
    assert states(ranks) == [("waiting", [0, 2]), ("waiting", [0, 2])], "a circle is told whole"
    ranks.errored, ranks.dead_error = True, RuntimeError("rank 3 is gone")
    assert states(ranks) == [("dead", []), ("dead", [])]
    told = describe_ranks(ranks, "m")
    assert told["dead"] == "rank 3 is gone"
    assert [rank["places"] for rank in told["ranks"]] == [[0, 1], [2, 3]]
    assert told["layout"] == "TP 2 · DP 2 · experts over all"


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]


def test_the_page_asks_for_nothing_else():
    text = PAGE.read_text()
    tags = _Tags()
    tags.feed(text)
    assert not [a for a in tags.attributes if a[1] in ("src", "href", "style", "srcset") or a[1].startswith("on")]
    assert "innerHTML" not in text
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text
    assert "@import" not in text
    assert "eval(" not in text
    policy = content_security_policy(text)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "*" not in policy


def make_app(ranks: Ranks, asked: list[tuple[dict[str, str], dict[str, Any]]]) -> FastAPI:
    app = FastAPI()
    app.include_router(watch_router(ranks, "a/model<b>"))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        body = await request.json()
        asked.append((dict(request.headers), body))
        if request.headers.get("authorization") != "Bearer k":
            error = {"message": "no <i>key</i>", "type": "AuthenticationError", "param": None, "code": 401}
            return JSONResponse({"error": error}, 401)

        async def stream() -> Any:
            for word in WORDS:
                yield f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': word}}]})}\n\n"
                await asyncio.sleep(0.01)
            if body["messages"][-1]["content"] == "for ever":
                await asyncio.sleep(60)
            yield f"data: {json.dumps({'choices': [{'index': 0, 'delta': {}, 'finish_reason': 'length'}]})}\n\n"
            yield f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': 9}})}\n\ndata: [DONE]\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    return app


@pytest.fixture
def served() -> Iterator[tuple[Ranks, list[Any], str]]:
    ranks, asked = Ranks(), list[Any]()
    with live.serving(make_app(ranks, asked)) as url:
        yield ranks, asked, url + "/"


def test_paths(served: tuple[Ranks, list[Any], str]):
    ranks, _, url = served
    ranks.rank_stats = [report(running=2, waiting=1, padded_rows=4, step=9), report(running=1, step=9)]
    with httpx.Client(base_url=url) as client:
        page = client.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.headers["content-security-policy"] == content_security_policy(page.text)
        assert page.headers["x-content-type-options"] == "nosniff"
        told = client.get("/ranks").json()
        assert [rank["step"] for rank in told["ranks"]] == [9, 9]
        metrics = client.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain; version=")
        samples = {
            (s.name, s.labels.get("engine")): s
            for family in text_string_to_metric_families(metrics.text)
            for s in family.samples
        }
        running = samples["vllm:num_requests_running", "1"]
        assert (running.value, running.labels["model_name"]) == (1, "a/model<b>")
        assert samples["vllm:padded_rows_total", "0"].value == 4


CHROMIUM = browser.find()
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason=f"no browser: none of {', '.join(browser.NAMES)} is on PATH"
)


@needs_browser
def test_in_a_browser(served: tuple[Ranks, list[Any], str], tmp_path: Path):
    assert CHROMIUM is not None
    ranks, asked, url = served
    busy = report(running=12, waiting=3, kv_usage=0.41, step=1840, steps=1840, real_rows=41000, padded_rows=900)
    ranks.rank_stats = [busy, report(step=1840, steps=1840, dummy_steps=700, real_rows=9000, padded_rows=6000)]
    with browser.Browser(CHROMIUM) as page:
        page.show(1180, 860)
        page.go(url)
        page.until("document.querySelectorAll('#ranks tr').length === 2")
        row = "[...document.querySelectorAll('#ranks tr')].map(r => r.innerText.replace(/\\s+/g, ' '))"
        first, second = page.evaluate(row)
        assert "running" in first
        assert "1840 12 3 41%" in first
        assert "dummy" in second
        assert "40%" in second
        assert page.evaluate("document.getElementById('model').textContent") == "a/model<b>"
        assert page.evaluate("document.querySelectorAll('b').length") == 4, "the name became markup"
        ranks.rank_stats[0] = {**busy, "generation_tokens": 500, "step": 1841}
        ranks.rank_waits = {0: [2], 1: [2, 3]}
        page.until("document.body.innerText.includes('for rank 2, rank 3')")
        page.until("document.body.innerText.includes('1841')")

        # By keyboard alone: a wrong key is an error in words, with the right one the answer comes.
        page.evaluate("document.getElementById('message').focus()")
        page.type("Who waits?")
        page.press("Enter")
        page.until("document.querySelector('.wrong')?.innerText.includes('no <i>key</i>')")
        page.evaluate("document.getElementById('key').focus()")
        page.type("k")
        page.evaluate("document.getElementById('message').focus()")
        page.type("Who waits?\n")
        page.press("Enter", shift=True)
        page.type("<b>now</b>")
        page.press("Enter")
        answer = page.until("[...document.querySelectorAll('.said')].at(-1).innerText.includes('ended by length')")
        answer = page.evaluate("[...document.querySelectorAll('.said')].at(-1).children[2].textContent")
        assert answer == "".join(WORDS)
        assert page.evaluate("document.querySelectorAll('img, .said b, #log script').length") == 0
        assert page.evaluate("document.title") == "a/model<b> · vLLM ranks"
        headers, body = asked[-1]
        assert headers["authorization"] == "Bearer k"
        assert body["messages"] == [{"role": "user", "content": "Who waits?\n\n<b>now</b>"}]
        assert body["stream"] is True
        assert body["max_tokens"] == 256

        # Escape ends an answer that does not end by itself; the next one is asked with the talk so far, of rank 1.
        page.type("for ever")
        page.press("Enter")
        page.until("[...document.querySelectorAll('.said')].at(-1).innerText.includes('stays text.')")
        page.press("Escape")
        page.until("[...document.querySelectorAll('.said')].at(-1).innerText.includes('stopped')")
        page.evaluate("document.getElementById('rank').value = '1'")
        page.type("again")
        page.press("Enter")
        page.until("[...document.querySelectorAll('.said')].at(-1).innerText.includes('ended by length')")
        assert [m["role"] for m in asked[-1][1]["messages"]] == ["user", "assistant"] * 2 + ["user"]
        assert asked[-1][0]["x-data-parallel-rank"] == "1"
        # The key is nowhere but in its field.
        assert page.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0

        pictures = {
            (width, dark): (
                page.show(width, height, dark),
                page.picture(tmp_path / f"page-{width}{'-dark' * dark}.png"),
            )[1]
            for width, height in ((1180, 860), (390, 844))
            for dark in (False, True)
        }
        assert len(set(pictures.values())) == 4
        assert min(map(len, pictures.values())) > 10_000
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, "it is wider than a telephone"
        ranks.errored, ranks.dead_error = True, RuntimeError("rank 3 <b>is gone</b>")
        page.until("document.querySelector('#reason').innerText === 'rank 3 <b>is gone</b>'")
        assert not [m for m in page.messages if "401" not in m], page.messages
