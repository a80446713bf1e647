# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` as its users start and end it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import served
import tiny_models as tiny
from entrypoints.engine_fakes import save_byte_llama

from vllm.engine.arg_utils import EngineArgs, help_texts
from vllm.entrypoints.cli import serve
from vllm.entrypoints.openai.cli_args import FrontendArgs
from vllm.v1.engine.launch import Launch

SERVE = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]


# --- options


def test_every_argument_has_a_help_text() -> None:
    texts = help_texts(EngineArgs)
    assert [f.name for f in dataclasses.fields(EngineArgs) if not texts.get(f.name)] == []
    shown = " ".join(serve.make_parser().format_help().split())
    assert "most tokens of one request, prompt and output" in shown
    assert "--max-restarts" in shown


def test_options_of_a_file_give_way_to_the_command_line(tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text(
        "model: of-the-file\ntensor-parallel-size: 2\nenable_expert_parallel: true\nenforce-eager: false\n"
        "hf-overrides: {a: 1}\nport: 81\nmax-model-len: 2k\napi-key: [one, two]\nheadless: true\n"
    )
    args = serve.parse(["--config", str(config), "--port", "82"])
    assert (args.port, args.headless, args.max_restarts) == (82, True, 0)
    engine_args, frontend = EngineArgs.from_cli_args(args), FrontendArgs.from_cli_args(args)
    assert (engine_args.model, engine_args.tensor_parallel_size, engine_args.max_model_len) == ("of-the-file", 2, 2000)
    assert (engine_args.enable_expert_parallel, engine_args.enforce_eager) == (True, False)
    assert engine_args.hf_overrides == {"a": 1}
    assert frontend.api_key == ["one", "two"]
    assert EngineArgs.from_cli_args(serve.parse(["mine", "--config", str(config)])).model == "mine"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tensor-paralel-size: 2", "no option 'tensor_paralel_size'; the nearest is 'tensor_parallel_size'"),
        ("- a\n- b", "holds no names with values"),
        ("a: [", "serve.yaml"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        serve.parse(["--config", str(config)])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_ranks": 3, "nnodes": 2}, "3 ranks"),
        ({"num_ranks": 2, "nnodes": 2, "node_rank": 2}, "node_rank=2"),
        ({"num_ranks": 2, "max_restarts": -1}, "max_restarts=-1"),
        ({"num_ranks": 2, "max_restarts": 1, "by_torchrun": True}, "max_restarts=1 under torchrun"),
    ],
)
def test_impossible_launches_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Launch({}, **options)


def test_a_port_in_use_is_said_before_the_engine_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code = serve.main([tiny.checkpoint(served.MODEL), "--host", "127.0.0.1", "--port", str(port)])
    assert code == 2
    assert f"--port {port}: Address already in use" in capsys.readouterr().err


def test_the_server_is_on_the_first_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["m", "--nnodes", "2", "--node-rank", "1"]) == 2
    assert "add --headless" in capsys.readouterr().err


def test_the_older_name_of_the_command() -> None:
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", "m", "--nnodes", "2", "--node-rank", "1"]
    run = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "add --headless" in run.stderr


# --- a server


