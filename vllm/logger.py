# SPDX-License-Identifier: Apache-2.0
"""Logging: one handler on the ``vllm`` logger, level from ``VLLM_LOGGING_LEVEL``; each line names its rank."""

from __future__ import annotations

import functools
import logging
import os
import sys

from vllm import envs
from vllm.launchers import rank_label

_ROOT = "vllm"


class _RankFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        rank = rank_label()
        record.rank = f" rank={rank}" if rank is not None else ""
        return super().format(record)


@functools.cache
def _configure() -> None:
    if os.environ.get("VLLM_CONFIGURE_LOGGING") == "0":
        return
    root = logging.getLogger(_ROOT)
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_RankFormatter("%(levelname)s %(asctime)s%(rank)s [%(name)s] %(message)s", "%H:%M:%S"))
        root.addHandler(handler)
        root.propagate = False
    text = envs.VLLM_LOGGING_LEVEL.strip().upper() or "INFO"
    level = {"TRACE": 1}.get(text, int(text) if text.isdecimal() else logging.getLevelName(text))
    known = isinstance(level, int)
    root.setLevel(level if known else logging.INFO)
    if not known:
        root.warning("VLLM_LOGGING_LEVEL=%r is no level, INFO is taken; give DEBUG, INFO, WARNING or a number", text)


def init_logger(name: str) -> logging.Logger:
    """The logger of a module; call it as ``init_logger(__name__)``."""
    _configure()
    return logging.getLogger(name)


@functools.cache
def log_once(logger: logging.Logger, level: int, message: str) -> None:
    """Log ``message`` once in this process."""
    logger.log(level, message)
