# SPDX-License-Identifier: Apache-2.0
"""The HTTP server in front of an engine: paths, who may call, what happens when a client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import runpy
import socket
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Iterable
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from vllm import __version__, envs
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.cli_args import FrontendArgs
from vllm.entrypoints.openai.errors import APIError, as_api_error
from vllm.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from vllm.entrypoints.openai.serving import Job, Serving, clean_id, with_errors
from vllm.entrypoints.openai.serving_chat import ServingChat
from vllm.entrypoints.openai.serving_completion import ServingCompletion
from vllm.entrypoints.openai.serving_responses import ResponsesRequest, ServingResponses
from vllm.entrypoints.openai.watch import watch_router
from vllm.inputs import check_text
from vllm.logger import init_logger

logger = init_logger(__name__)

_T = TypeVar("_T")
_Body = TypeVar("_Body", bound=BaseModel)

# Probes and scrapers have no key, and learn nothing of anyone's text.
OPEN_PATHS = {"/health", "/ping", "/version", "/metrics", "/", "/ranks"}


class ClientLeft(Exception):
    """Nobody waits for the answer."""


class Gate:
    """What every request goes through: its id, its key, the count of those in work; whatever fails becomes JSON.

    Adds to the scope: ``vllm.request_id``, the client's ``X-Request-Id`` or None until one is made.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], state: Any) -> None:
        self.app, self.state = app, state
        self._keys = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope["vllm.request_id"] = clean_id(headers.get("x-request-id"))
        begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                request_id = scope["vllm.request_id"] or uuid.uuid4().hex
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        self.state.server_load += 1
        try:
            self._check_key(scope)
            await self.app(scope, receive, send_with_id)
        except ClientLeft:
            pass
        except Exception as error:
            if begun:
                raise
            await as_api_error(error).response()(scope, receive, send_with_id)
        finally:
            self.state.server_load -= 1

    def _check_key(self, scope: Scope) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if not self._keys or path in OPEN_PATHS:
            return
        scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        digest = hashlib.sha256(given.strip()).digest()
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        if not any(matches) or scheme.lower() != b"bearer":
            raise APIError(401, "give the server's API key as the header 'Authorization: Bearer KEY'")


async def _left(receive: Receive) -> None:
    """Returns when the client has gone; the request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_left(receive: Receive, work: Awaitable[_T]) -> _T:
    """The result of ``work``, which is cancelled when the client leaves; then ``ClientLeft``."""
    task, left = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeft
    finally:
        for one in (task, left):
            one.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


class EventStream(Response):
    """Server-sent events, until their end or until the client leaves. Begins with the first event, so an error before
    that is an answer of its own."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.headers["content-type"] = "text/event-stream; charset=utf-8"
        self.events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_left(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        begun = False
        async with contextlib.aclosing(self.events):
            async for event in self.events:
                if not begun:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    begun = True
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def read_body(raw: Request, kind: type[_Body]) -> _Body:
    """The checked body of a request."""
    args: FrontendArgs = raw.app.state.args
    media = raw.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):
        raise APIError(415, f"the body is {media[:100]!r}; send JSON, with the header 'Content-Type: application/json'")
    limit = args.max_request_body_size
    too_large = APIError(413, f"the body has more than {limit} bytes (--max-request-body-size); send less")
    with contextlib.suppress(ValueError):
        if int(raw.headers.get("content-length", "0")) > limit:
            raise too_large

    async def read() -> bytes:
        body = bytearray()
        async for piece in raw.stream():
            body += piece
            if len(body) > limit:
                raise too_large
        return bytes(body)

    try:
        body = await asyncio.wait_for(read(), args.request_body_timeout)
    except asyncio.TimeoutError:
        raise APIError(408, f"the body did not come in {args.request_body_timeout} s") from None
    return kind.model_validate_json(body)


