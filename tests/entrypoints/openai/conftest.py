# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_fakes import save_char_llama
from http_server import ENGINE_ARGS, Server, serving
from inline_engine import InlineEngine


@pytest.fixture(scope="session")
def char_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fp32, one token for each printable character, <s> and </s>: whatever it writes is text. 512 positions."""
    folder = tmp_path_factory.mktemp("char-llama")
    save_char_llama(folder, num_positions=512)
    return folder


@pytest.fixture(scope="module")
def engine(char_llama: Path) -> Iterator[InlineEngine]:
    engine = InlineEngine(str(char_llama), served_model_name="chars", **ENGINE_ARGS)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def server(engine: InlineEngine) -> Iterator[Server]:
    """With all options at their defaults."""
    with serving(engine) as server:
        yield server


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test leaves the engine without requests and without blocks in use."""
    yield
    if "engine" in request.fixturenames:
        request.getfixturevalue("engine").check_idle()
