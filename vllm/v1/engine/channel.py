# SPDX-License-Identifier: Apache-2.0
"""One connection between a front end and a rank: numbered messages, and who may be at the other end."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import socket
import struct
from collections import deque
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import msgspec

from vllm.v1.engine import messages

_HANDSHAKE_S = 10
_LONGEST = 1 << 30
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[int, functools.reduce(operator.or_, messages.Message.__subclasses__())])  # type: ignore


class Channel:
    """Any thread sends; one thread reads and writes, and is woken by whoever sends (``Waker``).

    Nothing blocks: what a stopped peer does not take waits here.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.socket = connected
        self._queue: deque[tuple[messages.Message, bool]] = deque()
        self._number, self._unsent, self._read = 0, bytearray(), bytearray()

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: messages.Message, counted: bool = True) -> None:
        """Queue a message; ``counted`` ones are numbered from 1, the others are 0."""
        self._queue.append((message, counted))

    @property
    def has_unsent(self) -> bool:
        return bool(self._queue or self._unsent)

    def write(self) -> None:
        """Send what the socket takes. Raises ``OSError`` where the other end is gone."""
        while self._queue:
            message, counted = self._queue.popleft()
            self._number += counted
            data = _encoder.encode((self._number if counted else 0, message))
            self._unsent += struct.pack("<I", len(data)) + data
        while self._unsent:
            try:
                del self._unsent[: self.socket.send(self._unsent)]
            except BlockingIOError:
                return

    def read(self) -> list[tuple[int, messages.Message]]:
        """What has come. Raises ``EOFError`` or ``OSError`` where nothing will any more, ``msgspec.DecodeError`` for
        what is no message."""
        with contextlib.suppress(BlockingIOError):
            data = self.socket.recv(1 << 20)
            if not data:
                raise EOFError
            self._read += data
        found, at = [], 0
        while len(self._read) - at >= 4:
            (size,) = struct.unpack_from("<I", self._read, at)
            if size > _LONGEST:
                raise msgspec.DecodeError(f"a message of {size} bytes")
            if len(self._read) - at - 4 < size:
                break
            found.append(_decoder.decode(memoryview(self._read)[at + 4 : at + 4 + size]))
            at += 4 + size
        del self._read[:at]
        return found

    def close(self) -> None:
        self.socket.close()


class Waker:
    """Ends another thread's ``select``."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        return self._reader

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it will wake
            os.write(self._writer, b"\0")

    def __del__(self) -> None:  # not before: others may wake at any time
        os.close(self._reader)
        os.close(self._writer)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 1 << 12)


def connect(host: str, port: int, key: bytes) -> Channel:
    """Raises ``OSError`` or ``AuthenticationError`` where nobody with ``key`` listens there."""
    connected = socket.create_connection((host, port), timeout=_HANDSHAKE_S)
    return _authenticate(connected, key, [answer_challenge, deliver_challenge])


def accept(connected: socket.socket, key: bytes) -> Channel:
    """The channel to a peer that has connected; raises as ``connect`` does."""
    return _authenticate(connected, key, [deliver_challenge, answer_challenge])


def _authenticate(connected: socket.socket, key: bytes, steps: list[Any]) -> Channel:
    connected.setblocking(True)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _HANDSHAKE_S, 0))
    connection = Connection(os.dup(connected.fileno()))
    try:
        for step in steps:
            step(connection, key)
    except BaseException:
        connected.close()
        raise
    finally:
        connection.close()
    return Channel(connected)
