# SPDX-License-Identifier: Apache-2.0
"""Every architecture computes what transformers computes: greedy tokens in fp32, log-probabilities within 1e-4."""

from __future__ import annotations

import pytest
import tiny_models as tiny
import torch

LENGTHS = (1, 2, 15, 16, 17, 64, 200)


@pytest.mark.parametrize("name", tiny.NAMES)
def test_greedy_tokens_and_logprobs(name: str, nan_poison: None) -> None:
    prompts = [tiny.prompt(length) for length in LENGTHS]
    llm = tiny.make_llm(name)
    outputs = tiny.generate(llm, prompts, 64, logprobs=3)
    llm.shutdown()
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        assert tuple(completion.token_ids) == tiny.greedy(name, prompt, 64), f"{name}, prompt of {len(prompt)}"
        expected = tiny.logprobs(name, prompt + tuple(completion.token_ids))[len(prompt) - 1 : -1]
        for step, given in enumerate(completion.logprobs):
            for token_id, logprob in given.items():
                assert logprob.logprob == pytest.approx(float(expected[step, token_id]), abs=1e-4)
            assert given[completion.token_ids[step]].rank == 1


@pytest.mark.parametrize("name", ["llama", "qwen3-window", "qwen3-moe"])
def test_prompt_logprobs_over_chunks(name: str) -> None:
    """Also where a prompt is cut into chunks, and the scored positions with it."""
    prompts = [tiny.prompt(length) for length in (1, 2, 50)]
    llm = tiny.make_llm(name, max_num_batched_tokens=16, max_num_seqs=4)
    outputs = tiny.generate(llm, prompts, 2, prompt_logprobs=1)
    llm.shutdown()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        expected = tiny.logprobs(name, prompt)
        for position, given in enumerate(output.prompt_logprobs[1:], start=1):
            for token_id, logprob in given.items():
                assert logprob.logprob == pytest.approx(float(expected[position - 1, token_id]), abs=1e-4)
            assert prompt[position] in given


def test_prompt_logprobs_of_a_long_prompt() -> None:
    """Scored in pieces of 256 rows: each piece has its own rows' hidden states."""
    prompt = tiny.prompt(310)
    llm = tiny.make_llm("qwen3")
    (output,) = tiny.generate(llm, [prompt], 1, prompt_logprobs=0)
    llm.shutdown()
    given = torch.tensor([one[prompt[i]].logprob for i, one in enumerate(output.prompt_logprobs) if one])
    expected = tiny.logprobs("qwen3", prompt)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", tiny.NAMES)
def test_the_tiny_models_say_different_things(name: str) -> None:
    """A model that repeats one token cannot show a wrong decode step."""
    distinct = [len(set(tiny.greedy(name, tiny.prompt(length), 64))) for length in LENGTHS]
    assert min(distinct) >= 6, distinct
    assert sum(distinct) / len(distinct) >= 12, distinct


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_no_worse_than_transformers(dtype: str) -> None:
    """The kind of fault: an intermediate that is rounded where transformers keeps fp32. Both are compared with fp32."""
    prompt = tiny.prompt(120)
    exact = tiny.logprobs("llama", prompt)
    half = tiny.AutoModelForCausalLM.from_pretrained(tiny.checkpoint("llama"), dtype=getattr(torch, dtype)).eval()
    with torch.inference_mode():
        theirs = half(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    llm = tiny.make_llm("llama", dtype=dtype)
    (output,) = tiny.generate(llm, [prompt], 1, prompt_logprobs=0)
    llm.shutdown()
    ours = torch.tensor([given[prompt[i]].logprob for i, given in enumerate(output.prompt_logprobs) if given])
    target = torch.tensor(prompt[1:])[:, None]
    reference = exact[:-1].gather(1, target)[:, 0]
    our_error = (ours - reference).abs().mean()
    their_error = (theirs[:-1].gather(1, target)[:, 0] - reference).abs().mean()
    assert our_error <= 1.25 * their_error, f"mean error {our_error:.2e}, transformers' {their_error:.2e}"
