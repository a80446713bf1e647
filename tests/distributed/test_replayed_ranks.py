# SPDX-License-Identifier: Apache-2.0
"""Captured steps over ranks: all of them replay the same size in the same step or none does, and the tokens are right.

Right tokens are transformers'. Memory is poisoned, ranks are ragged, idle or late.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import launcher
import pytest
import rank_checks
import tiny_experts  # noqa: F401  (its checkpoints)
import tiny_hybrids as hybrids
import tiny_models as tiny
import torch
from test_step import make_llm

from vllm.kernels.cpu.ops import kernels_available

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(not kernels_available(), reason="the C++ kernels cannot be built here"),
]

SIZES = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4]}}


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.worker.runner


def own_prompts(dp: int, tp: int) -> list[tuple[tuple[int, ...], int]]:
    """(prompt, tokens) of this DP rank: the last one has nothing, the others some each, of unlike lengths."""
    rank = rank_checks.own_rank() // tp
    return [] if rank == dp - 1 else [(tiny.prompt(5 + 3 * i + rank, rank), 30) for i in range(1 + 2 * rank)]


def generated(folder: str, tp: int, dp: int, delay_s: float) -> dict[str, Any]:
    llm = make_llm(folder, tp, dp, **SIZES)
    runner, work = runner_of(llm), own_prompts(dp, tp)
    replay, sizes = runner.graphs.replay, []

    def noted(inputs: Any) -> torch.Tensor:
        sizes.append((runner.step, inputs.input_ids.shape[0]))
        for buffer in runner.step_buffers._buffers.values():
            buffer.fill_(torch.nan)
        return replay(inputs)

    runner.graphs.replay = noted
    with rank_checks.observed(delay_s) as ledger:
        tokens = tiny.tokens(tiny.generate(llm, [prompt for prompt, _ in work], 30))
    llm.llm_engine.scheduler.check_integrity()
    world = [r.op for r in ledger.records if r.group.startswith("ep")]
    llm.shutdown()
    return {"tokens": tokens, "sizes": sizes, "collectives": world, "prompts": [prompt for prompt, _ in work]}


@pytest.mark.parametrize(("name", "tp", "dp"), [("mixtral", 1, 4), ("qwen3-moe", 2, 2), ("qwen3.5-moe", 2, 2)])
def test_ragged_idle_and_late_ranks(name: str, tp: int, dp: int) -> None:
    model = hybrids if name in hybrids.NAMES else tiny
    results = launcher.run_ranks(generated, tp * dp, model.checkpoint(name), tp, dp, 0.002, poison=True)
    first = results[0]
    assert len(first["sizes"]) > 25, "hardly a step was replayed"
    for result in results:
        assert result["sizes"] == first["sizes"], "ranks replay different sizes, or in different steps"
        assert result["collectives"] == first["collectives"]
        assert result["tokens"] == [model.greedy(name, prompt, 30) for prompt in result["prompts"]]


def one_runs_eagerly(folder: str) -> tuple[list[int], list[tuple[int, ...]]]:
    """Rank 1 gets a prompt too long for a captured step while rank 0 decodes: that step is eager on both."""
    llm = make_llm(folder, 1, 2, **SIZES)
    rank, modes = rank_checks.own_rank(), []
    runner = runner_of(llm)
    record = runner.counts.record
    runner.counts.record = lambda plan, waited: (modes.append(plan.cudagraph_mode), record(plan, waited))
    engine = llm.llm_engine
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    if rank == 0:
        engine.add_request("0", {"prompt_token_ids": list(tiny.prompt(3))}, params)
    found: dict[str, tuple[int, ...]] = {}
    for step in range(30):
        if step == 6 and rank == 1:
            engine.add_request("1", {"prompt_token_ids": list(tiny.prompt(50))}, params)
        for output in engine.step():
            found[output.request_id] = tuple(output.outputs[0].token_ids)
    llm.shutdown()
    return modes, list(found.values())


def test_one_rank_that_runs_eagerly_makes_all() -> None:
    folder = tiny.checkpoint("mixtral")
    (modes_0, tokens_0), (modes_1, tokens_1) = launcher.run_ranks(one_runs_eagerly, 2, folder, poison=True)
    assert modes_0 == modes_1
    assert modes_0[1:6] == [1] * 5
    assert modes_0[6] == 0
    assert modes_0[7:12] == [1] * 5
    assert tokens_0 == [tiny.greedy("mixtral", tiny.prompt(3), 12)]
    assert tokens_1 == [tiny.greedy("mixtral", tiny.prompt(50), 12)]


def one_is_watched(folder: str, tp: int, dp: int) -> tuple[int, int, list[tuple[int, ...]], list[list[Any]]]:
    """A hook on the last rank alone, which a TP rank is not to be told from the others by. The last is what passed the
    ledger, eagerly and replayed."""
    llm = make_llm(folder, tp, dp, **SIZES)
    runner = runner_of(llm)
    last = rank_checks.own_rank() == rank_checks.own_world() - 1
    hook = runner.model.model.layers[1].register_forward_hook(lambda *_: None) if last else None
    with rank_checks.observed() as eager:
        found = tiny.tokens(tiny.generate(llm, [tiny.prompt(4)], 6))
    before = runner.counts.replayed
    if hook is not None:
        hook.remove()
    with rank_checks.observed() as replayed:
        found += tiny.tokens(tiny.generate(llm, [tiny.prompt(4)], 6))
    after = runner.counts.replayed - before
    llm.shutdown()
    seen = [[(r.group, r.op, r.layer, r.sizes, r.shapes) for r in ledger.records] for ledger in (eager, replayed)]
    return before, after, found, seen


@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (1, 2)])
def test_one_rank_whose_layers_are_looked_at(tp: int, dp: int) -> None:
    folder = tiny.checkpoint("mixtral")
    for before, after, found, seen in launcher.run_ranks(one_is_watched, 2, folder, tp, dp, poison=True):
        assert (before, after) == (0, 6)
        assert found == [tiny.greedy("mixtral", tiny.prompt(4), 6)] * 2
        assert seen[0] == seen[1], "a ledger tells replayed collectives from eager ones"
        assert any(layer.startswith("model.layers.1") for _, _, layer, *_ in seen[1])


def is_collective(run: Any) -> bool:
    call = inspect.getclosurevars(run).nonlocals.get("call") if inspect.isfunction(run) else None
    return "Recorder.outside" in getattr(call, "__qualname__", "")


def leaves_out(folder: str, fault: bool) -> tuple[int, list[tuple[int, ...]]]:
    """In its fourth replayed step the last rank leaves out its first collective."""
    llm = make_llm(folder, 1, 2, **SIZES)
    runner = runner_of(llm)
    if fault and rank_checks.own_rank() == 1:
        replay = runner.graphs.replay

        def faulty(inputs: Any) -> torch.Tensor:
            if runner.counts.replayed == 4:
                program = runner.graphs.steps[inputs.input_ids.shape[0]]._program
                del program[next(i for i, run in enumerate(program) if is_collective(run))]
            return replay(inputs)

        runner.graphs.replay = faulty
    tokens = tiny.tokens(tiny.generate(llm, [tiny.prompt(4)], 6))
    llm.shutdown()
    return runner.counts.replayed, tokens


def test_collectives_of_replayed_steps_are_compared() -> None:
    folder, env = tiny.checkpoint("mixtral"), {"VLLM_CHECK_COLLECTIVES": "1", "VLLM_STALL_TIMEOUT_S": "60"}
    for replayed, tokens in launcher.run_ranks(leaves_out, 2, folder, False, env=env):
        assert replayed == 6
        assert tokens == [tiny.greedy("mixtral", tiny.prompt(4), 6)]
    for outcome in launcher.rank_outcomes(leaves_out, 2, folder, True, env=env):
        assert outcome.status == "raised"
        assert "ConsensusError" in outcome.error
        assert re.search(r"disagree on collective #\d+: .*on rank 0.*on rank 1", outcome.error), outcome.error


def slept(folder: str) -> tuple[list[int], list[tuple[int, ...]]]:
    """After the caches were given back and made anew, steps are captured anew, by all ranks in one step."""
    llm = make_llm(folder, 1, 2, **SIZES)
    counts, found = [], []
    runner = runner_of(llm)
    hook = None
    for round_ in range(4):
        before = runner.counts.replayed
        found += tiny.tokens(tiny.generate(llm, [tiny.prompt(4)], 10))
        counts.append(runner.counts.replayed - before)
        if round_ == 0:
            llm.sleep()
            assert not runner.graphs.steps
            llm.wake_up()
            if rank_checks.own_rank() == 1:  # which would not capture while its layers are looked at
                hook = runner.model.model.layers[1].register_forward_hook(lambda *_: None)
        elif hook is not None:
            hook.remove()
    llm.shutdown()
    return counts, found


def test_captured_anew_after_sleep() -> None:
    folder = tiny.checkpoint("mixtral")
    for counts, found in launcher.run_ranks(slept, 2, folder, poison=True):
        assert counts == [10, 0, 9, 10]
        assert found == [tiny.greedy("mixtral", tiny.prompt(4), 10)] * 4


def hindered(folder: str, tp: int, dp: int) -> dict[str, Any]:
    """Rank 0 has no memory for steps of 7 rows, the last one's attention reads steps of 4 on the host, and its
    activation all."""
    from vllm.compilation.recording import MemoryPool
    from vllm.kernels import cpu
    from vllm.v1.attention.backends.paged import PagedAttentionImpl

    empty, silu_and_mul, attend = MemoryPool.empty, cpu.silu_and_mul, PagedAttentionImpl.forward
    warnings = rank_checks.warnings_of("vllm.compilation.cuda_graph")

    def short(self: Any, shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        if shape[:1] == (7,):
            raise MemoryError("no room")
        return empty(self, shape, stride, dtype)

    def asks(self: Any, query: torch.Tensor, *args: Any) -> None:
        if len(query) == 4:
            assert query.sum().item() is not None
        attend(self, query, *args)

    def asks_always(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        assert x.sum().item() is not None
        return silu_and_mul(x, out)

    if rank_checks.own_rank() == 0:
        MemoryPool.empty = short
    if rank_checks.own_rank() == rank_checks.own_world() - 1:
        PagedAttentionImpl.forward, cpu.silu_and_mul = asks, asks_always
    llm = make_llm(folder, tp, dp, compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 7]})
    runner = runner_of(llm)
    tokens = tiny.tokens(tiny.generate(llm, [tiny.prompt(4)], 6))
    found = {"sizes": sorted(runner.graphs.steps), "replayed": runner.counts.replayed, "tokens": tokens}
    llm.shutdown()
    return {**found, "warnings": warnings}


@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (1, 2)])
def test_what_one_rank_cannot_capture_none_does(tp: int, dp: int) -> None:
    """The others hear of it at the end of a pass, in whose collectives they wait."""
    results = launcher.run_ranks(hindered, 2, tiny.checkpoint("qwen2-moe"), tp, dp, poison=True)
    for result in results:
        assert result["tokens"] == [tiny.greedy("qwen2-moe", tiny.prompt(4), 6)]
        assert (result["sizes"], result["replayed"]) == ([1, 2], 5)
        asked = "aten.item.default brings a value of the step to the host in"
        assert [text.partition(" model.layers")[0] for text in result["warnings"]] == [
            f"silu_and_mul runs eagerly between the pieces of captured steps: {asked} silu_and_mul of",
            "steps of 7 rows are not captured: memory is short: no room (rank 0)",
            f"steps of 4 rows are not captured: {asked}",
        ]
