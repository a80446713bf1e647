# SPDX-License-Identifier: Apache-2.0
"""A tiny Llama folder with a byte-level tokenizer, and an engine whose worker counts instead of computing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_fakes import FakeWorker, byte_tokenizer


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fp32, vocabulary 260 (256 bytes, then <s>, </s>, <|user|>, <|assistant|>), 512 positions, a chat template."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=256,
        eos_token_id=257,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def fake_worker(monkeypatch: pytest.MonkeyPatch) -> type[FakeWorker]:
    """``LLMEngine`` takes this worker in place of the real one; its class attributes steer it."""
    from vllm.v1.engine import core

    monkeypatch.setattr(core, "Worker", FakeWorker)
    return FakeWorker
