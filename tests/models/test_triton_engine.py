# SPDX-License-Identifier: Apache-2.0
"""The engine with every operator that Triton has from Triton, in its interpreter: transformers' tokens, fp32.

Rows are padded, chunks are cut, every byte that is not written is NaN. The interpreter takes seconds for a step, so the
loads are small; the same kernels meet many more shapes in tests/kernels/triton_kernels.
"""

from __future__ import annotations

from typing import Any

import launcher
import pytest
import rank_checks
import tiny_dense  # noqa: F401  adds to tiny_models
import tiny_hybrids as hybrids
import tiny_models as tiny

from vllm import SamplingParams
from vllm.kernels import table

PROMPTS = [tiny.prompt(length, seed=3) for length in (5, 1, 11)]
NUM_TOKENS = 3


def models_of(name: str) -> Any:
    return tiny if name in tiny.CHECKPOINTS else hybrids


@pytest.fixture(autouse=True)
def _triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KERNELS", "triton")


# The rest differ from these in what no kernel sees, or meet them below.
SLOW = ["llama-rope", "qwen3-window", "mixtral", "qwen3.5-moe"]


@pytest.mark.parametrize(
    "name", ["gemma2", "qwen3-moe", "qwen3-next", *[pytest.param(name, marks=pytest.mark.slow) for name in SLOW]]
)
def test_tokens(name: str, nan_poison: None) -> None:
    models = models_of(name)
    llm = models.make_llm(
        name, max_num_batched_tokens=8, max_num_seqs=4, compilation_config={"cudagraph_capture_sizes": [4, 8]}
    )
    used = {choice.operator: choice.implementation for choice in table.choose("cpu").values()}
    assert {operator for operator, by in used.items() if by != "triton"} == {"linear", "sigmoid_gate"}
    outputs = tiny.generate(llm, PROMPTS, NUM_TOKENS)
    llm.shutdown()
    assert tiny.tokens(outputs) == [models.greedy(name, prompt, NUM_TOKENS) for prompt in PROMPTS]


def on_ranks(folder: str) -> list[tuple[int, ...]]:
    from test_step import make_llm

    llm = make_llm(folder, 2, 2)
    outputs = tiny.generate(llm, PROMPTS[: 2 - rank_checks.own_rank() // 2], NUM_TOKENS)
    llm.shutdown()
    return tiny.tokens(outputs)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["mixtral", pytest.param("qwen3.5-moe", marks=pytest.mark.slow)])
def test_tokens_of_tp_2_dp_2_with_experts_over_all(name: str) -> None:
    models = models_of(name)
    env = {"VLLM_KERNELS": "triton", "TRITON_INTERPRET": "1"}
    found = launcher.run_ranks(on_ranks, 4, models.checkpoint(name), env=env, poison=True, deadline_s=240)
    expected = [models.greedy(name, prompt, NUM_TOKENS) for prompt in PROMPTS[:2]]
    assert found == [expected, expected, expected[:1], expected[:1]]


SAMPLED: list[dict[str, Any]] = [
    {"seed": 5},
    {"seed": 6, "top_k": 20, "top_p": 0.8, "temperature": 0.7},
    {"seed": 7, "min_p": 0.02, "top_p": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "logprobs": 3},
    {"temperature": 0, "presence_penalty": 1.5, "logprobs": 2},
]


def sampled_by(kernels: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[float]]:
    """Tokens and ranks, and log-probabilities, of requests of all kinds in one batch."""
    monkeypatch.setenv("VLLM_KERNELS", kernels)
    llm = tiny.make_llm("llama-rope", max_num_batched_tokens=16, max_num_seqs=4, logprobs_mode="processed_logprobs")
    params = [SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, **kw) for kw in SAMPLED]
    prompts = [{"prompt_token_ids": list(tiny.prompt(3 + i))} for i in range(len(params))]
    outputs = [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)]
    llm.shutdown()
    each = [one for o in outputs for x in o.logprobs or () for one in x.items()]
    return [*(o.token_ids for o in outputs), *((token, x.rank) for token, x in each)], [x.logprob for _, x in each]


def test_a_seed_draws_the_same_tokens(nan_poison: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As plain torch on the CPU, which sums in fp64; of every limit, penalty and log-probability."""
    tokens, logprobs = sampled_by("cpu", monkeypatch)
    by_triton, logprobs_by_triton = sampled_by("triton", monkeypatch)
    assert by_triton == tokens
    assert logprobs_by_triton == pytest.approx(logprobs, abs=1e-4)
