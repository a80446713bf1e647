# SPDX-License-Identifier: Apache-2.0
"""The hybrid models over processes: every layout gives transformers' tokens, no rank's padding or idleness reaches a
state, and the B60 case's NaN shown by putting its faults back. All with uninitialised memory NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import launcher
import pytest
import rank_checks
import tiny_hybrids as hybrids
import tiny_models as tiny
import torch
from layout_checks import LOADS, check, load_of, rank_llm

pytestmark = pytest.mark.multiprocess

LAYOUTS = [  # name, TP, DP, EP
    ("qwen3-next", 2, 1, True),
    ("qwen3.5", 2, 1, False),
    ("qwen3-next", 1, 2, True),
    ("qwen3.5-moe", 1, 2, True),
    ("qwen3.5-moe", 2, 2, True),
]


@pytest.mark.parametrize(("name", "tp", "dp", "ep"), LAYOUTS)
def test_layout(name: str, tp: int, dp: int, ep: bool) -> None:
    check(hybrids, name, tp, dp, ep, "cpu", list(LOADS), 0.001)


@pytest.mark.parametrize(
    ("name", "tp", "dp", "ep"),
    # The last has what the others have, and ranks of a TP group beside it.
    [pytest.param(*case, marks=[pytest.mark.slow] * (case != LAYOUTS[-1])) for case in LAYOUTS if case[2] > 1],
)
def test_layout_with_xpu_policies(name: str, tp: int, dp: int, ep: bool) -> None:
    check(hybrids, name, tp, dp, ep, "xpu", list(LOADS), 0.001)


@pytest.mark.parametrize("policies", [pytest.param("cpu", marks=pytest.mark.slow), "xpu"])  # cpu: in test_layouts.py
def test_long_delays(policies: str) -> None:
    """The B60 layout and load, each rank late by up to 20 ms before each collective."""
    check(hybrids, "qwen3.5-moe", 2, 2, True, policies, ["b60"], 0.02)


# --- idle and uneven ranks -----------------------------------------------------------------------------------------


def delta_nets(llm: Any) -> list[Any]:
    return [layer for layer in llm.llm_engine.worker.runner.cached_layers.values() if hasattr(layer, "clear_state")]


def pools(llm: Any) -> list[torch.Tensor]:
    return [pool for net in delta_nets(llm) for pool in (net.conv_state, net.recurrent_state)]


def case_3(folder: str, max_delay_s: float) -> list[tuple[int, ...]]:
    """Tokens [5, 1, 0, 3] in the first step, then decodes [1, 1, 0, 1]."""
    llm = rank_llm(folder, 1, 4)
    lengths = ([5], [1], [], [3])[rank_checks.own_rank()]
    with rank_checks.observed(max_delay_s):
        outputs = tiny.generate(llm, [tiny.prompt(n, seed=11) for n in lengths], 20)
    llm.shutdown()
    return tiny.tokens(outputs)


@pytest.mark.parametrize("policies", ["cpu", "xpu"])
def test_case_3_four_ranks_one_idle(policies: str) -> None:
    name = "qwen3.5-moe"
    by_rank = launcher.run_ranks(
        case_3, 4, hybrids.checkpoint(name), 0.001, env={"VLLM_POLICIES": policies}, poison=True, deadline_s=120
    )
    expected = [[hybrids.greedy(name, tiny.prompt(n, seed=11), 20)] for n in (5, 1)]
    assert by_rank == [*expected, [], [hybrids.greedy(name, tiny.prompt(3, seed=11), 20)]]


def case_18(folder: str) -> bool:
    """Rank 1 keeps rank 0 company for 20 steps. Its pools hold noise and NaN; True where every bit stayed."""
    llm = rank_llm(folder, 1, 2)
    generator = torch.Generator().manual_seed(7)
    for pool in pools(llm):
        pool.copy_(torch.randn(pool.shape, generator=generator))
        pool[::2] = float("nan")
    before = [rank_checks.bits(pool).clone() for pool in pools(llm)]
    idle = rank_checks.own_rank() == 1
    tiny.generate(llm, [] if idle else [tiny.prompt(9, seed=10)], 21)
    assert llm.llm_engine.worker.runner.step >= 21
    same = all(torch.equal(rank_checks.bits(pool), old) for pool, old in zip(pools(llm), before, strict=True))
    llm.shutdown()
    return same


@pytest.mark.parametrize("policies", ["cpu", "xpu"])
def test_case_18_idle_rank_keeps_every_bit_of_its_states(policies: str) -> None:
    folder = hybrids.checkpoint("qwen3.5-moe")
    by_rank = launcher.run_ranks(case_18, 2, folder, env={"VLLM_POLICIES": policies}, poison=True, deadline_s=120)
    assert by_rank == [False, True]


def case_16(folder: str) -> list[tuple[int, ...]]:
    """Rank 0 ends three requests while rank 1 goes on, then takes one that begins like the first of them."""
    from vllm import SamplingParams

    llm = rank_llm(folder, 1, 2)
    engine, rank = llm.llm_engine, rank_checks.own_rank()
    base = tiny.prompt(8, seed=10)

    def add(request_id: str, prompt: tuple[int, ...], num_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        engine.add_request(request_id, {"prompt_token_ids": list(prompt)}, params)

    for i, prompt in enumerate([base, tiny.prompt(5, seed=10), tiny.prompt(7, seed=10)] if rank == 0 else [base]):
        add(str(i), prompt, 3 if rank == 0 else 24)
    tokens: dict[str, tuple[int, ...]] = {}
    while not tokens or engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = tuple(output.outputs[0].token_ids)
        if rank == 0 and engine.worker.runner.step == 10:
            add("again", base + tiny.prompt(4, seed=10), 8)
    engine.scheduler.check_integrity()
    llm.shutdown()
    return [tokens[key] for key in sorted(tokens)]


def test_case_16_a_later_request_equals_a_cold_run() -> None:
    name = "qwen3.5-moe"
    rank0, rank1 = launcher.run_ranks(case_16, 2, hybrids.checkpoint(name), poison=True, deadline_s=120)
    base = tiny.prompt(8, seed=10)
    assert rank0[-1] == hybrids.greedy(name, base + tiny.prompt(4, seed=10), 8)
    assert rank0[0] == hybrids.greedy(name, base, 3)
    assert rank1 == [hybrids.greedy(name, base, 24)]


# --- the B60 case's evidence ---------------------------------------------------------------------------------------


def put_fix_2_back() -> None:
    """Metadata as the case's fix 2 made it: num_actual_tokens counts the padding, query_start_loc does not."""
    from vllm.v1.worker import gpu_model_runner as runner

    honest = runner.CommonAttentionMetadata

    def padded(**fields: Any) -> Any:
        metadata = object.__new__(honest)
        for name, value in {**fields, "num_actual_tokens": fields["num_padded_tokens"]}.items():
            object.__setattr__(metadata, name, value)
        return metadata

    runner.CommonAttentionMetadata = padded


