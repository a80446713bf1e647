# SPDX-License-Identifier: Apache-2.0
"""Quantised mixtures in bfloat16 by the C++ kernels over TP 2 x DP 2 with EP: the tokens of one process, before and
after their weights were dropped and brought again; uninitialised memory is NaN.

A token's id says which experts it goes to: where the router chooses, sums in another order turn a tie of two experts,
and a prompt with another expert is another prompt, 2 nats away. Routers over ranks are compared in float32
(``test_quantised_layouts.py``). The four ranks serve one model after the other.
"""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import launcher
import pytest
import rank_checks
import tiny_deepseeks  # noqa: F401  adds to tiny_models
import tiny_experts  # noqa: F401  the same
import tiny_models as tiny
import tiny_quantised as quantised
import torch
from layout_checks import rank_llm

from vllm import SamplingParams
from vllm.kernels.quantized import QuantizedWeight
from vllm.model_executor.layers.fused_moe import Router

pytestmark = pytest.mark.multiprocess

# Matrices of a rank with rows enough for products of integers, groups that the kernels take.
tiny.CHECKPOINTS["qwen3-moe-wide"] = (
    "Qwen3Moe",
    {**tiny.MOE, "norm_topk_prob": True, "hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 64},
)
tiny.CHECKPOINTS["v3-128"] = ("DeepseekV3", {**tiny.CHECKPOINTS["v3"][1], "intermediate_size": 128})
CASES = {
    "int4": "ct-int4:qwen3-moe-wide",
    "fp8 in blocks": "fp8-block:qwen3-moe-wide",
    "int8, inputs too": "ct-w8a8:qwen3-moe-wide",
    "mxfp4 of gpt-oss": "gpt-oss-32",
    "fp8 in blocks of deepseek": "fp8-block:v3-128",
}
# Prompts of each DP rank, in one load after the other; the second one has nothing to do in the last.
LOADS: list[list[list[tuple[int, ...]]]] = [
    [[tiny.prompt(length, 3) for length in (5, 21, 8, 2)], [tiny.prompt(length, 5) for length in (9, 33)]],
    [[tiny.prompt(length, 6) for length in (40, 12)], []],
]
NUM_TOKENS = 4
CLOSE = 0.25  # nats between two tokens, which another order of sums in bfloat16 may swap


def packings(llm: Any) -> set[str]:
    modules = llm.llm_engine.worker.get_model().modules()
    held = [getattr(module, name, None) for module in modules for name in ("packed", "w13", "w2")]
    return {weight.kind for weight in held if isinstance(weight, QuantizedWeight)}


def of_tokens(
    seen: dict[str, torch.Tensor], layer: int, router: Router, args: tuple[Any, ...], out: tuple[torch.Tensor, ...]
) -> None:
    """The router's choice, written over; the weights are still those of its logits."""
    logits, num_tokens = args[0].float(), int((args[1] >= 0).sum())
    weights, ids = (x[:num_tokens] for x in out)
    tokens, ways = seen["ids"][:num_tokens, None], torch.arange(router.top_k)
    ids.copy_((5 * tokens + layer + 3 * ways) % router.num_experts)
    scores = logits.softmax(1) if router.scoring == "softmax" else logits.sigmoid()
    chosen = scores[:num_tokens].gather(1, ids.long())
    weights.copy_(chosen / (chosen.sum(1, keepdim=True) if router.renormalize else 1) * router.scale)


def with_routes_of_tokens(llm: Any) -> Any:
    model, seen = llm.llm_engine.worker.get_model(), {}
    model.model.embed_tokens.register_forward_pre_hook(lambda _, args: seen.update(ids=args[0]))
    for layer, router in enumerate(module for module in model.modules() if isinstance(module, Router)):
        router.register_forward_hook(functools.partial(of_tokens, seen, layer))
    return llm


def on_rank(folders: dict[str, str]) -> dict[str, Any]:
    found = {}
    for case, folder in folders.items():
        llm = with_routes_of_tokens(rank_llm(folder, 2, 2, dtype="bfloat16"))
        own = rank_checks.own_rank() // 2
        rounds = [[tiny.tokens(tiny.generate(llm, load[own], NUM_TOKENS)) for load in LOADS]]
        llm.sleep(level=2)
        llm.wake_up()
        llm.llm_engine.worker.get_model().load_weights(quantised.stored(folder))
        rounds.append([tiny.tokens(tiny.generate(llm, load[own], NUM_TOKENS)) for load in LOADS])
        found[case] = rounds, packings(llm)
        llm.shutdown()
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("quantised")
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        quantised.in_groups_of(patch, 32, (32, 32))
        for number, (case, name) in enumerate(CASES.items()):
            format, _, model = name.rpartition(":")
            made[case] = str(root / str(number))
            if format:
                quantised.write(Path(tiny.checkpoint(model)), Path(made[case]), format)
            else:
                floats = root / f"{number}-floats"
                shutil.copytree(tiny.checkpoint(model), floats)
                Path(made[case]).mkdir()
                quantised.as_mxfp4(floats, Path(made[case]))
    return made


@pytest.fixture(scope="module")
def by_rank(folders: dict[str, str]) -> list[dict[str, Any]]:
    return launcher.run_ranks(on_rank, 4, folders, poison=True, deadline_s=180)


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_one_process(
    case: str, folders: dict[str, str], by_rank: list[dict[str, Any]], nan_poison: None
) -> None:
    llm = with_routes_of_tokens(quantised.make_llm("", model=folders[case], dtype="bfloat16"))
    assert packings(llm) == {"panels"}
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, logprobs=20)
    prompts = [prompt for load in LOADS for of in load for prompt in of]
    outputs = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)
    alone = {prompt: output.outputs[0] for prompt, output in zip(prompts, outputs, strict=True)}
    llm.shutdown()
    equal = 0
    for rank, found in enumerate(by_rank):
        rounds, kinds = found[case]
        assert kinds == {"panels"}
        assert rounds[0] == rounds[1], f"rank {rank}: other tokens with the same weights brought again"
        for load, got in zip(LOADS, rounds[0], strict=True):
            for prompt, ids in zip(load[rank // 2], got, strict=True):
                right = alone[prompt]
                for here, there, shares in zip(ids, right.token_ids, right.logprobs, strict=True):
                    if here != there:
                        gap = shares[there].logprob - (shares[here].logprob if here in shares else -torch.inf)
                        assert gap <= CLOSE, f"rank {rank}, {len(prompt)} tokens: {ids}, alone {right.token_ids}"
                        break
                    equal += 1
    assert equal > 0.5 * 2 * len(prompts) * NUM_TOKENS, "hardly anything was equal"
