# SPDX-License-Identifier: Apache-2.0
"""``vllm chat`` and ``vllm complete`` against a server that answers by script, in a terminal and in a pipe."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import live
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from vllm.entrypoints.cli.main import main


class Echo:
    """Says the last message again, word by word; "for ever" never ends; a wrong key is refused."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.app = FastAPI()

        @self.app.get("/v1/models")
        async def models(request: Request) -> Any:
            if request.headers.get("authorization") != "Bearer k":
                return JSONResponse({"error": {"message": "the key is wrong"}}, 401)
            return {"data": [{"id": "echo"}, {"id": "other"}]}

        @self.app.post("/v1/chat/completions")
        async def chat(request: Request) -> Any:
            body = await request.json()
            self.bodies.append(body)
            return self.answer(body["messages"][-1]["content"], lambda text: {"delta": {"content": text}})

        @self.app.post("/v1/completions")
        async def complete(request: Request) -> Any:
            body = await request.json()
            self.bodies.append(body)
            return self.answer(body["prompt"], lambda text: {"text": text})

    def answer(self, text: str, choice: Any) -> Any:
        if text == "wrong":
            return JSONResponse({"error": {"message": "cannot say that"}}, 400)

        async def stream() -> Any:
            for word in text.split(" "):
                yield f"data: {json.dumps({'choices': [choice(word + '~')]})}\r\n\r\n"
                await asyncio.sleep(0)
            if text == "for ever":
                await asyncio.sleep(60)
            yield "data: [DONE]\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")


@pytest.fixture(autouse=True)
def _ctrl_c_is_heard() -> Iterator[None]:
    """A process started in the background ignores it, and so do those that it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Echo, str]]:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    server = Echo()
    with live.serving(server.app) as url:
        yield server, f"{url}/v1"


def test_one_question(echo: tuple[Echo, str], capsys):
    server, url = echo
    assert main(["chat", "--url", url, "-q", "how are you", "--system-prompt", "be brief", "--max-tokens", "9"]) == 0
    assert capsys.readouterr().out == "how~are~you~\n"
    said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "how are you"}]
    assert server.bodies[0] == {"model": "echo", "stream": True, "max_tokens": 9, "messages": said}
    assert main(["complete", "--url", url, "--model-name", "other", "--temperature", "0", "-q", "once upon"]) == 0
    assert capsys.readouterr().out == "once~upon~\n"
    assert server.bodies[1] == {"model": "other", "stream": True, "temperature": 0.0, "prompt": "once upon"}


def test_a_talk_in_a_pipe(echo: tuple[Echo, str], monkeypatch: pytest.MonkeyPatch, capsys):
    server, url = echo
    lines = iter(["hello", "", "wrong", "again"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, None) or _end_of(lines))
    assert main(["chat", "--url", url]) == 0
    shown = capsys.readouterr()
    assert shown.out.split() == ["hello~", "again~"]
    assert "cannot say that" in shown.err
    # What was refused is forgotten, what was answered is not.
    assert [m["content"] for m in server.bodies[-1]["messages"]] == ["hello", "hello~", "again"]


def _end_of(lines: Iterator[str]) -> str:
    if (line := next(lines, None)) is None:
        raise EOFError
    return line


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_errors_in_words(command: str, echo: tuple[Echo, str], monkeypatch: pytest.MonkeyPatch, capsys):
    _, url = echo
    assert main([command, "--url", "http://127.0.0.1:9/v1", "-q", "x"]) == 1
    assert "start `vllm serve`, or give --url" in capsys.readouterr().err
    assert main([command, "--url", url, "--api-key", "no", "-q", "x"]) == 1
    assert "HTTP 401: the key is wrong" in capsys.readouterr().err
    assert main([command, "--url", url, "-q", "wrong"]) == 1
    assert "HTTP 400: cannot say that" in capsys.readouterr().err
    assert main([command, "--url", "localhost", "-q", "x"]) == 1
    assert "is no address of a server" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "closed the connection before the end"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\ndata: ", "closed the connection before the end"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ndata", "closed the connection before the end"),
        (b"", "closed the connection before the end"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "does not speak HTTP"),
        (b"HTTP/1.1 301 Moved\r\nLocation: /\r\n\r\n", "HTTP 301"),
    ],
)
def test_servers_that_are_none_or_die(answer: bytes, message: str, capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(2**16)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        assert main(["complete", "--url", url, "--model", "m", "-q", "x"]) == 1
        thread.join()
    assert message in capsys.readouterr().err


class Terminal:
    """A command in a pseudo-terminal of its own."""

    def __init__(self, *argv: str) -> None:
        pid, self.fd = pty.fork()
        if pid == 0:
            os.execv(sys.executable, [sys.executable, "-m", "vllm.entrypoints.cli.main", *argv])
        self.pid, self.shown = pid, ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()  # what is read may end within a character

    def write(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def until(self, text: str, seconds: float = 120) -> str:
        """What came since the last call, once ``text`` did."""
        end = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < end, f"{text!r} has not come: {self.shown!r}"
            if select.select([self.fd], [], [], 0.2)[0]:
                self.shown += self._decoder.decode(os.read(self.fd, 2**16))
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def interrupt(self) -> None:
        """Ctrl-C, until a prompt comes. CPython's ``input()`` does not see one that comes after a key was taken and
        before the next is waited for: then the process sleeps. One that comes late would spoil the next line."""
        for _ in range(3):
            end = time.monotonic() + 60
            while self._state() != "S":
                assert time.monotonic() < end, "it does not come to wait for a key"
                time.sleep(0.005)
            self.write("\x03")
            with contextlib.suppress(AssertionError):
                self.until("> ", 30)
                return
        raise AssertionError(f"no Ctrl-C of 3 brought a prompt: {self.shown!r}")

    def _state(self) -> str:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def end(self) -> int:
        """The exit code."""
        for _ in range(2400):
            with contextlib.suppress(OSError):
                if select.select([self.fd], [], [], 0)[0]:
                    os.read(self.fd, 2**16)
            time.sleep(0.05)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self.fd)
                return os.waitstatus_to_exitcode(status)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise AssertionError(f"it does not end: {self.shown!r}")


def test_in_a_terminal(echo: tuple[Echo, str]):
    server, url = echo
    terminal = Terminal("chat", "--url", url)
    terminal.until("> ")
    terminal.write("for ever\r")
    terminal.until("for~ever~")
    terminal.write("\x03")  # Ctrl-C ends the answer alone
    terminal.until("> ")
    terminal.write("half a li")
    terminal.until("half a li")
    terminal.interrupt()  # and a line that is being written
    terminal.write("a \x16\x1b[31mred\r")  # an answer cannot give the terminal orders
    answer = terminal.until("red~")
    assert "\ufffd[31mred~" in answer.splitlines()[-1], answer
    terminal.until("> ")
    terminal.write("\x04")
    assert terminal.end() == 0
    assert [m["role"] for m in server.bodies[-1]["messages"]] == ["user", "assistant", "user"]


def test_ctrl_c_ends_a_single_question(echo: tuple[Echo, str]):
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "complete", "--url", echo[1], "-q", "for ever"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(9) == b"for~ever~"
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=120)
        assert process.returncode == 130
        assert b"Traceback" not in error