def walk_to_num_actual_tokens() -> None:
    """A delta-net kernel that runs to the last row it is given and counts the surplus to the last request."""
    from vllm.kernels import ops

    honest = ops.gated_delta_net

    def walks(x: torch.Tensor, weights: Any, conv: Any, state: Any, starts: torch.Tensor, *rest: Any) -> torch.Tensor:
        return honest(x, weights, conv, state, torch.where(starts == starts[-1], x.shape[0], starts), *rest)

    ops.gated_delta_net = walks


FAULTS: dict[str, tuple[Callable[[], None], ...]] = {
    "none": (),
    "fix 2": (put_fix_2_back, rank_checks.attend_real_rows_only),
    "fix 2, walking kernel": (put_fix_2_back, rank_checks.attend_real_rows_only, walk_to_num_actual_tokens),
}


def b60(folder: str, fault: str) -> dict[str, Any]:
    """On a rank: the case's prompts; which rows are NaN before and after each layer's attention in the prefill step,
    and what each request got."""
    for put_back in FAULTS[fault]:
        put_back()
    llm = rank_llm(folder, 1, 2)
    runner = llm.llm_engine.worker.runner
    nan_rows: dict[tuple[str, int], list[int]] = {}

    def see(place: str, index: int, x: torch.Tensor) -> None:
        if runner.step == 1:
            assert x.shape == (30, 64)
            nan_rows[place, index] = x.isnan().any(1).nonzero().flatten().tolist()

    for i, layer in enumerate(runner.model.model.layers):
        layer.self_attn.register_forward_pre_hook(lambda _, args, i=i: see("before", i, args[1]))
        layer.self_attn.register_forward_hook(lambda _, args, out, i=i: see("after", i, out))
    prompts, _ = load_of("b60", rank_checks.own_rank(), 2)
    outputs = tiny.generate(llm, prompts, 8)
    llm.shutdown()
    return {
        "nan_rows": {where: rows for where, rows in nan_rows.items() if rows},
        "places": len(nan_rows),
        "tokens": tiny.tokens(outputs),
        "reasons": [output.outputs[0].finish_reason for output in outputs],
    }


