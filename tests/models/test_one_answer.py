# SPDX-License-Identifier: Apache-2.0
"""Law 7 in one process: greedy fp32 tokens do not depend on how requests are batched, cut, preempted or cached.

The kind of fault: anything of another request, of padding or of an earlier step that reaches a row. The reference is
transformers, one prompt at a time. All of it runs with uninitialised memory NaN.
"""

from __future__ import annotations

import random

import pytest
import tiny_models as tiny

pytestmark = pytest.mark.usefixtures("nan_poison")
NAMES = ("llama", "qwen3-window", "mixtral", "qwen3-moe")
NUM_TOKENS = 24
LENGTHS = (1, 3, 8, 15, 16, 17, 31, 33, 40, 64, 5, 7, 90, 12, 2, 150, 20)
PROMPTS = [tiny.prompt(length, seed=1) for length in LENGTHS]


def expected(name: str, prompts: list[tuple[int, ...]] = PROMPTS) -> list[tuple[int, ...]]:
    return [tiny.greedy(name, prompt, NUM_TOKENS) for prompt in prompts]


def run(name: str, prompts: list[tuple[int, ...]] = PROMPTS, **kwargs: object) -> list[tuple[int, ...]]:
    llm = tiny.make_llm(name, **kwargs)
    try:
        result = tiny.tokens(tiny.generate(llm, prompts, NUM_TOKENS))
        llm.llm_engine.scheduler.check_integrity()
        return result
    finally:
        llm.shutdown()


@pytest.mark.parametrize("name", NAMES)
def test_alone_or_among_seventeen(name: str) -> None:
    assert run(name) == expected(name)
    assert run(name, max_num_seqs=1) == expected(name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunked_prefill(name: str, chunk: int) -> None:
    prompts = PROMPTS[:9] if chunk == 1 else PROMPTS
    got = run(name, prompts, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 6))
    assert got == expected(name, prompts)


@pytest.mark.parametrize("name", NAMES)
def test_forced_preemption(name: str) -> None:
    """26 blocks of 8 tokens for 17 requests that want up to 174 each."""
    llm = tiny.make_llm(name, block_size=8, num_gpu_blocks_override=27, max_model_len=200, max_num_batched_tokens=64)
    preemptions = []
    scheduler = llm.llm_engine.scheduler
    original = scheduler._preempt
    scheduler._preempt = lambda request: (preemptions.append(request.request_id), original(request))
    try:
        assert tiny.tokens(tiny.generate(llm, PROMPTS, NUM_TOKENS)) == expected(name)
        scheduler.check_integrity()
    finally:
        llm.shutdown()
    assert preemptions, "the cache was large enough: nothing was preempted"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_block_sizes_and_arrival_order(name: str, block_size: int) -> None:
    order = random.Random(block_size).sample(range(len(PROMPTS)), len(PROMPTS))
    got = run(name, [PROMPTS[i] for i in order], block_size=block_size, max_num_batched_tokens=48)
    assert got == [expected(name)[i] for i in order]


@pytest.mark.parametrize("name", NAMES)
def test_prefix_cache_hit_at_every_offset_of_a_block(name: str) -> None:
    block_size, base, tail = 8, tiny.prompt(40, seed=2), tiny.prompt(9, seed=3)
    prompts = [base[:shared] + tail for shared in range(16, 16 + block_size + 1)]
    llm = tiny.make_llm(name, block_size=block_size, enable_prefix_caching=True)
    try:
        tiny.generate(llm, [base], 1)
        for prompt in prompts:
            (output,) = tiny.generate(llm, [prompt], NUM_TOKENS)
            assert tiny.tokens([output]) == expected(name, [prompt])
            shared = len(prompt) - len(tail)
            assert output.num_cached_tokens >= shared // block_size * block_size, f"{shared} tokens shared"
        # The whole prompt is cached: its last token runs again all the same.
        again = tiny.generate(llm, [base + tail] * 3, NUM_TOKENS)
        assert tiny.tokens(again) == expected(name, [base + tail]) * 3
    finally:
        llm.shutdown()


@pytest.mark.parametrize("name", NAMES)
def test_padded_rows(name: str) -> None:
    """Token counts padded up to capture sizes: pad rows in every step, and none of them may be seen."""
    sizes = [8, 16, 24, 48, 100]
    got = run(name, max_num_batched_tokens=96, compilation_config={"cudagraph_capture_sizes": sizes})
    assert got == expected(name)
    got = run(name, PROMPTS[:3], compilation_config={"cudagraph_capture_sizes": sizes})
    assert got == expected(name, PROMPTS[:3])
