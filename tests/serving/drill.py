# SPDX-License-Identifier: Apache-2.0
"""A front end with four streams under way, which says on its output what becomes of them: for tests that kill parts."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

import served

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


async def stream(llm: AsyncLLM, number: int, started: asyncio.Event) -> str:
    try:
        while True:  # a request ends after some time, the stream does not
            async for _ in llm.generate(served.prompt(9), served.greedy(200), f"{number}-{time.monotonic()}"):
                started.set()
    except EngineDeadError as error:
        return str(error)


async def drill(llm: AsyncLLM, again: bool) -> None:
    events = [asyncio.Event() for _ in range(4)]
    tasks = [asyncio.create_task(stream(llm, number, event)) for number, event in enumerate(events)]
    await asyncio.gather(*[event.wait() for event in events])
    say(pids={**served.processes(llm), "front end": os.getpid()})
    say(errors=await asyncio.gather(*tasks))
    if again:
        await served.until(lambda: llm.is_running, 60)
        say(tokens=await served.tokens(llm, 9, 5, "again"))
        say(pids={**served.processes(llm), "front end": os.getpid()})


def main() -> None:
    max_restarts = int(sys.argv[1])
    options: dict[str, Any] = {"max_restarts": max_restarts}
    backend, others = ("ray", False) if sys.argv[2:] == ["ray"] else (None, len(sys.argv) > 2)
    if others:
        options |= {"nnodes": 2, "master_addr": sys.argv[2]}
        say(settings=served.arguments(1, 2))
    llm = served.start(1, 2, options, distributed_executor_backend=backend)
    if others:
        say(tokens=asyncio.run(served.tokens(llm, 9, 5, "first")))
    asyncio.run(drill(llm, bool(max_restarts)))
    llm.shutdown(5)
    say(health=llm.ranks.dead)


if __name__ == "__main__":
    main()
