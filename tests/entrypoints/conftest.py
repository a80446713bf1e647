# SPDX-License-Identifier: Apache-2.0
"""A tiny Llama folder with a byte-level tokenizer, and an engine whose worker counts instead of computing."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_fakes import FakeWorker, save_byte_llama


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fp32, vocabulary 260 (256 bytes, then <s>, </s>, <|user|>, <|assistant|>), 512 positions, a chat template."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    save_byte_llama(folder, bos_token_id=256, eos_token_id=257, initializer_range=0.2)
    return folder


@pytest.fixture
def fake_worker(monkeypatch: pytest.MonkeyPatch) -> type[FakeWorker]:
    """``LLMEngine`` takes this worker in place of the real one; its class attributes steer it."""
    from vllm.v1.engine import core

    monkeypatch.setattr(core, "Worker", FakeWorker)
    return FakeWorker
