# SPDX-License-Identifier: Apache-2.0
"""The demo: SmolLM2 alone, and as a mixture of experts over four ranks, give the dense model's text token for token."""

from __future__ import annotations

import re

import pytest
from demo_run import MAX_TOKENS, run_example


def test_dense_model_alone(dense_folder: str, dense_texts: dict[str, tuple[tuple[int, ...], str]]) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        dense_folder, dtype="float32", max_model_len=256, max_num_batched_tokens=256, kv_cache_memory_bytes=1 << 28
    )
    outputs = llm.generate(list(dense_texts), SamplingParams(temperature=0, max_tokens=MAX_TOKENS), use_tqdm=False)
    llm.shutdown()
    for output in outputs:
        assert (tuple(output.outputs[0].token_ids), output.outputs[0].text) == dense_texts[output.prompt]


@pytest.mark.multiprocess
def test_b60_example_on_four_ranks(dense_texts: dict[str, tuple[tuple[int, ...], str]]) -> None:
    """TP 2 x DP 2, experts over all four: each prompt once, in order, with the dense model's text."""
    options = ["--dtype", "float32", "--max-tokens", str(MAX_TOKENS), "--max-num-batched-tokens", "256"]
    done = run_example(*options, "--max-model-len", "256", "--kv-cache-memory-bytes", str(1 << 26), ranks=4)
    assert done.returncode == 0, done.stderr[-4000:]
    found = re.findall(r"\[ARC B60\] DP rank (\d), Prompt: (.*)\n\s+Generated: (.*)", done.stdout)
    expected = [(str(i // 4), repr(prompt), repr(text)) for i, (prompt, (_, text)) in enumerate(dense_texts.items())]
    assert found == expected


def test_sizes_that_do_not_fit_the_ranks_are_refused() -> None:
    done = run_example("--tensor-parallel-size", "2")
    assert done.returncode == 2
    assert "--tensor-parallel-size 2 does not divide the 1 ranks" in done.stderr


def test_a_mistyped_option_is_refused() -> None:
    done = run_example("--max-token", "three")
    assert done.returncode == 2
    assert "three" in done.stderr
