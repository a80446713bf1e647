# SPDX-License-Identifier: Apache-2.0
"""Tiny models of each architecture on the device, in fp32: transformers' tokens, in mixed batches, chunked, and over
cache blocks that others have left."""

from __future__ import annotations

import device_models
import pytest
import tiny_models as tiny
import torch

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("device", "nan_memory")]

LENGTHS = (5, 1, 70, 17)


@pytest.mark.parametrize("name", device_models.NAMES)
def test_transformers_tokens(name: str) -> None:
    """The longest prompt is cut into chunks by the token budget; the second round takes the first one's blocks."""
    llm = device_models.module_of(name).make_llm(
        name, max_num_batched_tokens=48, max_model_len=160, num_gpu_blocks_override=24
    )
    for seed in (0, 1):
        prompts = [tiny.prompt(length, seed=seed) for length in LENGTHS]
        outputs = tiny.generate(llm, prompts, 12)
        for prompt, got in zip(prompts, tiny.tokens(outputs), strict=True):
            device_models.assert_transformers_tokens(name, prompt, got)
    llm.llm_engine.scheduler.check_integrity()
    llm.shutdown()


def test_half_precision_stays_near(device: str) -> None:
    """In bfloat16, the type that cards run: log-probabilities near those of fp32, and none is NaN."""
    name = "qwen3-moe-wide"
    llm = tiny.make_llm(name, dtype="bfloat16")
    prompts = [tiny.prompt(length) for length in LENGTHS]
    for output, prompt in zip(tiny.generate(llm, prompts, 8, logprobs=1), prompts, strict=True):
        got = tuple(output.outputs[0].token_ids)
        right = tiny.logprobs(name, prompt + got)[len(prompt) - 1 : -1]
        ours = torch.tensor([step[token].logprob for step, token in zip(output.outputs[0].logprobs, got, strict=True)])
        theirs = right[torch.arange(len(got)), torch.tensor(got)]
        assert (ours - theirs).abs().max() < 1.0, f"{ours} beside {theirs}: more than bfloat16's rounding"
    llm.shutdown()
