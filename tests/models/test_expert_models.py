# SPDX-License-Identifier: Apache-2.0
"""The architectures with routed experts beside Mixtral and Qwen3-MoE: transformers' tokens in fp32, in one process and
over ranks, with uninitialised memory NaN."""

from __future__ import annotations

import shutil
from pathlib import Path

import poison
import pytest
import tiny_experts
import tiny_models as tiny
import tiny_quantised as quantised
import torch
from layout_checks import check
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from vllm import LLM
from vllm.model_executor.layers.fused_moe import FusedMoE

LENGTHS = (1, 17, 64, 30, 150, 25)
NUM_TOKENS = 24


@pytest.mark.parametrize("name", tiny_experts.NAMES)
def test_greedy_tokens_and_logprobs(name: str, pattern: int) -> None:
    """Whole prompts under the one pattern of NaN; ragged chunks in padded steps under the other."""
    tiny.check_greedy(name, LENGTHS, NUM_TOKENS, pattern != poison.CANONICAL, 1e-4)


def test_gpt_oss_as_it_is_released(tmp_path: Path, nan_poison: None) -> None:
    """Experts in MXFP4, blocks and scales: the tokens are transformers' with what these mean."""
    folders = [tmp_path / name for name in ("floats", "released")]
    shutil.copytree(tiny.checkpoint("gpt-oss-32"), folders[0])
    folders[1].mkdir()
    quantised.as_mxfp4(*folders)
    model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    prompts = [tiny.prompt(length) for length in (3, 40)]
    llm = LLM(str(folders[1]), dtype="float32", skip_tokenizer_init=True, max_model_len=128, num_gpu_blocks_override=40)
    got = tiny.tokens(tiny.generate(llm, prompts, NUM_TOKENS))
    (layer, *_) = (m for m in llm.llm_engine.worker.runner.model.modules() if isinstance(m, FusedMoE))
    assert layer.is_quantized
    llm.sleep(level=2)
    llm.wake_up()
    for named in reversed(load_file(folders[1] / "model.safetensors").items()):  # a tensor a call
        llm.llm_engine.worker.get_model().load_weights([named])
    assert layer.is_quantized
    assert tiny.tokens(tiny.generate(llm, prompts, NUM_TOKENS)) == got
    llm.shutdown()
    for prompt, tokens in zip(prompts, got, strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False)
        assert tokens == tuple(out[0, len(prompt) :].tolist())
    assert len(set(got[0] + got[1])) > 12


@pytest.mark.parametrize("name", tiny_experts.NAMES)
def test_the_tiny_models_say_different_things(name: str) -> None:
    distinct = [len(set(tiny.greedy(name, tiny.prompt(length), NUM_TOKENS))) for length in LENGTHS]
    assert sum(distinct) / len(distinct) >= 9, distinct


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["qwen2-moe", "glm4-moe", "minimax-m2", "gpt-oss"])
def test_tp_2_dp_2_ep(name: str) -> None:
    check(tiny, name, 2, 2, True, "cpu", ["b60", "one-long", "idle-rank"], 0.001)


@pytest.mark.multiprocess
def test_biases_move_with_their_experts() -> None:
    options = {"enable_eplb": True, "eplb_config": {"step_interval": 3}}
    check(tiny, "gpt-oss", 1, 2, True, "cpu", ["b60"], 0, options=options)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("name", "tp"), [("gpt-oss", 2), ("minimax-m2", 4)])
def test_tp_2_and_4_without_ep(name: str, tp: int) -> None:
    """Slices of one expert, whose down bias counts once; two key heads on four ranks, in one sum of squares once."""
    check(tiny, name, tp, 1, False, "cpu", ["b60", "one-long"], 0)
