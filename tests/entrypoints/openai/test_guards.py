# SPDX-License-Identifier: Apache-2.0
"""What a client cannot do: be answered in anything but OpenAI's JSON, come in without a key, send without bound, reach
files or other hosts, leave work behind; and what it is told when the engine is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from http_server import ENGINE_ARGS, Server, serving, wait_until
from inline_engine import InlineEngine

from vllm.entrypoints.openai.api_server import Gate

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
LONG = {"prompt": "x", "max_tokens": 500, "ignore_eos": True}


def error_of(answer: httpx.Response) -> dict[str, Any]:
    body = answer.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == answer.status_code
    assert answer.headers["x-request-id"]
    return body["error"]


def image(kind: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": kind, kind: {"url": "file:///etc/passwd"}}]}]


BAD: list[tuple[str, dict[str, Any], int, str | None, str]] = [
    (COMPLETIONS, {}, 400, "prompt", "None"),
    (COMPLETIONS, {"prompt": []}, 400, "prompt", "give a string"),
    (COMPLETIONS, {"prompt": {"a": 1}}, 400, "prompt", "give a string"),
    (COMPLETIONS, {"prompt": [1, "a"]}, 400, "prompt", "give a string"),
    (COMPLETIONS, {"prompt": [1.5]}, 400, "prompt", "1.5"),
    (COMPLETIONS, {"prompt": [[1], [True]]}, 400, "prompt", "True"),
    (COMPLETIONS, {"prompt": [[]]}, 400, None, "empty"),
    (COMPLETIONS, {"prompt": [-1]}, 400, None, "-1"),
    (COMPLETIONS, {"prompt": [10**30]}, 400, None, "outside the model's vocabulary"),
    (COMPLETIONS, {"prompt": "x" * 600}, 400, None, "600 tokens"),
    (COMPLETIONS, {"prompt": "x", "model": "gpt-4"}, 404, "model", "gpt-4"),
    (COMPLETIONS, {"prompt": "x", "model": 5}, 400, "model", "string"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": -1}, 400, "max_tokens", "-1"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens", "echo"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": "many"}, 400, "max_tokens", "many"),
    (COMPLETIONS, {"prompt": "x", "temperature": -0.1}, 400, "temperature", "-0.1"),
    (COMPLETIONS, {"prompt": "x", "top_p": 0}, 400, "top_p", "0"),
    (COMPLETIONS, {"prompt": "x", "n": 0}, 400, "n", "n=0"),
    (COMPLETIONS, {"prompt": "x", "n": 2000, "seed": 1}, 400, "prompt", "1024"),
    (COMPLETIONS, {"prompt": ["x"] * 1025}, 400, "prompt", "1024"),
    (COMPLETIONS, {"prompt": "x", "n": 2, "temperature": 0}, 400, "n", "n=2"),
    (COMPLETIONS, {"prompt": "x", "logprobs": 1000}, 400, "logprobs", "max_logprobs"),
    (COMPLETIONS, {"prompt": "x", "logprobs": "yes"}, 400, "logprobs", "integer"),
    (COMPLETIONS, {"prompt": "x", "seed": 2**70}, 400, "seed", "seed"),
    (COMPLETIONS, {"prompt": "x", "stop": [1]}, 400, "stop", "string"),
    (COMPLETIONS, {"prompt": "x", "stop": [""]}, 400, "stop", "not empty"),
    (COMPLETIONS, {"prompt": "x", "stop": ["a"] * 2000}, 400, "stop", "1024"),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": [5000]}, 400, "stop_token_ids", "5000"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias", "no token ids"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": [1]}, 400, "logit_bias", "object"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, 400, "logit_bias", "1024"),
    (CHAT, {"messages": USER, "n": 2000, "seed": 1}, 400, "n", "1024"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"1": "x"}}, 400, "logit_bias", "'x'"),
    (COMPLETIONS, {"prompt": "x", "stream_options": {"include_usage": True}}, 400, "stream_options", "stream=true"),
    (COMPLETIONS, {"prompt": "x", "stream": True, "prompt_logprobs": 1}, 400, "prompt_logprobs", "stream"),
    (COMPLETIONS, {"prompt": "x", "data_parallel_rank": 9}, 400, "data_parallel_rank", "9"),
    (
        COMPLETIONS,
        {
            "prompt": "x",
            "allowed_token_ids": [95, 1],
            "min_tokens": 1,
            "bad_words": ['"'],
            "stop_token_ids": [95],
            "temperature": 0,
        },
        400,
        None,
        "no token can be drawn",
    ),
    (COMPLETIONS, {"prompt": "x", "best_of": 2}, 501, "best_of", "best_of=2"),
    (COMPLETIONS, {"prompt": "x", "priority": 1}, 501, "priority", "priority=1"),
    (COMPLETIONS, {"prompt": "x", "suffix": "y"}, 501, "suffix", "suffix"),
    (COMPLETIONS, {"prompt": "x", "use_beam_search": True}, 501, "use_beam_search", "leave it out"),
    (COMPLETIONS, {"prompt": "x", "prompt_embeds": "AAAA"}, 501, "prompt_embeds", "leave it out"),
    (CHAT, {}, 400, "messages", "give a list"),
    (CHAT, {"messages": []}, 400, "messages", "at least 1"),
    (CHAT, {"messages": "hi"}, 400, "messages", "array"),
    (CHAT, {"messages": [5]}, 400, "messages", "object"),
    (CHAT, {"messages": [{"content": "x"}]}, 400, None, "no chat message"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages", "content of type int"),
    (CHAT, {"messages": USER, "top_logprobs": 2}, 400, "top_logprobs", "logprobs=true"),
    (CHAT, {"messages": USER, "continue_final_message": True}, 400, "continue_final_message", "add_generation_prompt"),
    (CHAT, {"messages": USER, "chat_template": "{{ 7 }}"}, 400, "chat_template", "--trust-request-chat-template"),
    (
        CHAT,
        {"messages": USER, "chat_template_kwargs": {"chat_template": "x"}},
        400,
        "chat_template_kwargs",
        "chat_template",
    ),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"tokenize": True}}, 400, "chat_template_kwargs", "tokenize"),
    (CHAT, {"messages": image("image_url")}, 501, "messages", "image_url"),
    (CHAT, {"messages": image("input_audio")}, 501, "messages", "input_audio"),
    (CHAT, {"messages": image("video_url")}, 501, "messages", "video_url"),
    (CHAT, {"messages": USER, "modalities": ["audio"]}, 501, "modalities", "audio"),
    (CHAT, {"messages": USER, "audio": {"voice": "x"}}, 501, "audio", "leave it out"),
    ("/tokenize", {}, 400, "prompt", "either"),
    ("/tokenize", {"prompt": "x", "messages": USER}, 400, "prompt", "either"),
    ("/tokenize", {"messages": image("image_url")}, 501, "messages", "image_url"),
    ("/tokenize", {"messages": USER, "chat_template": "{{ 7 }}"}, 400, "chat_template", "--trust"),
    ("/detokenize", {"tokens": [10**30]}, 400, "tokens", "outside the vocabulary"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens", "outside the vocabulary"),
    ("/detokenize", {"tokens": "x"}, 400, "tokens", "array"),
]


@pytest.mark.parametrize(("path", "body", "status", "param", "words"), BAD)
def test_bad_requests(server: Server, path: str, body: dict[str, Any], status: int, param: str | None, words: str):
    can_stream = path.startswith("/v1") and "stream" not in body and "stream_options" not in body
    for asked in (body, {**body, "stream": True}) if can_stream else (body,):
        answer = server.http.post(path, json=asked)
        error = error_of(answer)
        assert (answer.status_code, error["param"]) == (status, param), error
        assert words in error["message"]
        # OpenAI's client asks again after errors of a server, but not here.
        assert answer.headers.get("x-should-retry") == ("false" if status == 501 else None)


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"null", 400),
        (b'"text"', 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b'{"prompt": "\xff\xfe"}', 400),
        (b'{"prompt": ' + b"[" * 100_000, 400),
        (b'{"temperature": NaN, "prompt": "x"}', 400),
        (b'{"prompt": "x", "logit_bias": {"' + b"9" * 5000 + b'": 1}}', 400),
        (b'{"prompt": "x", "stop": [' + b"1," * 200_000 + b"1]}", 400),
    ],
)
def test_bodies_that_are_no_request(server: Server, content: bytes, status: int):
    answer = server.http.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == status
    assert len(error_of(answer)["message"]) < 2100


def test_other_kinds_of_bodies(server: Server):
    answer = server.http.post(COMPLETIONS, data={"prompt": "x"})
    assert answer.status_code == 415
    assert "application/json" in error_of(answer)["message"]


def test_unknown_paths_and_methods(server: Server):
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("POST", "/nothing", 404),
        ("POST", "/", 405),
        ("GET", "/../etc/passwd", 404),
        ("GET", "/v1/models/other", 404),
        ("GET", COMPLETIONS, 405),
        ("DELETE", "/v1/models", 405),
    ):
        answer = server.http.request(method, path)
        assert answer.status_code == status, (method, path)
        error_of(answer)


def test_unknown_fields_are_told_once(server: Server, log: pytest.LogCaptureFixture):
    body = {"prompt": "x", "max_tokens": 1, "no_such_field": 1, "user": "me"}
    for _ in range(3):
        server.post(COMPLETIONS, body)
    assert sum("no_such_field" in record.getMessage() for record in log.records) == 1


def test_harmless_values_of_what_is_not_supported(server: Server):
    body = {
        "prompt": "x",
        "max_tokens": 1,
        "best_of": 1,
        "n": 1,
        "suffix": None,
        "priority": 0,
        "use_beam_search": False,
    }
    server.post(COMPLETIONS, {**body, "length_penalty": 1.0, "kv_transfer_params": None})


def test_request_ids(server: Server):
    for headers, fields, right in (
        ({"X-Request-Id": "mine-1"}, {}, "mine-1"),
        ({}, {"request_id": "mine-2"}, "mine-2"),
        ({"X-Request-Id": "mine-1"}, {"request_id": "mine-2"}, "mine-1"),
        ({"X-Request-Id": "no id"}, {"request_id": "ö"}, None),
    ):
        answer = server.http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1, **fields}, headers=headers)
        shown = answer.headers["x-request-id"]
        assert answer.json()["id"] == f"cmpl-{shown}"
        assert shown == right if right else len(shown) == 32
    assert server.http.get("/version", headers={"X-Request-Id": "v"}).headers["x-request-id"] == "v"
    # Two clients may say the same at once.
    with serving_clients(server, 4) as ask:
        answers = ask({"prompt": "x", "max_tokens": 20, "ignore_eos": True}, {"X-Request-Id": "same"})
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [20] * 4


@contextlib.contextmanager
def serving_clients(server: Server, count: int) -> Any:
    """A function that sends one body ``count`` times at once."""

    def ask(body: dict[str, Any], headers: dict[str, str]) -> list[Any]:
        async def run() -> list[Any]:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
                answers = await asyncio.gather(
                    *(http.post(COMPLETIONS, json=body, headers=headers) for _ in range(count))
                )
                return [answer.json() for answer in answers]

        return asyncio.run(run())

    yield ask


def test_ranks_by_header(server: Server):
    body = {"prompt": "x", "max_tokens": 1}
    for header, status in (("0", 200), ("3", 400), ("x", 400), ("-1", 400), ("1" * 99, 400)):
        answer = server.http.post(COMPLETIONS, json=body, headers={"X-data-parallel-rank": header})
        assert answer.status_code == status, header


# --- who may call


def test_api_keys(engine: InlineEngine):
    with serving(engine, api_key=["first", "zweiter-ö"]) as server:
        paths = [("POST", COMPLETIONS), ("POST", CHAT), ("GET", "/v1/models"), ("POST", "/tokenize")]
        paths += [("POST", "/detokenize"), ("GET", "/nothing"), ("GET", "//health"), ("GET", "/health/")]
        for method, path in paths:
            for given in (
                None,
                "",
                "Bearer",
                "Bearer firs",
                "Bearer first1",
                "Basic first",
                "first",
                "bearer",
            ):
                headers = {} if given is None else {"Authorization": given}
                answer = server.http.request(method, server.url + path, headers=headers)
                assert answer.status_code == 401, (path, given)
                error_of(answer)
                assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/ping", "/version"):
            assert server.http.get(path).status_code == 200
        for key in ("first", "zweiter-ö"):
            for scheme in ("Bearer", "bearer"):
                headers = {b"Authorization": f"{scheme} {key}".encode()}
                assert server.http.get("/v1/models", headers=headers).status_code == 200
        with openai.OpenAI(base_url=server.url + "/v1", api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                client.models.list()


def test_the_key_of_the_environment(engine: InlineEngine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_API_KEY", "of-the-environment")
    with serving(engine) as server:
        assert server.http.get("/v1/models").status_code == 401
        headers = {"Authorization": "Bearer of-the-environment"}
        assert server.http.get("/v1/models", headers=headers).status_code == 200
    with pytest.raises(ValueError, match="empty key"):
        with serving(engine, api_key=["good", ""]):
            pass


def test_keys_are_compared_whole(monkeypatch: pytest.MonkeyPatch):
    """Each of them, by digests of equal length, whatever was given and whether one has matched."""
    from vllm.entrypoints.openai import api_server

    compared = []
    monkeypatch.setattr(api_server.hmac, "compare_digest", lambda a, b: bool(compared.append((a, b))) or a == b)
    gate = Gate(app=None, keys=["a", "b" * 100], state=None)  # type: ignore[arg-type]
    gate._check_key({"path": "/v1/models", "headers": [(b"authorization", b"Bearer a")]})
    assert [(len(a), len(b)) for a, b in compared] == [(32, 32)] * 2


def test_origins(engine: InlineEngine):
    with serving(engine, allowed_origins=["https://good.example"], api_key=["k"]) as server:
        asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
        good = server.http.options(COMPLETIONS, headers={"Origin": "https://good.example", **asks})
        assert good.status_code == 200
        assert good.headers["access-control-allow-origin"] == "https://good.example"
        bad = server.http.options(COMPLETIONS, headers={"Origin": "https://bad.example", **asks})
        assert "access-control-allow-origin" not in bad.headers
        refused = server.http.get("/v1/models", headers={"Origin": "https://good.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://good.example"


# --- how much may come


def test_size_of_bodies(engine: InlineEngine):
    with serving(engine, max_request_body_size=2000) as server:
        body = json.dumps({"prompt": "x", "max_tokens": 1, "user": "u" * 2000}).encode()
        headers = {"Content-Type": "application/json"}

        def pieces() -> Any:
            for start in range(0, len(body), 100):
                yield body[start : start + 100]

        for content in (body, pieces()):
            with contextlib.suppress(httpx.WriteError):
                answer = server.http.post(COMPLETIONS, content=content, headers=headers)
                assert answer.status_code == 413
                assert "--max-request-body-size" in error_of(answer)["message"]
        small = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
        assert server.http.post(COMPLETIONS, content=small, headers=headers).status_code == 200


def test_bodies_that_do_not_come(engine: InlineEngine):
    with serving(engine, request_body_timeout=0.2) as server:
        address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
        with socket.create_connection(address, timeout=30) as client:
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
            client.sendall(head.encode() + b"{")
            assert client.recv(100).startswith(b"HTTP/1.1 408")


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the kernel has no TCP_USER_TIMEOUT")
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_does_not_read(engine: InlineEngine, stream: bool):
    """Its request ends, be it before the tokens do, and so does its connection with all that waits for it."""
    engine.aborted.clear()
    with (
        serving(engine, response_write_timeout=0.3) as server,
        socket.socket() as client,
        contextlib.ExitStack() as steps,
    ):
        steps.enter_context(engine.stopping_after(40))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        client.settimeout(30)
        client.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        content = json.dumps({**LONG, "stream": stream, "logprobs": 5}).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
        client.sendall(f"{head}{len(content)}\r\n\r\n".encode() + content)
        if stream:  # the engine stands still with more written than the client takes
            wait_until(lambda: engine.aborted, "the request was not aborted")
        else:
            wait_until(lambda: server.http.get("/load").json() == {"server_load": 1}, "the request has not begun")
            steps.close()
            wait_until(lambda: server.http.get("/load").json() == {"server_load": 0}, "the request has not ended")
            own = client.getsockname()
            wait_until(lambda: own not in {c.client for c in list(server.connections)}, "its connection has not ended")
        with pytest.raises(ConnectionResetError):
            client.makefile("rb").read()


def test_size_of_headers(server: Server):
    with contextlib.suppress(httpx.TransportError):  # where the server closes before all of them were sent
        assert server.http.get("/health", headers={"X": "y" * 1_000_000}).status_code in (400, 431)
    assert server.http.get("/health").status_code == 200


def test_sequences_of_a_request(engine: InlineEngine):
    with serving(engine, max_sequences_per_request=4) as server:
        server.post(COMPLETIONS, {"prompt": ["x", "y"], "n": 2, "seed": 1, "max_tokens": 1})
        server.post(COMPLETIONS, {"prompt": ["x", "y", "z"], "n": 2, "seed": 1, "max_tokens": 1}, status=400)


# --- templates of clients


def test_templates_of_clients_are_sandboxed(engine: InlineEngine, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("seven")
    with serving(engine, trust_request_chat_template=True) as server:
        ids = server.post("/tokenize", {"messages": USER, "chat_template": "{{ messages[0].content }}!"})["tokens"]
        assert server.post("/detokenize", {"tokens": ids})["prompt"] == "hi!"
        for template in (
            str(secret),
            "{% include '" + str(secret) + "' %}",
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
            "{{ messages.append(1) }}",
        ):
            answer = server.http.post("/tokenize", json={"messages": USER, "chat_template": template})
            if answer.status_code == 200:
                prompt = server.post("/detokenize", {"tokens": answer.json()["tokens"]})["prompt"]
                assert prompt == template, "a path is text"
            else:
                assert answer.status_code == 400, answer.text
                assert "seven" not in answer.text


# --- clients that leave


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, LONG),
        (COMPLETIONS, {**LONG, "prompt": ["x", "y", "z"], "n": 2, "seed": 0}),
        (CHAT, {"messages": USER, "max_tokens": 500, "ignore_eos": True}),
    ],
)
def test_a_client_that_leaves(server: Server, engine: InlineEngine, stream: bool, path: str, body: dict[str, Any]):
    """Its requests are dropped before the next step: the engine stands still until the abort has come."""
    count = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    steps = []
    engine.aborted.clear()
    with httpx.Client(base_url=server.url, timeout=60) as http, engine.stopping_after(20):
        if stream:
            with http.stream("POST", path, json={**body, "stream": True}) as answer:
                next(answer.iter_bytes())
                with engine.held():
                    answer.close()
                    wait_until(lambda: len(engine.aborted) == count, "the requests were not aborted")
                    steps.append(engine.call(lambda llm: llm.stats.steps))
        else:
            sock = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=30)
            content = json.dumps(body).encode()
            head = (
                f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
            )
            sock.sendall(f"{head}\r\n\r\n".encode() + content)
            wait_until(lambda: engine.call(lambda llm: llm.get_num_unfinished_requests()) == count, "not begun")
            with engine.held():
                sock.close()
                wait_until(lambda: len(engine.aborted) == count, "the requests were not aborted")
                steps.append(engine.call(lambda llm: llm.stats.steps))
    engine.check_idle()
    assert engine.call(lambda llm: llm.stats.steps) == steps[0], "a step ran for a client that has gone"
    wait_until(lambda: server.http.get("/load").json() == {"server_load": 0}, "a request is still in work")


def test_one_bad_prompt_ends_the_others(server: Server, engine: InlineEngine, monkeypatch: pytest.MonkeyPatch):
    """An error that only the engine finds, after some prompts have begun."""
    generate = engine.generate

    def refusing(prompt: Any, *args: Any, **kwargs: Any) -> Any:
        if prompt["prompt"] == "bad":
            prompt = {"prompt_token_ids": [10**6]}
        return generate(prompt, *args, **kwargs)

    monkeypatch.setattr(engine, "generate", refusing)
    for fields in ({}, {"n": 2, "seed": 1}):
        body = {**LONG, "prompt": ["good", "bad", "fine"], **fields}
        answer = server.post(COMPLETIONS, body, status=400)
        assert "outside the model's vocabulary" in answer["error"]["message"]
        engine.check_idle()


# --- the engine is lost


def test_the_loss_of_the_engine(char_llama: Path):
    engine = InlineEngine(str(char_llama), **ENGINE_ARGS)
    with serving(engine) as server:
        assert server.http.get("/health").status_code == 200
        seen: dict[str, Any] = {}

        def stream() -> None:
            with httpx.stream("POST", server.url + COMPLETIONS, json={**LONG, "stream": True}, timeout=60) as answer:
                seen["status"] = answer.status_code
                seen["events"] = []
                for line in answer.iter_lines():
                    if line:
                        seen["events"].append(line)

        def whole() -> None:
            seen["whole"] = httpx.post(server.url + COMPLETIONS, json=LONG, timeout=60)

        threads = [threading.Thread(target=target) for target in (stream, whole)]
        with engine.stopping_after(20):
            with engine.held():
                for thread in threads:
                    thread.start()
                wait_until(lambda: engine.call(lambda llm: llm.get_num_unfinished_requests()) == 2, "not begun")
            wait_until(lambda: len(seen.get("events", ())) > 3, "the stream has not begun")
            engine.die("rank 3 (pid 77) was killed by SIGKILL")
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        *_, error, end = seen["events"]
        assert seen["status"] == 200
        assert end == "data: [DONE]"
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == 503
        assert "rank 3 (pid 77)" in error
        answers = [seen["whole"], server.http.get("/health"), server.http.post(COMPLETIONS, json=LONG)]
        answers.append(server.http.post(COMPLETIONS, json={**LONG, "stream": True}))
        for answer in answers:
            assert answer.status_code == 503
            assert "rank 3 (pid 77)" in error_of(answer)["message"]
        assert server.http.get("/version").status_code == 200
    engine.shutdown()


def test_faults_of_the_server_are_not_shown(
    server: Server, engine: InlineEngine, monkeypatch: pytest.MonkeyPatch, log: Any
):
    def fail(*_args: Any, **_kwargs: Any) -> Any:
        raise KeyError("/some/path of ours")

    monkeypatch.setattr(engine, "generate", fail)
    for body in (LONG, {**LONG, "stream": True}):
        answer = server.http.post(COMPLETIONS, json=body)
        assert answer.status_code == 500
        assert error_of(answer)["type"] == "InternalServerError"
        assert "/some/path" not in answer.text
    assert "/some/path" in log.text