def build_app(engine: EngineClient, args: FrontendArgs) -> FastAPI:
    """The application. ``engine`` is started and ended by who made it."""
    serving = Serving(engine, args)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        yield
        serving.shutdown()

    app = FastAPI(version=__version__, docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.args, app.state.engine, app.state.serving, app.state.server_load = args, engine, serving, 0
    completion, chat = ServingCompletion(serving), ServingChat(serving)
    created = int(time.time())

    async def complete(raw: Request, request: Any, how: Any) -> Response:
        job: Job = await how.make_job(raw, request)
        if request.stream:
            return EventStream(with_errors(how.chunks(request, job)))
        return JSONResponse(await until_left(raw.receive, how.answer(request, job)))

    @app.post("/v1/completions")
    async def completions(raw: Request) -> Response:
        return await complete(raw, await read_body(raw, CompletionRequest), completion)

    @app.post("/v1/chat/completions")
    async def chat_completions(raw: Request) -> Response:
        return await complete(raw, await read_body(raw, ChatCompletionRequest), chat)

    responses = ServingResponses(chat)

    @app.post("/v1/responses")
    async def create_response(raw: Request) -> Response:
        request = await read_body(raw, ResponsesRequest)
        job = await responses.make_job(raw, request)
        if request.stream:
            return EventStream(responses.chunks(request, job))
        return JSONResponse(await until_left(raw.receive, responses.answer(request, job)))

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "vllm",
            "root": serving.model_config.model,
            "parent": None,
            "max_model_len": serving.model_config.max_model_len,
            "permission": [],
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [card(name) for name in serving.model_names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return JSONResponse(card(serving.check_model(name)))

    @app.get("/health")
    async def health() -> Response:
        await engine.check_health()
        return Response()

    @app.get("/ping")
    @app.post("/ping")
    async def ping() -> Response:
        return await health()

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @app.get("/load")
    async def load() -> Response:
        return JSONResponse({"server_load": app.state.server_load - 1})  # without this request

    _add_tokenize(app, serving)
    app.include_router(watch_router(engine, serving.model_names[0]))

    async def show(raw: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    for kind in (HTTPException, APIError):
        app.add_exception_handler(kind, show)
    app.add_middleware(Gate, keys=_keys(args), state=app.state)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=args.allowed_origins,
        allow_methods=args.allowed_methods,
        allow_headers=args.allowed_headers,
        allow_credentials=args.allow_credentials,
        expose_headers=["X-Request-Id"],
    )
    return app


def _keys(args: FrontendArgs) -> list[str]:
    keys = args.api_key or [key for key in (envs.VLLM_API_KEY,) if key]
    if not all(keys):
        raise ValueError("api_key has an empty key, which anybody could give; name one or leave it out")
    return keys


class _Connection(H11Protocol):
    """The kernel ends it where the client takes nothing of what waits for it for ``write_timeout`` seconds."""

    write_timeout = 0.0

    def connection_made(self, transport: Any) -> None:
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            milliseconds = max(round(self.write_timeout * 1e3), 1)
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        super().connection_made(transport)


def uvicorn_config(app: FastAPI, args: FrontendArgs) -> uvicorn.Config:
    """How ``app`` is served. h11 reads requests: it bounds their headers."""
    return uvicorn.Config(
        app,
        host=args.host or "0.0.0.0",
        port=args.port,
        http=type("Connection", (_Connection,), {"write_timeout": args.response_write_timeout}),
        ws="none",
        lifespan="on",
        server_header=False,
        root_path=args.root_path,
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        h11_max_incomplete_event_size=args.h11_max_incomplete_event_size,
        timeout_keep_alive=args.timeout_keep_alive,
    )


def _add_tokenize(app: FastAPI, serving: Serving) -> None:
    def encode(request: TokenizeRequest) -> dict[str, Any]:
        tokenizer = serving.thread_tokenizer()
        if request.messages is not None:
            ids = serving.render(request)["prompt_token_ids"]
        else:
            special = request.add_special_tokens is None or request.add_special_tokens
            ids = list(tokenizer(check_text("prompt", request.prompt or ""), add_special_tokens=special).input_ids)
        strings = tokenizer.convert_ids_to_tokens(ids) if request.return_token_strs else None
        length = serving.model_config.max_model_len
        return {"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": strings}

    def decode(request: DetokenizeRequest) -> dict[str, Any]:
        tokenizer = serving.thread_tokenizer()
        size = max(len(tokenizer), serving.model_config.vocab_size)
        if wrong := [token_id for token_id in request.tokens if not 0 <= token_id < size]:
            raise APIError(400, f"tokens has ids outside the vocabulary of {size}: {wrong[:10]}", "tokens")
        return {"prompt": tokenizer.decode(request.tokens)}

    @app.post("/tokenize")
    async def tokenize(raw: Request) -> Response:
        request = await read_body(raw, TokenizeRequest)
        serving.check_model(request.model)
        return JSONResponse(await serving.in_thread(encode, request))

    @app.post("/detokenize")
    async def detokenize(raw: Request) -> Response:
        request = await read_body(raw, DetokenizeRequest)
        serving.check_model(request.model)
        return JSONResponse(await serving.in_thread(decode, request))


if __name__ == "__main__":  # an older name of ``vllm serve``
    runpy.run_module("vllm.entrypoints.cli.serve", run_name="__main__")
