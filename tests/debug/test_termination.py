# SPDX-License-Identifier: Apache-2.0
"""SIGTERM with a watchdog: it ends the process as ever, after the watchdog's thread has spoken, whatever the main
thread does; it stays the program's where the program handles it; forked children end as if there were no watchdog."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

SPEAKS = """
import ctypes, os, signal, sys, threading, time
from vllm.v1.debug.termination import TerminationNotice
{before}
notice, stop = TerminationNotice(), threading.Event()
def watch():
    while not stop.is_set():
        if notice.wait(stop, 0.25):
            os.write(1, b"told\\n")
            notice.die()
thread = threading.Thread(target=watch, daemon=True)
thread.start()
def ready():
    print("ready", flush=True)
{then}
"""
ENDS = {
    # the main thread is in a C call that no signal ends
    "in C": "ctypes.CDLL(None).system(b'echo ready; exec sleep 60')",
    "in Python": "ready()\nwhile True: pass",
    "asleep": "ready()\ntime.sleep(60)",
}


def run(then: str, before: str = "") -> tuple[str, int]:
    """What the program printed after SIGTERM, which it gets once it has said that it is ready; and its exit code."""
    program = subprocess.Popen(
        [sys.executable, "-c", SPEAKS.format(before=before, then=then)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert program.stdout is not None
    try:
        assert program.stdout.readline() == "ready\n"
        time.sleep(0.2)  # so that it mostly is in the call already
        program.send_signal(signal.SIGTERM)
        code = program.wait(30)
        os.set_blocking(program.stdout.fileno(), False)  # what it started may still hold the other end
        return program.stdout.read() or "", code
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()
        program.stdout.close()


@pytest.mark.parametrize("where", ENDS)
def test_the_watchdog_speaks_and_the_signal_ends_the_process(where: str) -> None:
    assert run(ENDS[where]) == ("told\n", -signal.SIGTERM)


def test_it_ends_where_an_event_loop_reads_the_signals() -> None:
    loop = (
        "import asyncio\nasync def main():\n    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)\n"
    )
    assert run(loop + "    ready()\n    await asyncio.sleep(60)\nasyncio.run(main())") == ("told\n", -signal.SIGTERM)


def test_a_handler_of_the_program_stays() -> None:
    mine = "signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b'mine\\n'), os._exit(7)))"
    assert run("ready()\ntime.sleep(60)", before=mine) == ("mine\n", 7)


def test_a_closed_one_leaves_the_default() -> None:
    closed = "stop.set(); notice.wake(); thread.join(); notice.close()\n"
    default = "assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL\n"
    assert run(f"{closed}{default}ready()\ntime.sleep(60)") == ("", -15)
    in_a_thread = (
        f"{closed.replace('notice.close()', '')}\nt = threading.Thread(target=notice.close)\nt.start(); t.join()\n"
    )
    assert run(f"{in_a_thread}ready()\ntime.sleep(60)") == ("", -15)


def test_a_forked_child_ends_at_once_and_alone() -> None:
    fork = (
        "begun, begins = os.pipe()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os.write(begins, b'.')\n"
        "    time.sleep(60)\n"
        "os.read(begun, 1)\n"
        "os.kill(child, signal.SIGTERM)\n"
        "assert os.WTERMSIG(os.waitpid(child, 0)[1]) == 15\n"
        "time.sleep(1)\n"
        "print('alone', flush=True)\n"
        "time.sleep(60)\n"
    )
    done = subprocess.Popen(
        [sys.executable, "-c", SPEAKS.format(before="", then="ready()\n" + fork)], stdout=subprocess.PIPE, text=True
    )
    assert done.stdout is not None
    try:
        assert done.stdout.readline() == "ready\n"
        assert done.stdout.readline() == "alone\n"
        done.terminate()
        assert done.stdout.read() == "told\n"
        assert done.wait(20) == -15
    finally:
        done.kill()
        done.stdout.close()
