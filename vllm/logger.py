# SPDX-License-Identifier: Apache-2.0
"""Logging: one handler on the ``vllm`` logger, level from ``VLLM_LOGGING_LEVEL``; each line names its rank."""

from __future__ import annotations

import functools
import logging
import os
import sys

_ROOT = "vllm"


class _RankFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        rank = os.environ.get("RANK")
        record.rank = f" rank={rank}" if rank is not None else ""
        return super().format(record)


@functools.cache
def _configure() -> None:
    root = logging.getLogger(_ROOT)
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_RankFormatter("%(levelname)s %(asctime)s%(rank)s [%(name)s] %(message)s", "%H:%M:%S"))
        root.addHandler(handler)
        root.propagate = False
    root.setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper())


def init_logger(name: str) -> logging.Logger:
    """The logger of a module; call it as ``init_logger(__name__)``."""
    _configure()
    return logging.getLogger(name)


@functools.cache
def log_once(logger: logging.Logger, level: int, message: str) -> None:
    """Log ``message`` once in this process."""
    logger.log(level, message)
