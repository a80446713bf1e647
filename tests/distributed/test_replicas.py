# SPDX-License-Identifier: Apache-2.0
"""Launched ranks that are replicas: each TP x DP of them an engine of its own, which shares the host with the others.

Tokens are transformers'; uneven work, failures and the number of engines of one replica are nothing to another.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import rank_checks
import tiny_models as tiny
from launcher import rank_outcomes, run_ranks
from layout_checks import rank_llm

pytestmark = pytest.mark.multiprocess

NAME = "qwen3-moe"
ROUNDS = {0: [9, 40, 5], 1: [7]}  # prompt lengths of each round, by replica


def ragged_rounds(folder: str, tp: int, trainer_first: bool) -> dict[str, Any]:
    """On a rank: one replica generates three times and makes a second engine, the other generates once."""
    import torch
    import torch.distributed as dist

    from vllm.distributed import get_local_world_size, get_tp_group, get_world_group

    if trainer_first:
        dist.init_process_group("gloo")
    replica = rank_checks.own_rank() // tp
    result: dict[str, Any] = {"tokens": []}
    llm = rank_llm(folder, tp, 1, seed=replica)  # as trl seeds them
    result["groups"] = [(group.unique_name, group.ranks) for group in (get_world_group(), get_tp_group())]
    for length in ROUNDS[replica]:
        result["tokens"] += tiny.tokens(tiny.generate(llm, [tiny.prompt(length)], 6))
    result["here"] = get_local_world_size()
    llm.shutdown()
    if replica == 0 and tp == 1:
        again = rank_llm(folder, tp, 1)
        result["tokens"] += tiny.tokens(tiny.generate(again, [tiny.prompt(3)], 6))
        again.shutdown()
    # The trainer's world is all ranks, before, beside and after the engines.
    everyone = torch.ones(1)
    dist.all_reduce(everyone)
    return {**result, "world": (dist.get_rank(), dist.get_world_size(), int(everyone))}


@pytest.mark.parametrize(("tp", "trainer_first"), [(1, True), (1, False), (2, True), (2, False)])
def test_uneven_work(tp: int, trainer_first: bool) -> None:
    world = 2 * tp
    for rank, found in enumerate(run_ranks(ragged_rounds, world, tiny.checkpoint(NAME), tp, trainer_first)):
        replica = rank // tp
        lengths = ROUNDS[replica] + [3] * (replica == 0 and tp == 1)
        assert found["tokens"] == [tiny.greedy(NAME, tiny.prompt(length), 6) for length in lengths]
        ranks = list(range(replica * tp, replica * tp + tp))
        assert found["groups"] == [(f"world:{replica}", ranks), (f"tp:{replica}", ranks)]
        assert found["here"] == world
        assert found["world"] == (rank, world, world)


def one_replica_fails(folder: str, tp: int) -> list[tuple[int, ...]]:
    llm = rank_llm(folder, tp, 1)
    replica = rank_checks.own_rank() // tp

    def broken(*_: Any) -> None:
        raise KeyError("of one replica")

    if replica == 0:
        llm.llm_engine.worker.runner.model.model.layers[1].mlp.register_forward_pre_hook(broken)
    tokens = []
    for length in (6, 8, 5):
        tokens += tiny.tokens(tiny.generate(llm, [tiny.prompt(length)], 12))
    return tokens


@pytest.mark.parametrize("tp", [1, 2])
def test_a_failure_ends_its_own_replica(tp: int) -> None:
    outcomes = rank_outcomes(one_replica_fails, 2 * tp, tiny.checkpoint(NAME), tp)
    assert [outcome.status for outcome in outcomes] == ["raised"] * tp + ["ok"] * tp
    for outcome in outcomes[:tp]:
        assert "of one replica" in outcome.error + outcome.output
    for outcome in outcomes[tp:]:
        assert outcome.value == [tiny.greedy(NAME, tiny.prompt(length), 12) for length in (6, 8, 5)]
        assert "[FAIL]" not in outcome.output


def started(folder: str, sizes: dict[int, tuple[int, int]], backend: str | None) -> str:
    from vllm import LLM

    tp, dp = sizes[rank_checks.own_rank()]
    with pytest.raises(ValueError) as caught:
        LLM(
            folder,
            tensor_parallel_size=tp,
            data_parallel_size=dp,
            distributed_executor_backend=backend,
            skip_tokenizer_init=True,
        )
    return str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "backend", "message"),
    [
        (
            {0: (1, 1), 1: (1, 1)},
            None,
            r"world size 2 \(WORLD_SIZE\) is not tensor_parallel_size 1 x data_parallel_size 1 = 1: run torchrun "
            r'--nproc-per-node=1 or change the sizes, or pass distributed_executor_backend="external_launcher" to LLM '
            r"for 2 replicas",
        ),
        (
            dict.fromkeys(range(3), (2, 1)),
            "external_launcher",
            r"world size 3 \(WORLD_SIZE\) is no multiple of tensor_parallel_size 2 x data_parallel_size 1 = 2",
        ),
        (
            {0: (1, 1), 1: (2, 1)},
            "external_launcher",
            r"tensor_parallel_size x data_parallel_size differs between the ranks: \[1, 2\] by rank",
        ),
    ],
)
def test_what_does_not_fit_is_named_on_every_rank(
    sizes: dict[int, tuple[int, int]], backend: str | None, message: str
) -> None:
    for text in run_ranks(started, len(sizes), tiny.checkpoint(NAME), sizes, backend):
        assert re.match(message, text), text


def plans(folder: str) -> tuple[int, int]:
    """What a rank plans to take of 10^9 bytes and of 4 processors; settings differ by replica."""
    import torch

    from vllm import LLM
    from vllm.platforms.cpu import CpuPlatform
    from vllm.platforms.host_limits import Limit
    from vllm.v1.worker import gpu_model_runner, gpu_worker

    torch.set_num_threads(16)
    gpu_model_runner.largest_step_bytes = lambda runner: 0  # type: ignore[assignment]
    gpu_worker.useful_cache_bytes = lambda *_: 1 << 40  # type: ignore[assignment]
    CpuPlatform.memory_limits = lambda self, device, share: [Limit("made up", 10**9, "host")]  # type: ignore[method-assign]
    CpuPlatform.processor_limits = lambda self: [Limit("made up", 4, "host")]  # type: ignore[method-assign]
    seen = []
    gpu_worker.Worker.initialize_kv_cache = lambda self, config: None  # type: ignore[method-assign]
    determine = gpu_worker.Worker.determine_available_memory
    gpu_worker.Worker.determine_available_memory = lambda self: seen.append(determine(self)) or 1 << 22  # type: ignore
    LLM(
        folder,
        distributed_executor_backend="external_launcher",
        max_model_len=32 * (1 + rank_checks.own_rank()),
        skip_tokenizer_init=True,
        dtype="float32",
    )
    return seen[0], torch.get_num_threads()


def test_replicas_share_their_host() -> None:
    """Memory and threads are divided by all ranks, whatever each replica is asked for."""
    found = run_ranks(plans, 4, tiny.checkpoint(NAME), env={"OMP_NUM_THREADS": ""})
    assert found == [(10**9 // 4, 1)] * 4


def traced(folder: str) -> None:
    llm = rank_llm(folder, 2, 1)
    tiny.generate(llm, [tiny.prompt(6)], 3)
    llm.shutdown()


def test_the_doctor_sees_every_replica(tmp_path: Path) -> None:
    from vllm.v1.debug.doctor import diagnose, load_ledgers

    run_ranks(traced, 4, tiny.checkpoint(NAME), env={"VLLM_TRACE_COLLECTIVES": str(tmp_path)})
    ledgers = load_ledgers(tmp_path)
    assert sorted(ledgers) == [0, 1, 2, 3]
    assert {entry["group"] for entry in ledgers[3].entries} >= {"world:1", "tp:1"}
    assert not diagnose(ledgers).is_fault
    (tmp_path / "rank-2.jsonl").unlink()
    assert "rank 2 left no ledger" in diagnose(load_ledgers(tmp_path)).text
