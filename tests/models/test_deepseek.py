# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V2 and V3 compute what transformers computes, however a prompt comes to the cache; and published checkpoints
are named in full."""

from __future__ import annotations

import pytest
import tiny_deepseeks as deepseeks
import tiny_models as tiny

LENGTHS = (1, 2, 15, 17, 64, 200)


@pytest.mark.parametrize("name", deepseeks.NAMES)
def test_greedy_tokens_and_logprobs(name: str, nan_poison: None) -> None:
    """Prompts of 33 tokens and more are expanded, shorter ones and decodes are absorbed."""
    prompts = [tiny.prompt(length) for length in LENGTHS]
    llm = tiny.make_llm(name)
    outputs = tiny.generate(llm, prompts, 32, logprobs=3)
    llm.shutdown()
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        assert tuple(completion.token_ids) == tiny.greedy(name, prompt, 32), f"{name}, prompt of {len(prompt)}"
        expected = tiny.logprobs(name, prompt + tuple(completion.token_ids))[len(prompt) - 1 : -1]
        for step, given in enumerate(completion.logprobs):
            for token_id, logprob in given.items():
                assert logprob.logprob == pytest.approx(float(expected[step, token_id]), abs=1e-4)


@pytest.mark.parametrize("name", deepseeks.NAMES)
def test_the_tiny_models_say_different_things(name: str) -> None:
    distinct = [len(set(tiny.greedy(name, tiny.prompt(length), 32))) for length in LENGTHS]
    assert min(distinct) >= 6, distinct
