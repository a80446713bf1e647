# SPDX-License-Identifier: Apache-2.0
"""The demo model over every layout of 1, 2 and 4 processes gives the dense model's tokens, whatever the layout."""

from __future__ import annotations

import launcher
import pytest
import rank_checks

pytestmark = pytest.mark.multiprocess

NUM_TOKENS = 8
LAYOUTS = [
    # TP, DP, EP
    (1, 1, False),
    (2, 1, False),
    (2, 1, True),
    (1, 2, False),
    (1, 2, True),
    (4, 1, False),
    (4, 1, True),
    (2, 2, False),
    (2, 2, True),
    (1, 4, False),
    (1, 4, True),
]


def generate(folder: str, tp: int, dp: int, ep: bool, prompts: list[str], max_delay_s: float) -> list[tuple[int, ...]]:
    """On a rank: the greedy tokens of its DP rank's share of the prompts."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import get_dp_group

    llm = LLM(
        folder,
        tensor_parallel_size=tp,
        data_parallel_size=dp,
        enable_expert_parallel=ep,
        distributed_executor_backend="external_launcher" if tp * dp > 1 else None,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        num_gpu_blocks_override=40,
    )
    with rank_checks.observed(max_delay_s):
        share = prompts[get_dp_group().rank_in_group :: dp]
        outputs = llm.generate(share, SamplingParams(temperature=0, max_tokens=NUM_TOKENS), use_tqdm=False)
    llm.shutdown()
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    ("tp", "dp", "ep", "policies"),
    [(*layout, "cpu") for layout in LAYOUTS] + [(2, 2, True, "xpu"), (1, 4, True, "xpu")],
)
def test_every_layout_gives_the_dense_models_tokens(
    tp: int, dp: int, ep: bool, policies: str, dense_texts: dict[str, tuple[tuple[int, ...], str]]
) -> None:
    from smollm2 import ensure_checkpoint

    # Dealt unevenly: the last prompt is left out, so that one of several DP ranks has fewer.
    prompts = list(dense_texts)[:-1]
    by_rank = launcher.run_ranks(
        generate,
        tp * dp,
        str(ensure_checkpoint("moe")),
        tp,
        dp,
        ep,
        prompts,
        0.001,
        env={"VLLM_POLICIES": policies},
        poison=True,
        deadline_s=180,
    )
    for rank, got in enumerate(by_rank):
        assert got == [dense_texts[prompt][0][:NUM_TOKENS] for prompt in prompts[rank // tp :: dp]], f"rank {rank}"
