# SPDX-License-Identifier: Apache-2.0
"""What ranks must share and what they must not: samples, seeds, biases, vocabulary, loading, shared experts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import launcher
import pytest
import rank_checks
import tiny_models as tiny
import torch
from layout_checks import rank_llm
from padding_slots import slots
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.multiprocess


def other_logits_on_rank_1(folder: str) -> list[tuple[int, ...]]:
    llm = rank_llm(folder, 2, 1, False)
    model = llm.llm_engine.worker.runner.model
    if rank_checks.own_rank() == 1:
        compute = model.compute_logits
        model.compute_logits = lambda hidden: compute(hidden).flip(-1)
    prompts = [tiny.prompt(length) for length in (3, 8)]
    result = tiny.tokens(tiny.generate(llm, prompts, 6))
    llm.shutdown()
    return result


def test_tp_ranks_take_the_first_ranks_samples() -> None:
    """Logits that differ in the last bit would send the ranks different ways; here they differ wholly."""
    first, second = launcher.run_ranks(other_logits_on_rank_1, 2, tiny.checkpoint("llama"), poison=True)
    assert first == second == [tiny.greedy("llama", tiny.prompt(length), 6) for length in (3, 8)]


def unseeded(folder: str) -> tuple[list[list[int]], list[list[int]]]:
    from vllm import SamplingParams

    llm = rank_llm(folder, 1, 2, False)
    prompt = {"prompt_token_ids": list(tiny.prompt(5))}
    drawn = []
    for seed in (None, 7):
        params = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True, detokenize=False, seed=seed)
        drawn.append([list(o.outputs[0].token_ids) for o in llm.generate([prompt] * 2, params, use_tqdm=False)])
    llm.shutdown()
    return drawn[0], drawn[1]


def test_dp_ranks_draw_differently_without_a_seed_and_alike_with_one() -> None:
    (free_0, seeded_0), (free_1, seeded_1) = launcher.run_ranks(unseeded, 2, tiny.checkpoint("llama"))
    assert len({tuple(tokens) for tokens in free_0 + free_1}) == 4
    assert seeded_0[0] == seeded_0[1] == seeded_1[0] == seeded_1[1]


def scores(folder: str) -> list[Any]:
    llm = rank_llm(folder, 2, 1, False, max_logprobs=-1)
    outputs = tiny.generate(llm, [tiny.prompt(9)], 8, logprobs=-1)
    llm.shutdown()
    steps = outputs[0].outputs[0].logprobs
    return [tiny.tokens(outputs)[0], [sorted(step) for step in steps]]


def test_a_vocabulary_that_tp_does_not_divide(tmp_path: Path) -> None:
    """161 rows over 2 ranks leave one row of nothing on the last: it is no token, and takes no probability."""
    config = LlamaConfig(**{**tiny.COMMON, "vocab_size": 161})
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(40)
        # Negative logits everywhere: a padded row's logit 0 would win each step.
        model.lm_head.weight.copy_(model.lm_head.weight.abs().neg())
        model.model.norm.weight.fill_(1.0)
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.abs_()
    model.save_pretrained(tmp_path)
    ids = torch.tensor([tiny.prompt(9)])
    model.generation_config.eos_token_id = None
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    for tokens, offered in launcher.run_ranks(scores, 2, str(tmp_path), poison=True):
        assert tokens == tuple(expected[0, 9:].tolist())
        assert offered == [list(range(161))] * 8


def late_loading() -> tuple[float, float]:
    from vllm.distributed import get_world_group, init_distributed_environment

    init_distributed_environment()
    if rank_checks.own_rank() == 1:
        time.sleep(0.5)
    came = time.monotonic()
    get_world_group().wait_for_all("load_model", 30)
    return came, time.monotonic()


def test_wait_for_all_waits() -> None:
    (_, left), (came, _) = launcher.run_ranks(late_loading, 2)
    assert left >= came, "rank 0 went on before rank 1 had come"


def shared_expert_rows() -> torch.Tensor:
    from vllm import forward_context
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.layers.fused_moe import FusedMoE, Router
    from vllm.v1.worker.batch_plan import BatchPlan
    from vllm.v1.worker.dp_utils import DPVote, agree

    init_distributed_environment()
    initialize_model_parallel(1, 2, True)
    rank = rank_checks.own_rank()
    moe = FusedMoE(Router(4, 2, True), 8, 8, torch.float32, "experts", True)
    for spec in moe.weight_specs():
        if spec.needed:
            spec.take(torch.zeros(spec.shape))
    real = (3, 1)[rank]
    plan = BatchPlan.make(agree([DPVote(n, 3, 0, 1, 0, 1) for n in (3, 1)], rank), 1)
    shared = torch.full((3, 8), torch.nan)
    shared[:real] = 1.0
    metadata = forward_context.DPMetadata.make(plan.num_tokens_padded_across_dp, rank, 3)
    with forward_context.set_forward_context(None, dp_metadata=metadata, slot_mapping=slots(real, 3)):
        return moe(torch.zeros(3, 8), torch.zeros(3, 4), shared)


def test_pad_rows_of_a_shared_expert_come_out_zero() -> None:
    """They ride in the combine's sum, so NaN there would meet other ranks' rows."""
    for real, rows in zip((3, 1), launcher.run_ranks(shared_expert_rows, 2, poison=True), strict=True):
        assert (rows[:real] == 1).all()
        assert (rows[real:] == 0).all()
