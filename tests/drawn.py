# SPDX-License-Identifier: Apache-2.0
"""Hypothesis. Where it is not installed, as on a runner of the device suite, tests that draw their cases are skipped,
and the rest of their file is there to import."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

try:
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st
except ModuleNotFoundError:
    HealthCheck = Phase = st = MagicMock()  # type: ignore[misc]

    def given(*_: Any, **__: Any) -> Any:  # type: ignore[misc]
        return pytest.mark.skip(reason="hypothesis is not installed")

    def settings(*_: Any, **__: Any) -> Any:  # type: ignore[no-redef]
        return lambda test: test


__all__ = ["HealthCheck", "Phase", "given", "settings", "st"]
