# SPDX-License-Identifier: Apache-2.0
"""Requests with a grammar at ranks that are processes of their own."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import served
from entrypoints.engine_fakes import save_byte_llama

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError


async def word(llm: AsyncLLM, name: str, count: int) -> str:
    params = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(regex=f"{name}{{{count}}}"))
    *_, last = [output async for output in llm.generate("hello", params, f"{name}-{time.monotonic()}")]
    return last.outputs[0].text


@pytest.mark.slow
@pytest.mark.multiprocess
def test_no_step_waits_for_a_grammar(tmp_path: Path) -> None:
    """The ranks' tokenizers take three seconds: a stream goes on meanwhile, and the requests are right then. A rank
    that dies meanwhile is named."""
    save_byte_llama(tmp_path)
    paths = [str(Path(__file__).with_name("slow_tokenizers")), *filter(None, sys.path)]
    settings = {**served.SETTINGS, "skip_tokenizer_init": False, "max_num_batched_tokens": 32}
    with served.environment(PYTHONPATH=os.pathsep.join(paths), GLOO_SOCKET_IFNAME="lo"):
        llm = AsyncLLM.from_engine_args(EngineArgs(str(tmp_path), tensor_parallel_size=2, **settings))

    async def stream(until: asyncio.Event) -> list[float]:
        came = []
        while not until.is_set():
            async for _ in llm.generate(served.prompt(9), served.greedy(100), f"stream-{time.monotonic()}"):
                came.append(time.monotonic())
        return came

    async def check() -> None:
        done, began = asyncio.Event(), time.monotonic()
        other = asyncio.create_task(stream(done))
        await asyncio.sleep(0.2)
        assert await asyncio.gather(*[word(llm, name, 4) for name in "abc"]) == ["aaaa", "bbbb", "cccc"]
        assert time.monotonic() - began > 3, "the tokenizers were there"
        done.set()
        came = await other
        longest = max(after - before for before, after in itertools.pairwise(came))
        assert longest < 1.5, f"no token for {longest} s"
        assert llm.ranks.protocol._loads == [[0, 0]]
        assert not llm.ranks._preparing

        rank = served.processes(llm)["rank 1"]
        os.kill(rank, signal.SIGSTOP)
        late = asyncio.create_task(word(llm, "d", 4))
        await served.until(lambda: bool(llm.ranks._preparing))
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"rank 1 (was killed by SIGKILL|ended without a word)"):
            await late

    try:
        asyncio.run(check())
    finally:
        llm.shutdown(0)
