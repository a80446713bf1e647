# SPDX-License-Identifier: Apache-2.0
"""The worker of this process, as code written for upstream reaches it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


class Executor:
    """``driver_worker`` is this rank's only worker: every rank is a process of its own that calls the same methods."""

    def __init__(self, driver_worker: Any) -> None:
        self.driver_worker = driver_worker

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """``[result]`` of a method of the worker, by name, or of a function that is given the worker first.

        Raises AttributeError for a method that the worker has not. ``timeout`` has no use: it runs in this thread.
        """
        self.driver_worker.wait_for_device()
        run = getattr(self.driver_worker, method) if isinstance(method, str) else _bound(method, self.driver_worker)
        return [run(*args, **(kwargs or {}))]


def _bound(function: Callable[..., Any], worker: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(worker, *args, **kwargs)
