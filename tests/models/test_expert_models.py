# SPDX-License-Identifier: Apache-2.0
"""The architectures with routed experts beside Mixtral and Qwen3-MoE: transformers' tokens in fp32, in one process and
over ranks, with uninitialised memory NaN."""

from __future__ import annotations

from typing import Any

import poison
import pytest
import tiny_experts
import tiny_models as tiny
from layout_checks import check

LENGTHS = (1, 17, 64, 30, 150, 25)
NUM_TOKENS = 24


@pytest.fixture(params=[poison.CANONICAL, 0xFFFFFFFF], ids=hex)
def pattern(request: pytest.FixtureRequest) -> Any:
    poison.start(request.param)
    yield request.param
    poison.stop()


@pytest.mark.parametrize("name", tiny_experts.NAMES)
def test_greedy_tokens_and_logprobs(name: str, pattern: int) -> None:
    """Whole prompts under the one pattern; ragged chunks in padded steps under the other."""
    ragged = {"max_num_batched_tokens": 24, "compilation_config": {"cudagraph_capture_sizes": [4, 16, 24]}}
    prompts = [tiny.prompt(length) for length in LENGTHS]
    llm = tiny.make_llm(name, **({} if pattern == poison.CANONICAL else {**ragged, "max_num_seqs": 4}))
    outputs = tiny.generate(llm, prompts, NUM_TOKENS, logprobs=2)
    llm.llm_engine.scheduler.check_integrity()
    llm.shutdown()
    assert tiny.tokens(outputs) == [tiny.greedy(name, prompt, NUM_TOKENS) for prompt in prompts]
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        expected = tiny.logprobs(name, prompt + tuple(completion.token_ids))[len(prompt) - 1 : -1]
        for step, given in enumerate(completion.logprobs):
            for token_id, logprob in given.items():
                assert logprob.logprob == pytest.approx(float(expected[step, token_id]), abs=1e-4)


@pytest.mark.parametrize("name", tiny_experts.NAMES)
def test_the_tiny_models_say_different_things(name: str) -> None:
    distinct = [len(set(tiny.greedy(name, tiny.prompt(length), NUM_TOKENS))) for length in LENGTHS]
    assert sum(distinct) / len(distinct) >= 9, distinct


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["qwen2-moe", "glm4-moe", "minimax-m2", "gpt-oss"])
def test_tp_2_dp_2_ep(name: str) -> None:
    check(tiny, name, 2, 2, True, "cpu", ["b60", "one-long", "idle-rank"], 0.001)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("name", "tp"), [("gpt-oss", 2), ("minimax-m2", 4)])
def test_tp_2_and_4_without_ep(name: str, tp: int) -> None:
    """Slices of one expert, whose down bias counts once; two key heads on four ranks, in one sum of squares once."""
    check(tiny, name, tp, 1, False, "cpu", ["b60", "one-long"], 0)
