# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator

import launcher
import pytest


@pytest.fixture(autouse=True)
def _nothing_left_running() -> Iterator[None]:
    yield
    assert launcher.living_ranks() == []


@pytest.fixture(scope="session", autouse=True)
def _stop_launcher() -> Iterator[None]:
    yield
    launcher.stop()
