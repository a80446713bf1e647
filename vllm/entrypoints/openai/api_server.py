# SPDX-License-Identifier: Apache-2.0
"""The HTTP server in front of an engine: paths, who may call, what happens when a client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Iterable
from typing import Any, TypeVar

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm import __version__
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.cli_args import FrontendArgs
from vllm.entrypoints.openai.errors import APIError, as_api_error
from vllm.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
)
from vllm.entrypoints.openai.serving import Job, Serving, clean_id, with_errors
from vllm.entrypoints.openai.serving_chat import ServingChat
from vllm.entrypoints.openai.serving_completion import ServingCompletion
from vllm.logger import init_logger

logger = init_logger(__name__)

_T = TypeVar("_T")
_Body = TypeVar("_Body", bound=BaseModel)

# Probes and scrapers have no key, and learn nothing of anyone's text.
OPEN_PATHS = {"/health", "/ping", "/version", "/metrics"}


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
            self._check_key(scope, headers)
            await self.app(scope, receive, send_with_id)
        except ClientLeft:
            pass
        except Exception as error:
            if begun:
                raise
            await as_api_error(error).response()(scope, receive, send_with_id)
        finally:
            self.state.server_load -= 1

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if not self._keys or path in OPEN_PATHS:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(given.strip().encode()).digest()
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        if not any(matches) or scheme.lower() != "bearer":
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

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.headers["content-type"] = "text/event-stream; charset=utf-8"
        self.events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_left(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        begun = False
        async with contextlib.aclosing(self.events):
            async for text in self.events:
                if not begun:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    begun = True
                await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def read_body(raw: Request, kind: type[_Body]) -> _Body:
    """The checked body of a request."""
    args: FrontendArgs = raw.app.state.args
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
    app = FastAPI(title="vLLM", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    serving = Serving(engine, args)
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

    async def show(raw: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    for kind in (HTTPException, APIError):
        app.add_exception_handler(kind, show)
    app.add_middleware(Gate, keys=args.api_key or _keys_of_environment(), state=app.state)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=args.allowed_origins,
        allow_methods=args.allowed_methods,
        allow_headers=args.allowed_headers,
        allow_credentials=args.allow_credentials,
        expose_headers=["X-Request-Id"],
    )
    return app


def _keys_of_environment() -> list[str]:
    key = os.environ.get("VLLM_API_KEY")
    return [key] if key else []


def _add_tokenize(app: FastAPI, serving: Serving) -> None:
    @app.post("/tokenize")
    async def tokenize(raw: Request) -> Response:
        raise NotImplementedError("/tokenize")

    @app.post("/detokenize")
    async def detokenize(raw: Request) -> Response:
        raise NotImplementedError("/detokenize")
