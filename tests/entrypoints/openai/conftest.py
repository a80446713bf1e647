# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_fakes import char_tokenizer
from http_server import ENGINE_ARGS, Server, serving
from inline_engine import InlineEngine


@pytest.fixture(scope="session")
def char_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fp32, one token for each printable character, <s> and </s>: whatever it writes is text. 512 positions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("char-llama")
    tokenizer = char_tokenizer()
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def engine(char_llama: Path) -> Iterator[InlineEngine]:
    engine = InlineEngine(str(char_llama), served_model_name="chars", **ENGINE_ARGS)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="session")
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
