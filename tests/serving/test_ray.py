# SPDX-License-Identifier: Apache-2.0
"""Ranks as Ray actors, on a local Ray cluster of two nodes with room for one rank each."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import served
import tiny_models as tiny
from launcher import free_port
from test_serve_command import call, wait_for_server

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

pytest.importorskip("ray", reason='Ray is not installed: pip install "ray>=2.40"')
from ray.cluster_utils import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]
BOUND_S = 10.0
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}
MARK = f"VLLM_TEST_RAY={uuid.uuid4().hex}"


def marked(words: bytes = b"") -> dict[int, int]:
    """Living processes that have the mark in their environment and ``words`` in their command line → RANK, or −1."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes()
            if MARK.encode() in variables and words in command and served.alive(int(folder.name)):
                found[int(folder.name)] = next((int(v[5:]) for v in variables if v.startswith(b"RANK=")), -1)
    found.pop(os.getpid(), None)
    return found


def rank_processes() -> dict[int, int]:
    return {rank: pid for pid, rank in marked(b"vllm.v1.engine.rank_process").items()}


def wait_for_none(words: bytes = b"", seconds: float = BOUND_S) -> None:
    end = time.monotonic() + seconds
    while left := marked(words):
        assert time.monotonic() < end, {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left}
        time.sleep(0.05)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture
def folder() -> Iterator[str]:
    """Ray's, and with the mark in the environment; short, since Ray's sockets lie in it."""
    folder, (name, _, value) = tempfile.mkdtemp(prefix="ray", dir="/tmp"), MARK.partition("=")
    poison = served.poisoned()["PYTHONPATH"]
    own = Path(__file__).resolve().parents
    paths = os.pathsep.join(map(str, [poison, *own[:3], own[1] / "distributed"]))
    variables = {name: value, "PYTHONPATH": paths, "RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled"}
    # Ray's own agents outlive a killed Ray while they look for its store.
    variables["RAY_gcs_rpc_server_reconnect_timeout_s"] = "3"
    try:
        with served.environment(**variables):
            yield folder
            wait_for_none(seconds=90)  # 60 of them are what Ray 2.60 gives its agents once its store is gone
    finally:
        for pid in marked():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder)
    assert not list(Path("/dev/shm").glob("plasma*"))


@pytest.fixture
def cluster(folder: str) -> Iterator[Any]:
    cluster = Cluster(True, head_node_args={**NODE, "include_dashboard": False})
    try:
        cluster.second = cluster.add_node(**NODE)  # type: ignore[attr-defined]
        cluster.wait_for_nodes()
        with served.environment(RAY_ADDRESS=cluster.address):
            yield cluster
        wait_for_none(b"vllm.v1.engine")
    finally:
        cluster.shutdown()


async def errors_of_streams(llm: AsyncLLM, lose: Any) -> tuple[list[str], float]:
    """Of one stream on each rank, and the seconds that they took to come once ``lose`` was called."""
    tasks = [
        asyncio.create_task(served.tokens(llm, 9, 200, f"lost-{rank}-{time.monotonic()}", data_parallel_rank=rank))
        for rank in (0, 1)
    ]
    await served.until(lambda: all(stats.get("running") for stats in llm.stats()))
    lose()
    began = time.monotonic()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(error, EngineDeadError) for error in found), found
    return [str(error) for error in found], time.monotonic() - began


def test_two_nodes(cluster: Any) -> None:
    """Tokens are right on both; a killed actor is named, its ranks start again; then a lost node is named."""
    with served.environment(VLLM_PLACEMENT_TIMEOUT_S="3"):
        with pytest.raises(ValueError, match=r"no room for 3 ranks .*its 2 nodes have 2 CPU, of which 2 were free"):
            served.start(1, 3, distributed_executor_backend="ray")
    wait_for_none(b"vllm.v1.engine")

    llm = served.start(1, 2, {"max_restarts": 1}, distributed_executor_backend="ray")
    try:
        expected = list(tiny.greedy(served.MODEL, tiny.prompt(9), 12))

        async def answers() -> list[list[int]]:
            return [await served.tokens(llm, 9, 12, f"on-{r}-{time.monotonic()}", data_parallel_rank=r) for r in (0, 1)]

        assert asyncio.run(answers()) == [expected] * 2
        nodes = dict(llm.ranks._nodes)
        assert len(set(nodes.values())) == 2
        old = rank_processes()
        errors, seconds = asyncio.run(errors_of_streams(llm, lambda: os.kill(parent(old[1]), signal.SIGKILL)))
        assert seconds < BOUND_S
        assert all(f"rank 1 on node {nodes[1]}" in error for error in errors), errors
        assert all("being started again" in error for error in errors)

        asyncio.run(served.until(lambda: llm.is_running, 60))
        assert asyncio.run(answers()) == [expected] * 2
        new = rank_processes()
        assert not set(new.values()) & set(old.values())
        second = cluster.second.node_id[:8]
        (rank,) = [rank for rank, node in llm.ranks._nodes.items() if second in node]
        errors, seconds = asyncio.run(errors_of_streams(llm, lambda: cluster.remove_node(cluster.second, False)))
        assert seconds < BOUND_S
        assert all(f"rank {rank} on node" in error and second in error for error in errors), errors
    finally:
        llm.shutdown(5)


def test_ranks_of_a_group_on_one_node(folder: str) -> None:
    """TP 2 x DP 2 from the command line, on two nodes with room for two ranks each: TP groups lie within a node."""
    cluster = Cluster(True, head_node_args={**NODE, "num_cpus": 2, "include_dashboard": False})
    port = free_port()
    settings = {**served.arguments(2, 2), "distributed_executor_backend": "ray", "port": port, "host": "127.0.0.1"}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items() if value is not True]
    words += [f"--{name.replace('_', '-')}" for name, value in settings.items() if value is True]
    try:
        cluster.add_node(**{**NODE, "num_cpus": 2})
        cluster.wait_for_nodes()
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *words]
        process = subprocess.Popen(command, env={**os.environ, "RAY_ADDRESS": cluster.address})
        try:
            wait_for_server(process, port)
            body = {
                "prompt": list(tiny.prompt(9)),
                "max_tokens": 5,
                "temperature": 0,
                "ignore_eos": True,
                "logprobs": 0,
            }
            status, text = call(port, "POST", "/v1/completions", {**body, "return_tokens_as_token_ids": True})
            assert status == 200, text
            expected = [f"token_id:{token}" for token in tiny.greedy(served.MODEL, tiny.prompt(9), 5)]
            assert json.loads(text)["choices"][0]["logprobs"]["tokens"] == expected
            nodes = {rank: parent(pid) for rank, pid in rank_processes().items()}
            assert sorted(nodes) == [0, 1, 2, 3]
            nodes = {rank: parent(pid) for rank, pid in nodes.items()}  # of a node, which starts its actors
            assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
            process.send_signal(signal.SIGTERM)
            assert process.wait(40) == 0
        finally:
            process.kill()
            process.wait()
        wait_for_none(b"vllm.v1.engine")
    finally:
        cluster.shutdown()


@pytest.mark.usefixtures("folder")
def test_a_ray_of_its_own_ends_with_its_front_end() -> None:
    drill = str(Path(__file__).with_name("drill.py"))
    front = subprocess.Popen([sys.executable, drill, "0", "ray"], stdout=subprocess.PIPE, text=True)
    try:
        assert front.stdout is not None
        for line in front.stdout:
            if line.startswith("{") and "pids" in line:
                break
        assert set(rank_processes()) == {0, 1}
    finally:
        front.kill()
        front.communicate()
    wait_for_none(b"vllm.v1.engine")
