# SPDX-License-Identifier: Apache-2.0
"""SIGTERM ends a rank as ever, once its watchdog has said where it stood.

A launcher that sees one rank die ends the others within a tenth of a second, before one that waits has learnt from its
backend that anything is wrong. The signal's number arrives in a pipe whatever the main thread does, so that the
watchdog's thread can speak for it.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading

_SPEAKS_FOR_S = 1.0
_open: list[TerminationNotice] = []


class TerminationNotice:
    """Where the program handles SIGTERM itself, or the engine is made outside the main thread, nothing is changed."""

    def __init__(self) -> None:
        self._told = threading.Event()
        self._reader = self._writer = -1
        in_main = threading.current_thread() is threading.main_thread()
        if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        _open.append(self)
        if (others := signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)) != -1:
            signal.set_wakeup_fd(others)  # an event loop's; the handler still runs in the main thread
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, *_: object) -> None:
        if self in _open:
            os.write(self._writer, bytes([signal.SIGTERM]))
            self._told.wait(_SPEAKS_FOR_S)
        self.die()

    def wait(self, stop: threading.Event, seconds: float) -> bool:
        """Until ``stop`` is set and :meth:`wake` called, SIGTERM has come, or the time is over: whether it has come."""
        if self._reader < 0:
            stop.wait(seconds)
            return False
        readable, _, _ = select.select([self._reader], [], [], seconds)
        return bool(readable) and signal.SIGTERM in os.read(self._reader, 1 << 10)

    def wake(self) -> None:
        if self._writer >= 0:
            os.write(self._writer, b"\0")

    def die(self) -> None:
        """End by SIGTERM's default; on any thread."""
        self._told.set()
        ctypes.CDLL(None).signal(signal.SIGTERM, None)
        os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        """From now on SIGTERM ends the process at once. No other thread waits any more."""
        if self not in _open:
            return
        _open.remove(self)
        if threading.current_thread() is threading.main_thread():
            if (current := signal.set_wakeup_fd(-1)) != self._writer:
                signal.set_wakeup_fd(current)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.close(self._reader)
            os.close(self._writer)
            self._reader = self._writer = -1


def _close_all() -> None:
    for notice in tuple(_open):
        notice.close()


# A child without the thread that reads the pipe has nobody to speak for it.
os.register_at_fork(after_in_child=_close_all)
