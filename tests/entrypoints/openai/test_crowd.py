# SPDX-License-Identifier: Apache-2.0
"""Many clients at once, and bodies of any kind: right texts, no fault, nothing left."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import ENGINE_ARGS, Server, wait_until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inline_engine import InlineEngine

from vllm import LLM, SamplingParams
from vllm.entrypoints.openai.cli_args import FrontendArgs

NUM_CLIENTS, REQUESTS_EACH = 64, 2


def drawn_request(rng: random.Random) -> dict[str, Any]:
    prompt = "".join(rng.choices("abcdefgh ", k=rng.choice((1, 3, 20, 90))))
    fields: dict[str, Any] = {"max_tokens": rng.randint(1, 30), "ignore_eos": True}
    fields |= {"temperature": 0} if rng.random() < 0.5 else {"seed": rng.randrange(1000), "n": rng.choice((1, 1, 2))}
    return {"prompt": prompt, **fields}


async def one_request(http: httpx.AsyncClient, request: dict[str, Any], right: list[str], rng: random.Random) -> str:
    """How it ended."""
    kind = rng.random()
    if kind < 0.05:
        answer = await http.post("/v1/completions", json={**request, "top_p": 7})
        assert answer.status_code == 400, answer.text
        return "bad"
    if kind < 0.35:
        answer = await http.post("/v1/completions", json=request)
        assert [choice["text"] for choice in answer.json()["choices"]] == right
        return "whole"
    if kind < 0.45:
        try:
            await asyncio.wait_for(http.post("/v1/completions", json=request), rng.random() / 20)
        except asyncio.TimeoutError:
            return "left"
        return "whole"
    leaves_after = rng.randint(1, 8) if kind < 0.65 else 10**9
    texts = [""] * len(right)
    async with http.stream("POST", "/v1/completions", json={**request, "stream": True}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                texts[choice["index"]] += choice["text"]
                leaves_after -= 1
            if not leaves_after:
                assert all(whole.startswith(text) for whole, text in zip(right, texts, strict=True))
                return "left"
    assert texts == right
    return "streamed"


@pytest.mark.usefixtures("nan_poison")
def test_a_crowd(server: Server, engine: InlineEngine, char_llama: Path):
    """64 clients with two requests each, of which some are bad and some are left: each text is ``LLM.generate``'s."""
    rng = random.Random(20)
    requests = [[drawn_request(rng) for _ in range(REQUESTS_EACH)] for _ in range(NUM_CLIENTS)]
    every = [request for of_one in requests for request in of_one]
    llm = LLM(str(char_llama), **ENGINE_ARGS)
    params = [SamplingParams(**{k: v for k, v in request.items() if k != "prompt"}) for request in every]
    outputs = llm.generate([request["prompt"] for request in every], params, use_tqdm=False)
    llm.shutdown()
    right = iter([[completion.text for completion in output.outputs] for output in outputs])
    rights = [[next(right) for _ in of_one] for of_one in requests]

    async def client(number: int) -> list[str]:
        mine = random.Random(number)
        # As many connections as it likes: one whose request is cancelled while it is made may stay taken for ever.
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
            ends = []
            for request, texts in zip(requests[number], rights[number], strict=True):
                await asyncio.sleep(mine.random() / 20)
                ends.append(await one_request(http, request, texts, mine))
            return ends

    async def run() -> list[str]:
        return [end for ends in await asyncio.gather(*map(client, range(NUM_CLIENTS))) for end in ends]

    ends = asyncio.run(run())
    assert {"bad", "whole", "left", "streamed"} == set(ends)
    assert ends.count("left") >= 10
    wait_until(lambda: server.http.get("/load").json() == {"server_load": 0}, "who left is still in work")


# --- bodies of any kind

_JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 2, 7, 100, 2**31, 2**63, 10**40]),
    st.sampled_from([0.0, 1.0, 0.5, -1.5, 1e-320, 1e-30, 1e30, 1e308]),
    st.text(max_size=4),
    st.sampled_from([[], {}, [1], ["a"], [None], [[1]], {"a": 1}, {"1": 2}, {"type": "text"}, [{}], [{"a": []}]]),
    st.recursive(
        st.none() | st.integers(-9, 99) | st.text(max_size=2),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=5,
    ),
)
_GOOD: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 3),
    "temperature": st.sampled_from([0, 0.7, 1e-9, 1e300]),
    "top_p": st.sampled_from([1e-300, 0.5, 1]),
    "top_k": st.sampled_from([-1, 0, 1, 50, 10**30]),
    "min_p": st.sampled_from([0, 1e-300, 0.5, 1]),
    "seed": st.integers(-(2**63), 2**64 - 1),
    "stop": st.lists(st.text(min_size=1, max_size=3), max_size=3) | st.text(min_size=1, max_size=2),
    "stop_token_ids": st.lists(st.integers(0, 97), max_size=4),
    "repetition_penalty": st.sampled_from([1e-300, 0.5, 1, 2, 1e300]),
    "presence_penalty": st.sampled_from([-2, 0, 2]),
    "frequency_penalty": st.sampled_from([-2, 0, 2]),
    "logit_bias": st.dictionaries(st.integers(0, 97).map(str), st.sampled_from([-100, 0.5, 1e300]), max_size=3),
    "allowed_token_ids": st.lists(st.integers(0, 97), min_size=1, max_size=3),
    "bad_words": st.lists(st.text(min_size=1, max_size=2), max_size=2),
    "min_tokens": st.integers(0, 3),
    "ignore_eos": st.booleans(),
    "echo": st.booleans(),
    "logprobs": st.integers(0, 3) | st.booleans(),
    "top_logprobs": st.integers(0, 3),
    "prompt_logprobs": st.integers(-1, 2),
    "truncate_prompt_tokens": st.sampled_from([-1, 1, 2, 10**30]),
    "return_token_ids": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
    "add_generation_prompt": st.booleans(),
    "continue_final_message": st.booleans(),
    "chat_template_kwargs": st.dictionaries(st.text(min_size=1, max_size=3), st.integers(), max_size=2),
    "data_parallel_rank": st.sampled_from([0, 1, None]),
    "skip_special_tokens": st.booleans(),
}
_OTHER = [
    "model",
    "max_completion_tokens",
    "documents",
    "request_id",
    "priority",
    "user",
    "add_special_tokens",
    "suffix",
]
_MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": st.text(max_size=5)}),
    max_size=2,
)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    path = draw(st.sampled_from(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]))
    prompts = st.one_of(st.text(max_size=8), st.lists(st.integers(0, 97), max_size=4), st.lists(st.text(max_size=3)))
    body: dict[str, Any] = {"prompt": draw(prompts), "max_tokens": draw(st.integers(0, 3))}
    if path != "/v1/completions" and draw(st.booleans()):
        body = {"messages": draw(_MESSAGES), "max_tokens": draw(st.integers(1, 3))}
    body |= draw(st.fixed_dictionaries({}, optional={"stream": st.booleans(), "tokens": st.lists(st.integers(-1, 99))}))
    for name in draw(st.lists(st.sampled_from(sorted(_GOOD)), max_size=5, unique=True)):
        body[name] = draw(_GOOD[name])
    junk = st.dictionaries(
        st.sampled_from([*_GOOD, *_OTHER, "prompt", "messages", "stream", "tools"]), _JUNK, max_size=2
    )
    return path, {**body, **(draw(junk) if draw(st.booleans()) else {})}


@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(request=bodies())
def test_bodies_of_any_kind(server: Server, engine: InlineEngine, request: tuple[str, dict[str, Any]]):
    """None is a fault of the server, whatever it asks, and the engine goes on."""
    path, body = request
    answer = server.http.post(path, json=body)
    assert answer.status_code in (200, 400, 404, 501), (path, body, answer.text)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["message"]
        assert error["code"] == answer.status_code
    elif "text/event-stream" in answer.headers["content-type"]:
        assert answer.text.endswith("data: [DONE]\n\n")
        errors = [line for line in answer.text.splitlines() if line.startswith('data: {"error"')]
        assert all('"code":400' in line for line in errors)
    assert server.http.get("/health").status_code == 200


def test_options():
    parser = FrontendArgs.add_cli_args(argparse.ArgumentParser())
    assert FrontendArgs.from_cli_args(parser.parse_args([])) == FrontendArgs()
    given_args = parser.parse_args(
        [
            "--port",
            "9",
            "--api-key",
            "a",
            "b",
            "--allowed-origins",
            '["x"]',
            "--allow-credentials",
            "--host",
            "h",
            "--request-body-timeout",
            "2.5",
            "--default-chat-template-kwargs",
            '{"enable_thinking": false}',
        ]
    )
    assert FrontendArgs.from_cli_args(given_args) == FrontendArgs(
        port=9,
        api_key=["a", "b"],
        allowed_origins=["x"],
        allow_credentials=True,
        host="h",
        request_body_timeout=2.5,
        default_chat_template_kwargs={"enable_thinking": False},
    )
    assert "token_id:N" in parser.format_help()
