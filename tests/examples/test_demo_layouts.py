# SPDX-License-Identifier: Apache-2.0
"""The demo model over every layout of 1, 2 and 4 processes gives the dense model's tokens, whatever the layout."""

from __future__ import annotations

import launcher
import pytest
import rank_checks
from demo_run import greedy_texts

pytestmark = pytest.mark.multiprocess

NUM_TOKENS = 8
SHALLOW = 8  # of 30 layers; the mixture computes the dense model's function at every depth
LAYOUTS = [
    # TP, DP, EP
    (1, 1, False),
    (4, 1, True),
    (2, 2, False),
    (2, 2, True),
    (1, 4, True),
]
# A tiny mixtral goes through these in every default run, see test_layouts.py.
MORE_LAYOUTS = [
    (2, 1, False),
    (2, 1, True),
    (1, 2, False),
    (1, 2, True),
    (4, 1, False),
    (1, 4, False),
]


def generate(
    folder: str, layers: int, tp: int, dp: int, ep: bool, prompts: list[str], max_delay_s: float
) -> list[tuple[int, ...]]:
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
        hf_overrides={"num_hidden_layers": layers},
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


@pytest.fixture(scope="session")
def shallow_texts(dense_folder: str) -> dict[str, tuple[int, ...]]:
    """Prompt → transformers' greedy tokens of the dense model's first layers in fp32."""
    return dict(greedy_texts(dense_folder, NUM_TOKENS, num_hidden_layers=SHALLOW))


@pytest.mark.parametrize(
    ("tp", "dp", "ep", "policies"),
    [
        *[(*layout, "cpu") for layout in LAYOUTS],
        (2, 2, True, "xpu"),
        *[pytest.param(*layout, "cpu", marks=pytest.mark.slow) for layout in MORE_LAYOUTS],
        pytest.param(1, 4, True, "xpu", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("layers", [SHALLOW, pytest.param(30, marks=pytest.mark.slow)])
def test_every_layout_gives_the_dense_models_tokens(
    layers: int, tp: int, dp: int, ep: bool, policies: str, request: pytest.FixtureRequest
) -> None:
    from smollm2 import ensure_checkpoint

    if layers == SHALLOW:
        expected = request.getfixturevalue("shallow_texts")
    else:
        expected = {prompt: ids[:NUM_TOKENS] for prompt, (ids, _) in request.getfixturevalue("dense_texts").items()}
    # Dealt unevenly: the last prompt is left out, so that one of several DP ranks has fewer.
    prompts = list(expected)[:-1]
    by_rank = launcher.run_ranks(
        generate,
        tp * dp,
        str(ensure_checkpoint("moe")),
        layers,
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
        assert got == [expected[prompt] for prompt in prompts[rank // tp :: dp]], f"rank {rank}"