OPTIONS = [
    f"--{name.replace('_', '-')}={value}" for name, value in served.SETTINGS.items() if name != "skip_tokenizer_init"
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    save_byte_llama(folder)
    return str(folder)


@contextlib.contextmanager
def server(model: str, *more: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    with starting(model, *more) as (process, port):
        wait_for_server(process, port)
        yield process, port


@contextlib.contextmanager
def starting(model: str, *more: str, customised: str = "") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """``customised``: the folder here with what all its processes load first."""
    paths = [str(Path(__file__).with_name(customised)) if customised else "", *sys.path]
    with served.port() as port:
        process = subprocess.Popen(
            [*SERVE, model, "--host", "127.0.0.1", "--port", str(port), *OPTIONS, *more],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield process, port
        finally:
            process.kill()
            process.communicate()


def wait_for_server(process: subprocess.Popen[str], port: int, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if call(port, "GET", "/health")[0] == 200:
                return
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "the server does not come up"
        time.sleep(0.2)


def call(port: int, method: str, path: str, body: Any = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def completion(length: int, max_tokens: int) -> dict[str, Any]:
    return {
        "prompt": list(tiny.prompt(length)),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


@pytest.mark.multiprocess
@pytest.mark.parametrize("told", ["the server", "all its processes"])
def test_sigterm_drains_and_ends_well(model: str, told: str) -> None:
    """One request is under way when the signal comes: it ends as if nothing were, later ones find no server. A service
    manager tells every process of a service."""
    with server(model, "--shutdown-timeout", "30") as (process, port):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        body = json.dumps({**completion(9, 200), "stream": True})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        first = response.readline()
        pids = [*(agents := served.children(process.pid)), *(rank for pid in agents for rank in served.children(pid))]
        assert len(pids) == 2
        for pid in [*pids, process.pid] if told != "the server" else [process.pid]:
            os.kill(pid, signal.SIGTERM)
        rest = response.read().decode()
        assert first.startswith(b"data: {")
        assert rest.rstrip().endswith("data: [DONE]")
        assert '"finish_reason":"length"' in rest
        assert process.wait(120) == 0
        assert not served.left_of(pids)
        with pytest.raises(OSError):
            call(port, "GET", "/health")


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_wait(model: str, number: signal.Signals) -> None:
    with server(model, "--shutdown-timeout", "300", "--max-num-seqs", "1") as (process, port):
        connections = []
        for _ in range(60):  # one after the other: minutes
            connections.append(connection := http.client.HTTPConnection("127.0.0.1", port, timeout=60))
            body = json.dumps({**completion(9, 240), "stream": True})
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        connections[0].getresponse().readline()
        pids = [
            process.pid,
            *(agents := served.children(process.pid)),
            *(p for a in agents for p in served.children(a)),
        ]
        assert len(pids) == 3
        process.send_signal(number)
        time.sleep(1)
        assert process.poll() is None, "the first signal does not let requests end"
        process.send_signal(number)
        process.wait(15)
        assert not served.left_of(pids)
        for connection in connections:
            connection.close()


def has_socket(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):  # closed since it was listed
        return any(os.readlink(handle).startswith("socket:") for handle in Path(f"/proc/{pid}/fd").iterdir())
    return False


def ranks_of(process: subprocess.Popen[str], count: int) -> list[int]:
    """As soon as they are there."""
    end = time.monotonic() + 180
    while len(pids := [rank for agent in served.children(process.pid) for rank in served.children(agent)]) < count:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, f"{len(pids)} of {count} ranks were started"
        time.sleep(0.01)
    return pids


@pytest.mark.multiprocess
def test_a_rank_that_dies_before_it_has_said_anything(model: str) -> None:
    with starting(model, "--data-parallel-size", "2") as (process, _):
        pids = ranks_of(process, 2) + served.children(process.pid)
        os.kill(pids[1], signal.SIGKILL)
        said, _ = process.communicate(timeout=20)
        assert process.returncode == 1, said
        assert "error: the engine was lost: rank 1 was killed by SIGKILL" in said
        assert not served.left_of(pids)


@pytest.mark.multiprocess
@pytest.mark.parametrize("lost", ["server", "agent"])
def test_a_rank_that_stands_still_as_it_starts_goes_with_the_others(model: str, lost: str) -> None:
    with starting(model, customised="stopped_ranks") as (process, _):
        (rank,) = ranks_of(process, 1)
        (agent,) = served.children(process.pid)
        try:
            asyncio.run(served.until(lambda: " T " in Path(f"/proc/{rank}/stat").read_text(), 60))
            os.kill(process.pid if lost == "server" else agent, signal.SIGKILL)
            assert not served.left_of([agent, rank])
        finally:  # it holds the pipe that is read to its end
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)


@pytest.mark.multiprocess
def test_a_rank_that_cannot_start_says_why(model: str, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(model, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    with starting(str(broken)) as (process, _):
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 1, said
        assert "error: the engine was lost: rank 0 failed: " in said
        assert "model.safetensors" in said.split("rank 0 failed: ")[1]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_rank_that_is_lost_before_it_has_met_the_others(model: str) -> None:
    """What the others left in the agent's store, where they waited for it, is there when all are started again."""
    with starting(model, "--data-parallel-size", "2", "--max-restarts", "1") as (process, port):
        first, late = ranks_of(process, 2)
        os.kill(late, signal.SIGSTOP)
        try:
            asyncio.run(served.until(lambda: has_socket(first), 60))
            time.sleep(1)
        finally:  # it holds the pipe that this test reads to its end
            os.kill(late, signal.SIGKILL)
        wait_for_server(process, port, 60)
        status, _ = call(port, "POST", "/v1/completions", completion(9, 5))
        assert status == 200


@pytest.mark.multiprocess
@pytest.mark.parametrize("max_restarts", [0, 1])
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_at_the_start(model: str, number: signal.Signals, code: int, max_restarts: int) -> None:
    """The ranks are there and not ready: all ends at once, without a traceback."""
    with starting(model, "--max-restarts", str(max_restarts)) as (process, _):
        pids = ranks_of(process, 1) + served.children(process.pid)
        process.send_signal(number)
        said, _ = process.communicate(timeout=15)
        assert process.returncode == code, said
        assert "Traceback" not in said
        assert not served.left_of(pids)
