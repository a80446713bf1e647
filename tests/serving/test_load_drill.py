# SPDX-License-Identifier: Apache-2.0
"""200 clients at ``vllm serve``, TP 2 x DP 2 with expert parallelism, under NaN poison: they stay, leave, and ask for
nonsense, and for a third of the time all want the same DP rank."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import served
import tiny_models as tiny

CLIENTS = 200
LONGEST = 24
# Until an answer ends, however many wait in front of it.
PATIENCE_S = 120.0
GROWTH_BYTES = 48 << 20
PROMPTS = [(length, seed) for length in (3, 9, 17, 40) for seed in range(3)]
BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": -1}, "max_tokens"),
    ({"prompt": [10**6]}, "vocabulary"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [5] * 300}, "max_model_len"),
    ({"top_p": 7}, "top_p"),
]


@contextlib.contextmanager
def server() -> Iterator[tuple[subprocess.Popen[str], int]]:
    settings = {**served.SETTINGS, "tensor_parallel_size": 2, "data_parallel_size": 2}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items() if value is not True]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", tiny.checkpoint(served.MODEL)]
    command += ["--host=127.0.0.1", "--skip-tokenizer-init", "--enable-expert-parallel", *options]
    with served.environment(**served.poisoned()):
        paths = [os.environ["PYTHONPATH"], *filter(None, sys.path)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with served.port() as port:
        words = [*command, f"--port={port}"]
        process = subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            yield process, port
        finally:
            process.kill()
            process.communicate()


async def lines(port: int, method: str, path: str, body: Any = None, rank: int | None = None) -> AsyncIterator[str]:
    """The status, then the lines of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        data = b"" if body is None else json.dumps(body).encode()
        pinned = "" if rank is None else f"X-data-parallel-rank: {rank}\r\n"
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n{pinned}"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        yield (await reader.readline()).decode().split()[1]
        while line := await reader.readline():
            yield line.decode().strip()
    finally:
        writer.close()


async def get(port: int, path: str) -> str:
    return "\n".join([line async for line in lines(port, "GET", path)])


def request(length: int, seed: int, max_tokens: int) -> dict[str, Any]:
    tokens = {"prompt": list(tiny.prompt(length, seed)), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {**tokens, "logprobs": 0, "return_tokens_as_token_ids": True, "stream": True}


async def ask(port: int, chance: random.Random, rank: int | None) -> str:
    """How one request ended; its tokens are transformers'."""
    if chance.random() < 0.05:
        change, word = chance.choice(BAD)
        answer = [line async for line in lines(port, "POST", "/v1/completions", {**request(9, 0, 4), **change}, rank)]
        assert answer[0] == "400", answer
        assert word in answer[-1], answer
        return "bad"
    length, seed = chance.choice(PROMPTS)
    count, leaves = chance.randint(1, LONGEST), chance.random() < 0.3
    expected = tiny.greedy(served.MODEL, tiny.prompt(length, seed), LONGEST)[:count]
    after, got = chance.randint(0, count), list[int]()
    answer = lines(port, "POST", "/v1/completions", request(length, seed, count), rank)
    async with contextlib.aclosing(answer):
        status = await anext(answer)
        assert status == "200", status
        async for line in answer:
            if leaves and len(got) >= after:
                assert tuple(got) == expected[: len(got)]
                return "left"
            assert "error" not in line, line
            for name in re.findall(r'"token_id:(\d+)"', line.partition('"tokens"')[2].partition("]")[0]):
                got.append(int(name))
            if line == "data: [DONE]":
                assert tuple(got) == expected
                return "whole"
    raise AssertionError(f"the answer broke off after {len(got)} of {count} tokens")


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.multiprocess
@pytest.mark.alone
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seconds", [60, pytest.param(1200, marks=pytest.mark.slow)])
def test_load_drill(seconds: int) -> None:
    """No wrong token, no lost request, no leaked block, and memory stays where it was after a third of the time."""
    for length, seed in PROMPTS:
        tiny.greedy(served.MODEL, tiny.prompt(length, seed), LONGEST)
    ends: collections.Counter[str] = collections.Counter()

    async def client(number: int, port: int, began: float) -> None:
        chance = random.Random(number)
        await asyncio.sleep(chance.random() * 5)
        while (now := time.monotonic() - began) < seconds:
            starved = 1 / 3 < now / seconds < 2 / 3
            ends[await asyncio.wait_for(ask(port, chance, 0 if starved else None), PATIENCE_S)] += 1
            await asyncio.sleep(chance.expovariate(1))

    async def drill(process: subprocess.Popen[str], port: int) -> None:
        while "200" not in await status(port):
            assert process.poll() is None, process.communicate()[1]
            await asyncio.sleep(0.2)
        agent = served.children(process.pid)
        pids = [process.pid, *agent, *(rank for pid in agent for rank in served.children(pid))]
        assert len(pids) == 6, pids
        began = time.monotonic()
        clients = asyncio.gather(*[client(number, port, began) for number in range(CLIENTS)])
        await asyncio.sleep(seconds / 3)
        before = {pid: resident(pid) for pid in pids}
        await clients
        grown = {pid: resident(pid) - before[pid] for pid in pids}
        while any(re.findall(r"^vllm:num_requests_(?:running|waiting)\{.*\} [^0]", await get(port, "/metrics"), re.M)):
            await asyncio.sleep(0.1)
        metrics = await get(port, "/metrics")
        assert re.findall(r"^vllm:kv_cache_usage_perc\{.*\} (\S+)$", metrics, re.M) == ["0.0", "0.0"]
        assert max(grown.values()) < GROWTH_BYTES, grown
        assert min(ends[kind] for kind in ("whole", "left", "bad")) > CLIENTS / 20, ends
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, process.communicate()[1]
        assert not served.left_of(pids)

    async def status(port: int) -> str:
        try:
            return (await get(port, "/health")).partition("\n")[0]
        except OSError:
            return "none"

    with server() as (process, port):
        asyncio.run(drill(process, port))
    print(dict(ends))
