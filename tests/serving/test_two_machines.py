# SPDX-License-Identifier: Apache-2.0
"""An engine over two machines, which here are two network namespaces: the server on one, ranks on both."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import served
import tiny_models as tiny
from launcher import free_port
from test_serve_command import call, wait_for_server

ADDRESSES = ("10.231.7.1", "10.231.7.2")
NAMES = [f"vllm-test-{os.getpid()}-{i}" for i in (0, 1)]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def machines() -> Iterator[list[list[str]]]:
    """The words before a command that runs it on machine 0, and on machine 1."""
    try:
        for name in NAMES:
            _ip("netns", "add", name)
        _ip("link", "add", "v0", "netns", NAMES[0], "type", "veth", "peer", "name", "v1", "netns", NAMES[1])
        for number, name in enumerate(NAMES):
            _ip("-n", name, "addr", "add", f"{ADDRESSES[number]}/24", "dev", f"v{number}")
            for link in ("lo", f"v{number}"):
                _ip("-n", name, "link", "set", link, "up")
    except (OSError, subprocess.CalledProcessError) as error:
        _remove()
        pytest.skip(f"network namespaces need root and iproute2: {getattr(error, 'stderr', error)}")
    yield [["ip", "netns", "exec", name] for name in NAMES]
    _remove()


def _remove() -> None:
    for name in NAMES:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            _ip("netns", "del", name)


@contextlib.contextmanager
def engine(machines: list[list[str]], max_restarts: int) -> Iterator[tuple[subprocess.Popen[str], Any, Any]]:
    """The drill's front end on machine 0, ``vllm serve --headless`` on machine 1, and what starts that once more."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    env.pop("GLOO_SOCKET_IFNAME", None)
    drill = str(Path(__file__).with_name("drill.py"))
    front = subprocess.Popen(
        [*machines[0], sys.executable, drill, str(max_restarts), ADDRESSES[0]],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
    )
    said = json.loads(front.stdout.readline())  # type: ignore[union-attr]
    words = [f"--{name.replace('_', '-')}={value}" for name, value in said["settings"].items() if value is not True]
    words += [f"--{name.replace('_', '-')}" for name, value in said["settings"].items() if value is True]
    places = ["--headless", "--nnodes=2", "--node-rank=1", f"--master-addr={ADDRESSES[0]}"]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *places, f"--max-restarts={max_restarts}"]
    started = [front]

    def join() -> subprocess.Popen[str]:
        started.append(subprocess.Popen([*machines[1], *command, *words], env=env, text=True))
        return started[-1]

    try:
        yield front, join(), join
    finally:
        for process in started:
            process.kill()
            process.communicate()


def hear(process: subprocess.Popen[str], word: str) -> Any:
    for line in process.stdout:  # type: ignore[union-attr]
        if line.startswith("{") and word in (said := json.loads(line)):
            return said[word]
    return None


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_machines(machines: list[list[str]]) -> None:
    """Tokens are right, and a rank's death on the other machine ends both with its name."""
    with engine(machines, 0) as (front, other, _):
        assert hear(front, "tokens") == list(tiny.greedy(served.MODEL, tiny.prompt(9), 5))
        assert len(hear(front, "pids")) == 3  # the agent, its rank and the front end
        (rank,) = served.children(other.pid)
        os.kill(rank, signal.SIGKILL)
        began = time.monotonic()
        errors = hear(front, "errors")
        assert time.monotonic() - began < 10
        assert len(errors) == 4
        assert all("ended without a word" in error for error in errors), errors
        assert front.wait(20) == 0
        assert other.wait(20) != 0


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("where", ["machine 0", "machine 1"])
def test_ranks_of_both_machines_start_again(machines: list[list[str]], where: str) -> None:
    with engine(machines, 1) as (front, other, _):
        pids = hear(front, "pids")
        (rank,) = served.children(other.pid)
        os.kill(rank if where == "machine 1" else pids["rank 0"], signal.SIGKILL)
        errors = hear(front, "errors")
        assert len(errors) == 4
        assert all("being started again" in error for error in errors), errors
        assert hear(front, "tokens") == list(tiny.greedy(served.MODEL, tiny.prompt(9), 5))
        assert not {*served.children(other.pid), *hear(front, "pids").values()} & {rank, pids["rank 0"]}
        assert front.wait(30) == 0
        assert other.wait(30) == 0


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_machine_that_comes_back(machines: list[list[str]]) -> None:
    """Its new agent counts restarts from 0, machine 0's goes on."""
    with engine(machines, 1) as (front, other, join):
        assert hear(front, "pids")
        other.kill()
        errors = hear(front, "errors")
        assert all("being started again" in error for error in errors), errors
        other.wait()
        other = join()
        assert hear(front, "tokens") == list(tiny.greedy(served.MODEL, tiny.prompt(9), 5))
        assert front.wait(30) == 0
        assert other.wait(30) == 0


@pytest.mark.slow
@pytest.mark.multiprocess
def test_torchrun_starts_the_ranks() -> None:
    """Under torchrun the process of rank 0 has the server; SIGTERM at torchrun drains it and ends all."""
    port, settings = free_port(), served.arguments(1, 2)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items() if value is not True]
    words += [f"--{name.replace('_', '-')}" for name, value in settings.items() if value is True]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:1", "--nproc-per-node=2"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    command += ["-m", "vllm.entrypoints.cli.main", "serve", "--host=127.0.0.1", f"--port={port}", *words]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_for_server(process, port)
        body = {"prompt": list(tiny.prompt(9)), "max_tokens": 5, "temperature": 0, "ignore_eos": True, "logprobs": 0}
        status, text = call(port, "POST", "/v1/completions", {**body, "return_tokens_as_token_ids": True})
        assert status == 200, text
        expected = [f"token_id:{token}" for token in tiny.greedy(served.MODEL, tiny.prompt(9), 5)]
        assert json.loads(text)["choices"][0]["logprobs"]["tokens"] == expected
        pids = served.children(process.pid)
        assert len(pids) == 2
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=40)
        assert "ends:" not in said, said
        assert "was lost" not in said, said
        assert not served.left_of(pids)
    finally:
        process.kill()
        process.communicate()
