# SPDX-License-Identifier: Apache-2.0
"""A served engine on a tiny model, its processes, and what they must not leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import tiny_models as tiny
from launcher import hold_port

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

MODEL = "qwen3-moe"
STEPS = Path(tempfile.gettempdir(), f"steps-{os.getpid()}")
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 256,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 64,
}


def arguments(tp: int, dp: int) -> dict[str, Any]:
    sizes = {"tensor_parallel_size": tp, "data_parallel_size": dp, "enable_expert_parallel": tp * dp > 1}
    return {"model": tiny.checkpoint(MODEL), **sizes, **SETTINGS}


def start(tp: int, dp: int, options: dict[str, Any] | None = None, **more: Any) -> AsyncLLM:
    return AsyncLLM.from_engine_args(EngineArgs(**arguments(tp, dp), **more), **options or {})


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def poisoned() -> dict[str, str]:
    paths = [str(Path(__file__).with_name("poisoned_ranks")), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "GLOO_SOCKET_IFNAME": "lo", "SERVED_STEPS": str(STEPS)}


@contextlib.contextmanager
def stopping_after(steps: int) -> Iterator[Callable[[int], None]]:
    """Idle ranks of ``poisoned()`` make so many steps and stand still until this is left: no longer request ends,
    however late the front end is. What it yields lets them make so many more."""

    def allow(more: int) -> None:
        STEPS.write_text(f"{more} {uuid.uuid4()}")

    allow(steps)
    try:
        yield allow
    finally:
        STEPS.unlink()


def greedy(max_tokens: int, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **params)


def prompt(length: int, seed: int = 0) -> dict[str, list[int]]:
    return {"prompt_token_ids": list(tiny.prompt(length, seed))}


async def tokens(llm: Any, length: int, max_tokens: int, request_id: str, seed: int = 0, **options: Any) -> list[int]:
    stream = llm.generate(prompt(length, seed), greedy(max_tokens), request_id, **options)
    *_, last = [output async for output in stream]
    assert last.finished
    return list(last.outputs[0].token_ids)


async def until(condition: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        await asyncio.sleep(0.01)


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has ended since
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process stands still. A rank's peers do so with it, before the end of a step."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def heard(llm: AsyncLLM, dp_rank: int) -> None:
    """Returns when the ranks of ``dp_rank`` have read all that was sent to them; they read it while they step, too."""
    with llm.ranks.lock:
        answered = llm.ranks.prepare({}, dp_rank)  # no grammar: only an answer
    await asyncio.wrap_future(answered)


@contextlib.contextmanager
def port() -> Iterator[int]:
    """Of 127.0.0.1: the kernel gives it to nobody else, and who asks for it by its number may listen there."""
    with hold_port() as held:
        yield held.getsockname()[1]


def processes(llm: AsyncLLM) -> dict[str, int]:
    """``agent``, and ``rank 0`` and so on, → process id."""
    agent = llm.ranks._agent.process.pid
    found = {"agent": agent}
    for pid in children(agent):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found |= {f"rank {int(v[5:])}": pid for v in variables if v.startswith(b"RANK=")}
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def left_of(pids: Iterable[int], within_s: float = 30.0) -> list[int]:
    """Which of ``pids`` stay; what was killed at the end takes a moment to go."""
    end = time.monotonic() + within_s
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < end:
        time.sleep(0.01)
    return left


def thread_names(pid: int) -> list[str]:
    return [(task / "comm").read_text().strip() for task in Path(f"/proc/{pid}/task").iterdir()]


def cpu_seconds(pid: int) -> float:
    """Of all threads that the process has now, to the nanosecond where the kernel counts so."""
    tasks = list(Path(f"/proc/{pid}/task").iterdir())
    with contextlib.suppress(FileNotFoundError):
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def remains() -> set[str]:
    """What an engine could leave on this machine."""
    return {str(path) for folder in ("/dev/shm", tempfile.gettempdir()) for path in Path(folder).glob("*torch*")}
