# SPDX-License-Identifier: Apache-2.0
"""The server over an engine of this process, on a free port of 127.0.0.1, in a thread."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import uvicorn

from vllm.entrypoints.openai.api_server import build_app, uvicorn_config
from vllm.entrypoints.openai.cli_args import FrontendArgs

ENGINE_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 32,
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 400,
}


class Server:
    """``connections``: uvicorn's protocols of those that are open."""

    def __init__(self, url: str, app: Any, connections: set[Any]) -> None:
        self.url, self.app, self.connections = url, app, connections
        self.http = httpx.Client(base_url=url, timeout=120)

    def post(self, path: str, body: Any = None, status: int = 200, **kwargs: Any) -> Any:
        """The JSON of the answer, which has ``status``."""
        answer = self.http.post(path, **({"json": body} if body is not None else {}), **kwargs)
        assert answer.status_code == status, answer.text
        return answer.json()

    def stream(self, path: str, body: Any, status: int = 200) -> list[dict[str, Any]]:
        """The events of a stream, without its end."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as answer:
            text = answer.read().decode()
            assert answer.status_code == status, text
        assert answer.headers["content-type"].startswith("text/event-stream")
        *events, end, rest = text.split("\n\n")
        assert (end, rest) == ("data: [DONE]", "")
        assert all(event.startswith("data: ") for event in events)
        return [json.loads(event.removeprefix("data: ")) for event in events]


def wait_until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


@contextlib.contextmanager
def serving(engine: Any, **args: Any) -> Iterator[Server]:
    options = FrontendArgs(host="127.0.0.1", port=0, disable_uvicorn_access_log=True, **args)
    app = build_app(engine, options)
    config = uvicorn_config(app, options)
    config.log_config = None
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="http-server", daemon=True)
    thread.start()
    wait_until(lambda: server.started or not thread.is_alive(), "the server has not started")
    assert server.started, "the server has ended"
    port = server.servers[0].sockets[0].getsockname()[1]
    made = Server(f"http://127.0.0.1:{port}", app, server.server_state.connections)
    try:
        yield made
    finally:
        made.http.close()
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive(), "the server has not ended"