def run_b60(name: str, fault: str, backend: str = "TORCH_PAGED") -> tuple[list[dict[str, Any]], list[list[Any]]]:
    """The ranks' findings and transformers' tokens."""
    env = {"VLLM_POLICIES": "xpu", "VLLM_ATTENTION_BACKEND": backend}
    found = launcher.run_ranks(b60, 2, hybrids.checkpoint(name), fault, env=env, poison=True, deadline_s=120)
    expected = [[hybrids.greedy(name, prompt, 8) for prompt in load_of("b60", rank, 2)[0]] for rank in range(2)]
    return found, expected


@pytest.mark.parametrize("backend", ["TORCH_PAGED", "CPU_ATTN"])
def test_b60_with_honest_counts(backend: str) -> None:
    found, expected = run_b60("qwen3.5-moe-8-layers", "none", backend)
    assert [rank["places"] for rank in found] == [16, 16]
    assert [rank["nan_rows"] for rank in found] == [{}, {}]
    assert [rank["tokens"] for rank in found] == expected


def test_b60_fix_2_gives_nan_in_exactly_rows_26_to_29() -> None:
    """dp_rank 0 (26 tokens, padded to 30): clean up to the first full attention, layer 3, NaN in the four rows after
    it and so before layer 4; dp_rank 1, which is not padded: nothing."""
    (rank0, rank1), expected = run_b60("qwen3.5-moe-8-layers", "fix 2")
    assert rank1["nan_rows"] == {}
    assert rank0["nan_rows"]["after", 3] == rank0["nan_rows"]["before", 4] == [26, 27, 28, 29]
    assert min(index for _, index in rank0["nan_rows"]) == 3
    assert ("before", 3) not in rank0["nan_rows"]
    assert all(rows == [26, 27, 28, 29] for rows in rank0["nan_rows"].values())
    # Routing and delta net know the real rows here, so the NaN stays where it arose.
    assert [rank0["tokens"], rank1["tokens"]] == expected


def test_b60_kernel_that_walks_on_overwrites_the_last_requests_state() -> None:
    """The surplus rows go into the state of the last request on the padded rank. Finite, they give it wrong tokens from
    its second on. NaN, they end it at its first decode; that leaves the rank one row short of the other again, so the
    request before it is the next."""
    (rank0, rank1), expected = run_b60("qwen3.5-moe", "fix 2, walking kernel")
    assert rank1["tokens"] == expected[1]
    assert rank0["tokens"][:3] == expected[0][:3]
    assert rank0["tokens"][3][0] == expected[0][3][0], "the prefill step itself is right"
    assert rank0["tokens"][3] != expected[0][3]
    assert rank0["reasons"] == ["length"] * 4

    (rank0, rank1), expected = run_b60("qwen3.5-moe-8-layers", "fix 2, walking kernel")
    assert rank1["tokens"] == expected[1]
    assert rank0["reasons"] == ["error"] * 4
    assert [len(tokens) for tokens in rank0["tokens"]] == [7, 5, 3, 1]
    assert all(got == full[: len(got)] for got, full in zip(rank0["tokens"], expected[0], strict=True))
