# SPDX-License-Identifier: Apache-2.0
"""The plain torch attention, which devices run: windows, prefix hits and preemption as with the C++ kernel."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models as tiny

LENGTHS = (1, 15, 19, 20, 21, 24, 25, 70)


@pytest.fixture(autouse=True)
def _backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "TORCH_PAGED")


@pytest.mark.parametrize("name", ["qwen3-window", "mixtral-window"])
def test_windows(name: str, nan_poison: None) -> None:
    """Windows of 24 and 20: prompts just below, at and above, cut into chunks, and decoded past the edge."""
    prompts = [tiny.prompt(length, seed=7) for length in LENGTHS]
    llm = tiny.make_llm(name, max_num_batched_tokens=33)
    assert tiny.tokens(tiny.generate(llm, prompts, 12)) == [tiny.greedy(name, p, 12) for p in prompts]
    llm.shutdown()


def test_prefix_hits_and_preemption(nan_poison: None) -> None:
    prompts = [tiny.prompt(40, seed=7) + tiny.prompt(length, seed=8) for length in (3, 9, 20)]
    llm = tiny.make_llm("llama-rope", enable_prefix_caching=True, num_gpu_blocks_override=12, max_model_len=96)
    scheduler = llm.llm_engine.scheduler
    schedule, preempted = scheduler.schedule, set()

    def watched() -> Any:
        output = schedule()
        preempted.update(output.preempted_req_ids)
        return output

    scheduler.schedule = watched
    for _ in range(2):
        outputs = tiny.generate(llm, prompts, 24)
        assert tiny.tokens(outputs) == [tiny.greedy("llama-rope", p, 24) for p in prompts]
    assert sum(output.num_cached_tokens for output in outputs) > 0
    assert preempted
    llm.shutdown()
