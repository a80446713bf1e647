# SPDX-License-Identifier: Apache-2.0
"""The agent's process: starts the ranks, torch's way or Ray's, and ends with its front end.

Nothing outlives the front end, however it ends: the kernel ends the agent with it, and each rank with its agent. Each
also hears of the other once a second, since a process that is stopped is as lost as one that is dead.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from vllm.v1.engine.launch import ALIVE, KILL_RANKS, LOST, REFUSED, Launch, die_with, leave, run_agent
from vllm.v1.engine.ray_launch import RayAgent


def _follow(front: socket.socket, silence_s: float, parent: int, kill_ranks: Callable[[int, set[int]], None]) -> None:
    """Say that the agent lives, and end it and all ranks once its front end does not."""
    now = time.monotonic()
    quiet_s = 0.0
    while True:
        with contextlib.suppress(OSError):  # full, or the other end is gone: then there is something to read
            front.send(ALIVE)
        readable, _, _ = select.select([front], [], [], 1.0)
        before, now = now, time.monotonic()
        quiet_s = 0.0 if readable else quiet_s + min(now - before, 2.0)  # this process, too, may have been stopped
        said = ALIVE
        if readable:
            try:
                said = front.recv(1 << 12)
            except ConnectionResetError:  # it ended with words of this process unread
                said = b""
        for attempt, pids in re.findall(KILL_RANKS + rb"(\d+):([\d,]*);", said):
            kill_ranks(int(attempt), set(map(int, filter(None, pids.split(b",")))))
        if not said or quiet_s > silence_s:
            why = "has ended" if not said else f"has given no sign of life for {silence_s:g} s"
            os.write(2, f"vllm: the front end {why}: its ranks end\n".encode())
            if said and os.getppid() == parent:
                os.kill(parent, signal.SIGKILL)  # stopped: its clients would wait for ever
            os._exit(1)


def _kill_children(_attempt: int, pids: set[int]) -> None:
    """At once, those too that are stopped and would answer no other signal; not those that were started since."""
    for task in Path("/proc/self/task").iterdir():
        for pid in pids & set(map(int, (task / "children").read_text().split())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def main(argv: list[str]) -> int:
    given = json.loads(argv[0])
    die_with(given["parent"])
    launch = Launch(**given["launch"])
    front = socket.socket(fileno=given["fd"])
    run: Callable[[], int] = functools.partial(run_agent, launch)
    kill_ranks: Callable[[int, set[int]], None] = _kill_children
    if launch.on_ray:
        agent = RayAgent(launch)
        run, kill_ranks = agent.run, lambda attempt, _pids: agent.killed.add(attempt)
    else:  # whoever stops a service tells all its processes: the front end lets requests end. The ranks inherit this.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    followed = (front, launch.silence_s, given["parent"], kill_ranks)
    threading.Thread(target=_follow, args=followed, daemon=True).start()
    try:
        return run()
    except (ValueError, RuntimeError) as error:
        front.sendall((REFUSED if isinstance(error, ValueError) else LOST) + str(error).encode())
        return 2


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
