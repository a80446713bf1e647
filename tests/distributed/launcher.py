# SPDX-License-Identifier: Apache-2.0
"""Run a function on N ranks, each a process of its own, under a hard deadline; nothing is left running afterwards.

One helper process imports torch and the test's module once; every run forks fresh ranks from it, which takes
milliseconds and gives each run its own environment, groups and rendezvous port. A rank that returns, raises, dies or
stalls comes back as a :class:`RankOutcome`; at the deadline all ranks print their stacks and are killed. The ranks
die with the helper, and the helper dies with the process that started it.

    def work(scale):                       # at a module's top level; every rank runs it
        init_distributed_environment()
        ...
    values = run_ranks(work, 4, 2.0)       # by rank; raises when any rank failed
    outcomes = rank_outcomes(work, 4, 2.0) # for tests of failures
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import faulthandler
import gc
import importlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

_START = """
import importlib, json, sys
settings = json.loads(sys.argv[1])
sys.path[:] = settings["path"]
importlib.import_module(settings["module"])._serve(settings)
"""
_GRACE_S = 45.0  # for the helper to report after the ranks' deadline
_END_S = 15.0  # for a rank that has reported, or that is asked for its stacks, to end by itself


@dataclasses.dataclass(frozen=True)
class RankOutcome:
    """How one rank ended.

    Attributes:
        status: ``ok``, ``raised``, ``died`` or ``deadline``.
        value: what the function returned (``ok``).
        exception: what it raised, where that can be pickled; ``error`` is its traceback as text.
        exitcode: of the process; negative for a signal.
        output: what it wrote to stdout and stderr.
        seconds: until it reported, or until it was found dead.
    """

    rank: int
    status: str
    value: Any = None
    exception: BaseException | None = None
    error: str = ""
    exitcode: int | None = None
    output: str = ""
    seconds: float = 0.0


def rank_outcomes(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    deadline_s: float = 120.0,
    env: Mapping[str, str] | None = None,
    poison: bool = False,
) -> list[RankOutcome]:
    """Run ``function(*args)`` on ``world_size`` ranks with torchrun's variables set; the outcomes by rank.

    Args:
        env: variables laid over this process's.
        poison: memory that torch hands out uninitialised is NaN, on every rank in another pattern (``poison.py``).
    """
    test = os.environ.get("PYTEST_CURRENT_TEST", "none").rpartition(" (")[0] or "none"  # the pattern is the test's own
    return _helper().run(function, world_size, args, deadline_s, dict(env or {}), test if poison else "")


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
    """:func:`rank_outcomes`, reduced to the values; ``AssertionError`` with every failed rank's story otherwise."""
    outcomes = rank_outcomes(function, world_size, *args, **options)
    failed = [o for o in outcomes if o.status != "ok"]
    if failed:
        stories = [f"rank {o.rank} {o.status} (exit code {o.exitcode})\n{o.error}\n{o.output[-4000:]}" for o in failed]
        raise AssertionError(f"{len(failed)} of {world_size} ranks failed\n" + "\n".join(stories))
    return [o.value for o in outcomes]


