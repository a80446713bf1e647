# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator

import poison
import pytest


@pytest.fixture(params=[poison.CANONICAL, 0xFFFFFFFF], ids=hex)
def pattern(request: pytest.FixtureRequest) -> Iterator[int]:
    """New memory holds NaN of these bits."""
    poison.start(request.param)
    yield request.param
    poison.stop()
