# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 requests whose answers are read as they come, over asyncio alone: what the terminal clients need."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit


class HTTPError(Exception):
    """The server refused, or did not speak as one; ``status`` is 0 where it gave none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Response:
    """The status and the headers (lower case) of an answer; its body is read once, by one of the methods."""

    def __init__(self, status: int, headers: Mapping[str, str], reader: asyncio.StreamReader) -> None:
        self.status, self.headers, self._reader = status, headers, reader

    async def _pieces(self) -> AsyncIterator[bytes]:
        reader = self._reader
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            while size := int((await reader.readuntil(b"\n")).split(b";")[0], 16):
                yield await reader.readexactly(size)
                await reader.readuntil(b"\n")
        elif "content-length" in self.headers:
            left = int(self.headers["content-length"])
            while left:
                piece = await reader.read(min(left, 2**16))
                if not piece:
                    raise asyncio.IncompleteReadError(b"", left)
                left -= len(piece)
                yield piece
        else:
            while piece := await reader.read(2**16):
                yield piece

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self._pieces()])

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The JSON of each server-sent event until ``[DONE]``. Raises :class:`HTTPError` where one is an error."""
        rest = b""
        async for piece in self._pieces():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise HTTPError(message_of(data))
                yield event

    async def json(self) -> Any:
        return json.loads(await self.read())


def message_of(body: bytes) -> str:
    """What an error's body says in words."""
    with contextlib.suppress(ValueError, AttributeError):
        told = json.loads(body)
        error = told.get("error", told)
        return str(error.get("message", error)) if isinstance(error, dict) else str(error)
    return body.decode("utf-8", "replace").strip()[:2000]


@contextlib.asynccontextmanager
async def request(url: str, body: Any = None, headers: Mapping[str, str] | None = None) -> AsyncIterator[Response]:
    """GET ``url``, or POST ``body`` as JSON. The connection is closed when the block is left, wherever the answer is.

    Raises :class:`HTTPError` for a status that is no success, ``OSError`` where there is no connection.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"url={url!r} is no address of a server; give one as http://host:port/v1")
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    port = parts.port or (443 if tls else 80)
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=tls)
    try:
        data = b"" if body is None else json.dumps(body).encode()
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        fields = {"Host": parts.netloc.rpartition("@")[2], "Connection": "close", "Accept": "*/*", **(headers or {})}
        if body is not None:
            fields |= {"Content-Type": "application/json", "Content-Length": str(len(data))}
        lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in fields.items())]
        if any("\r" in line or "\n" in line for line in lines):
            raise ValueError("a header has a line break")
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + data)
        await writer.drain()
        response = await _begin(reader)
        if not 200 <= response.status < 300:
            told = message_of(await response.read())
            raise HTTPError(f"HTTP {response.status}: {told or 'no more was said'}", response.status)
        yield response
    except (asyncio.IncompleteReadError, ConnectionResetError) as error:
        raise HTTPError("the server closed the connection before the end of its answer") from error
    finally:
        writer.close()
        with contextlib.suppress(OSError, ssl.SSLError):
            await writer.wait_closed()


async def _begin(reader: asyncio.StreamReader) -> Response:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(head[0].split(" ")[1])
    except (ValueError, IndexError) as error:
        raise HTTPError("the server does not speak HTTP") from error
    fields = (line.partition(":") for line in head[1:] if line)
    headers = {name.strip().lower(): value.strip() for name, _, value in fields}
    return await _begin(reader) if status == 100 else Response(status, headers, reader)
