# SPDX-License-Identifier: Apache-2.0
"""Weights in place, sleep and beam search over several ranks; the right tokens are transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import rank_checks
import tiny_models as tiny
from launcher import run_ranks
from layout_checks import rank_llm

pytestmark = pytest.mark.multiprocess

# The second DP rank has nothing to do, or less.
PROMPTS = {0: [tiny.prompt(40), tiny.prompt(7)], 1: []}


def rounds(folder: str, other: str, tp: int, dp: int) -> list[list[tuple[int, ...]]]:
    """On a rank: tokens before new weights, after them, after each level of sleep."""
    from safetensors.torch import load_file

    llm = rank_llm(folder, tp, dp, enable_prefix_caching=True)
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    named = [pair for file in sorted(Path(other).glob("*.safetensors")) for pair in load_file(file).items()]
    prompts = PROMPTS[rank_checks.own_rank() // tp]
    result = [tiny.tokens(tiny.generate(llm, prompts, 6))]
    model.load_weights(named)
    result.append(tiny.tokens(tiny.generate(llm, prompts, 6)))
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up(["weights"])
        if level == 2:
            model.load_weights(reversed(named))
        llm.wake_up(["kv_cache"])
        result.append(tiny.tokens(tiny.generate(llm, prompts, 6)))
    llm.llm_engine.scheduler.check_integrity()
    llm.shutdown()
    return result


@pytest.mark.parametrize(
    ("name", "tp", "dp"), [("llama", 2, 1), ("qwen3-moe", 2, 1), ("qwen3-moe", 1, 2), ("mixtral", 2, 2)]
)
def test_new_weights_and_sleep(name: str, tp: int, dp: int) -> None:
    results = run_ranks(rounds, tp * dp, tiny.checkpoint(name), tiny.checkpoint(name, 3), tp, dp, poison=True)
    for rank, result in enumerate(results):
        before, *after = ([tiny.greedy(name, p, 6, seed) for p in PROMPTS[rank // tp]] for seed in (0, 3, 3, 3))
        assert result == [before, *after]


def beams(folder: str) -> list[Any]:
    from vllm.sampling_params import BeamSearchParams

    llm = rank_llm(folder, 1, 2, max_logprobs=32)
    own = rank_checks.own_rank()
    params = BeamSearchParams(beam_width=2 + own, max_tokens=3 + 4 * own, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(tiny.prompt(5 + own))}] * (1 + own)
    found = llm.beam_search(prompts, params, concurrency_limit=1)
    again = llm.beam_search(prompts if own else [], params)
    llm.shutdown()
    return [[[s.tokens for s in output.sequences] for output in outputs] for outputs in (found, again)]


def alone(width: int, length: int, num_tokens: int) -> list[list[int]]:
    import torch

    ids = torch.tensor([tiny.prompt(length)])
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.inference_mode():
        return (
            tiny.reference_model("qwen3-moe")
            .generate(ids, max_new_tokens=num_tokens, num_beams=width, num_return_sequences=width, **options)
            .tolist()
        )


def test_beam_search_in_lockstep() -> None:
    """Rounds of different number and width, one rank idle in the second search."""
    (first, none), (second, again) = run_ranks(beams, 2, tiny.checkpoint("qwen3-moe"), poison=True)
    assert first == [alone(2, 5, 3)]
    assert none == []
    assert second == again == [alone(3, 6, 7)] * 2