def hold_port() -> socket.socket:
    """While this is open, the system hands its port to no other socket; a server that reuses addresses, as all do here,
    may listen there."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def free_port() -> int:
    """Held for as long as this process lives."""
    _held.append(hold_port())
    return _held[-1].getsockname()[1]


_held: list[socket.socket] = []


def living_ranks(patience_s: float = 20.0) -> list[int]:
    """Process ids in the helper's process group other than its own that do not go; empty between runs. What a rank
    started itself ends with it, or a moment later."""
    until = time.monotonic() + patience_s
    while (found := _in_group()) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def _in_group() -> list[int]:
    if _the_helper is None:
        return []
    group = _the_helper.process.pid
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != group:
            with contextlib.suppress(OSError):
                if os.getpgid(int(entry)) == group:
                    found.append(int(entry))
    return found


# -- the side of the tests

_the_helper: _Helper | None = None


def _helper() -> _Helper:
    global _the_helper
    if _the_helper is None or _the_helper.process.poll() is not None:
        _the_helper = _Helper()
        atexit.register(stop)
    return _the_helper


def stop() -> None:
    """Kill the helper and whatever it started; the next run starts a new one."""
    global _the_helper
    if _the_helper is not None:
        _the_helper.stop()
        _the_helper = None


class _Helper:
    def __init__(self) -> None:
        self.connection, remote = Pipe()
        # Outcomes and calls are pickled by module name, so the helper imports this file by the name it has here.
        settings = json.dumps({"fd": remote.fileno(), "path": sys.path, "parent": os.getpid(), "module": __name__})
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, settings],
            pass_fds=[remote.fileno()],
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        )
        remote.close()

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        args: tuple[Any, ...],
        deadline_s: float,
        env: dict[str, str],
        poison: str,
    ) -> list[RankOutcome]:
        call = pickle.dumps((function, args))
        with hold_port() as held:
            port = str(held.getsockname()[1])
            env = {"GLOO_SOCKET_IFNAME": "lo", **env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            return self._run(pickle.dumps((function.__module__, call, world_size, deadline_s, env, poison)), deadline_s)

    def _run(self, request: bytes, deadline_s: float) -> list[RankOutcome]:
        patience_s = deadline_s + _GRACE_S + 60  # the first run imports the test's module
        try:
            self.connection.send_bytes(request)
            if self.connection.poll(patience_s):
                return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError) as error:
            stop()
            raise AssertionError("the ranks' helper process died") from error
        except BaseException:
            stop()
            raise
        stop()
        raise AssertionError(f"the ranks' helper process did not report within {patience_s:.0f} s")

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()


# -- the side of the helper

_PR_SET_PDEATHSIG = 1


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _serve(settings: dict[str, Any]) -> None:
    _die_with(settings["parent"])
    import torch

    # Here once, not in each rank: a third of the time of a short run. It reads no environment and starts no thread.
    import vllm.entrypoints.llm  # noqa: F401

    torch.set_num_threads(1)
    connection = Connection(settings["fd"])
    while True:
        try:
            module, call, world_size, deadline_s, env, poison = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        error = ""
        try:
            importlib.import_module(module)
        except BaseException:
            error = traceback.format_exc()
        if error:
            outcomes = [RankOutcome(rank, "raised", error=error) for rank in range(world_size)]
        else:
            gc.freeze()  # what is here for all ranks stays shared between them
            outcomes = _run_ranks(call, world_size, deadline_s, env, poison)
        # Not connection.send: torch makes that share tensors between processes, and these ranks are gone.
        connection.send_bytes(pickle.dumps(outcomes))


def _run_ranks(call: bytes, world_size: int, deadline_s: float, env: dict[str, str], poison: str) -> list[RankOutcome]:
    gate_read, gate_write = os.pipe()  # ranks that are done wait here, so that none hangs up on a slower one
    logs = [os.memfd_create(f"rank{rank}") for rank in range(world_size)]
    readers: list[Connection] = []
    pids: list[int] = []
    helper = os.getpid()
    for rank in range(world_size):
        reader, writer = Pipe(duplex=False)
        pid = os.fork()
        if pid == 0:
            os.close(gate_write)
            os.dup2(logs[rank], 1)
            os.dup2(logs[rank], 2)
            _be_rank(helper, call, rank, world_size, {**env}, poison, writer)
            os.read(gate_read, 1)
            os._exit(0)
        writer.close()
        readers.append(reader)
        pids.append(pid)
    os.close(gate_read)
    start = time.monotonic()
    reports: dict[int, RankOutcome] = {}
    while len(reports) < world_size:
        left = start + deadline_s - time.monotonic()
        pending = {reader: rank for rank, reader in enumerate(readers) if rank not in reports}
        ready = wait(list(pending), max(left, 0))
        if not ready and left <= 0:
            break
        for reader in ready:
            rank = pending[reader]  # type: ignore[index]
            try:
                report = pickle.loads(reader.recv_bytes())  # type: ignore[union-attr]
            except (EOFError, OSError):
                report = RankOutcome(rank, "died")
            reports[rank] = dataclasses.replace(report, seconds=time.monotonic() - start)
    for rank in set(range(world_size)) - reports.keys():
        reports[rank] = RankOutcome(rank, "deadline", error=f"no result within {deadline_s} s", seconds=deadline_s)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[rank], signal.SIGUSR1)  # it prints its stacks, and ends
    # One that is stopped does neither.
    late_end = time.monotonic() + _END_S
    late = [_reap(pids[rank], late_end) if reports[rank].status == "deadline" else None for rank in range(world_size)]
    os.close(gate_write)
    outcomes = []
    for rank, pid in enumerate(pids):
        exitcode = late[rank]
        if exitcode is None:
            exitcode = _reap(pid, time.monotonic() + _END_S)
        os.lseek(logs[rank], 0, os.SEEK_SET)
        with os.fdopen(logs[rank], "rb") as log:
            output = log.read().decode(errors="replace")
        readers[rank].close()
        outcomes.append(dataclasses.replace(reports[rank], exitcode=exitcode, output=output))
    return outcomes


def _reap(pid: int, end: float) -> int:
    """Its exit code, once it has ended; it is killed at ``end``."""
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= end:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        time.sleep(0.005)


def _poison(test: str, rank: int) -> None:
    import torch
    from poison import pattern_of, start

    start(pattern_of(test, rank))
    torch.set_deterministic_debug_mode("error")


def _be_rank(
    helper: int, call: bytes, rank: int, world_size: int, env: dict[str, str], poison: str, writer: Connection
) -> None:
    _die_with(helper)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True, chain=True)  # and then the default, which ends it
    os.environ.update(env)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    try:
        if poison:
            _poison(poison, rank)
        function, args = pickle.loads(call)
        report = RankOutcome(rank, "ok", value=function(*args))
        payload = pickle.dumps(report)
    except BaseException as error:
        report = RankOutcome(rank, "raised", exception=error, error=traceback.format_exc())
        try:
            payload = pickle.dumps(report)
            pickle.loads(payload)
        except Exception:
            payload = pickle.dumps(dataclasses.replace(report, exception=None))
    sys.stdout.flush()
    sys.stderr.flush()
    writer.send_bytes(payload)
    writer.close()
