# SPDX-License-Identifier: Apache-2.0
"""Packages that bring kernels and may be missing or broken."""

from __future__ import annotations

import functools
import importlib

from vllm.logger import init_logger

logger = init_logger(__name__)


@functools.cache
def kernel_package(module: str) -> object | None:
    """``module``; None where it is missing or broken, which is looked for and said once."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:
        logger.warning("%s cannot be loaded (%s): what comes next for its operators runs, slower", module, error)
        return None
