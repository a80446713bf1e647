# SPDX-License-Identifier: Apache-2.0
"""Groups and the token exchange over every small layout, their errors, and what a MoE layer's exchange costs."""

from __future__ import annotations

import importlib
import os
import sys
import time
from typing import Any

import launcher
import pytest
import torch
import torch.distributed as dist
from rank_checks import assert_same, backend_calls, observed, own_rank, own_world, unchanged

from vllm import forward_context
from vllm.distributed import (
    CollectiveError,
    cleanup_dist_env_and_memory,
    destroy_distributed_environment,
    ensure_model_parallel_initialized,
    get_dp_group,
    get_ep_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_tp_group,
    get_world_group,
    init_distributed_environment,
    initialize_model_parallel,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager
from vllm.distributed.parallel_state import collective_timeout, get_store
from vllm.forward_context import DPMetadata, set_forward_context

LAYOUTS = [(1, 2), (2, 1), (1, 4), (2, 2), (4, 1)]  # (TP, DP)
multiprocess = pytest.mark.multiprocess


@pytest.fixture(autouse=True)
def _no_groups_left() -> Any:
    yield
    destroy_distributed_environment()


def _start(tp: int, dp: int, ep: bool = True) -> None:
    init_distributed_environment()
    initialize_model_parallel(tp, dp, ep)


# -- groups


def _members(tp: int, dp: int, ep: bool) -> dict[str, Any]:
    _start(tp, dp, ep)
    groups = {"world": get_world_group(), "tp": get_tp_group(), "dp": get_dp_group(), "ep": get_ep_group()}
    for group in groups.values():
        if group.world_size > 1:
            assert dist.get_process_group_ranks(group.device_group) == group.ranks
            assert dist.get_process_group_ranks(group.cpu_group) == group.ranks
            assert dist.get_backend(group.cpu_group) == "gloo"
            assert group.device_group is group.cpu_group  # both Gloo
            assert group.broadcast_object(group.rank, 1) == group.ranks[1]
            assert group.all_gather_object(group.rank) == group.ranks
            assert int(group.cpu_all_reduce(torch.tensor([group.rank]))) == sum(group.ranks)
            group.cpu_barrier()
            group.barrier()
        else:
            assert group.cpu_group is None
        assert group.ranks[group.rank_in_group] == own_rank()
    assert get_tensor_model_parallel_world_size() == tp
    assert get_tensor_model_parallel_rank() == own_rank() % tp
    assert_same(tensor_model_parallel_all_gather(torch.tensor([own_rank()]), 0), torch.tensor(groups["tp"].ranks))
    assert int(tensor_model_parallel_all_reduce(torch.tensor([own_rank()]))) == sum(groups["tp"].ranks)
    members = {kind: (group.unique_name, group.ranks) for kind, group in groups.items()}
    cleanup_dist_env_and_memory()
    assert not dist.is_initialized()
    return members


@multiprocess
def test_groups_of_tp2_dp2() -> None:
    found = launcher.run_ranks(_members, 4, 2, 2, True)
    everyone = [0, 1, 2, 3]
    tp = [("tp:0", [0, 1])] * 2 + [("tp:1", [2, 3])] * 2
    dp = [("dp:0", [0, 2]), ("dp:1", [1, 3])] * 2
    for rank, members in enumerate(found):
        assert members == {"world": ("world:0", everyone), "tp": tp[rank], "dp": dp[rank], "ep": ("ep:0", everyone)}


@multiprocess
def test_without_expert_parallelism_a_rank_is_its_own_ep_group() -> None:
    for rank, members in enumerate(launcher.run_ranks(_members, 2, 1, 2, False)):
        assert members["ep"] == (f"ep:{rank}", [rank])
        assert members["dp"] == ("dp:0", [0, 1])


def test_one_process_needs_no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    _start(1, 1)
    assert not dist.is_initialized()
    assert [g().ranks for g in (get_world_group, get_tp_group, get_dp_group, get_ep_group)] == [[0]] * 4
    x = torch.randn(3, 2)
    assert_same(tensor_model_parallel_all_reduce(x), x)
    assert get_dp_group().broadcast_object("a") == "a"
    dispatched = get_ep_group().dispatch(x, torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int32))
    assert_same(get_ep_group().combine(dispatched.hidden_states, dispatched), x)
    ensure_model_parallel_initialized(1, 1)
    with pytest.raises(ValueError, match=r"\(1, 1, 1\), \(2, 1, 1\) is asked for"):
        ensure_model_parallel_initialized(2, 1)


def _mismatch(tp: int, dp: int) -> tuple[str, int]:
    init_distributed_environment()
    with observed() as ledger, pytest.raises(ValueError) as caught:
        initialize_model_parallel(tp, dp)
    return str(caught.value), len(ledger.records)


@multiprocess
def test_sizes_that_do_not_fit_the_world_raise_on_every_rank() -> None:
    for message, collectives in launcher.run_ranks(_mismatch, 2, 2, 2):
        assert message.startswith(
            "world size 2 (WORLD_SIZE) is not tensor_parallel_size 2 x data_parallel_size 2 = 4: run torchrun "
            "--nproc-per-node=4"
        )
        assert collectives == 0


def _started_differently(name: str) -> str:
    init_distributed_environment()
    variable = {"pad_dp_to_max": "VLLM_DP_PAD_TO_MAX"}.get(name, name)
    if variable.startswith("VLLM_") and own_rank() == 1:
        os.environ[variable] = "1"
    sizes = (2, 1) if name == "tensor_parallel_size" and own_rank() == 0 else (1, 2)
    with pytest.raises(ValueError) as caught:
        initialize_model_parallel(*sizes, name == "enable_expert_parallel" and own_rank() == 0)
    return str(caught.value)


@multiprocess
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("tensor_parallel_size", [2, 1]),
        ("enable_expert_parallel", [True, False]),
        ("pad_dp_to_max", [False, True]),
        ("VLLM_CHECK_COLLECTIVES", [False, True]),
        ("VLLM_DEBUG_NAN", ["0", "1"]),
    ],
)
def test_ranks_started_differently_are_refused_on_every_rank(name: str, values: list[Any]) -> None:
    for message in launcher.run_ranks(_started_differently, 2, name):
        assert message.startswith(f"{name} differs between the ranks: {values} by rank; ")
        assert message.endswith("; start all of them alike")


def test_contradicting_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    with pytest.raises(ValueError, match="rank 5 is outside a world of 1"):
        init_distributed_environment()
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(ValueError, match="RANK='one' is not a number"):
        init_distributed_environment()


def test_groups_before_they_exist() -> None:
    with pytest.raises(AssertionError, match="the tp group does not exist yet"):
        get_tp_group()


def _import_afresh() -> bool:
    def no_probe() -> bool:
        raise AssertionError("a device was looked for at import")

    torch.xpu.is_available = torch.cuda.is_available = no_probe
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]
    for name in ("vllm.v1.worker.dp_utils", "vllm.distributed", "vllm.forward_context", "vllm.platforms"):
        importlib.import_module(name)
    return dist.is_initialized()


@multiprocess
def test_importing_looks_for_no_device() -> None:
    assert launcher.run_ranks(_import_afresh, 1) == [False]


# -- one deadline for all


def _stalled_world(stalled: int) -> str:
    _start(2, 2)
    assert collective_timeout().total_seconds() == 6
    forward_context.set_current_step(5)
    if own_rank() == stalled:
        return ""
    with pytest.raises(CollectiveError) as caught:
        _step()
    return str(caught.value)


def _step() -> None:
    get_dp_group().cpu_all_reduce(torch.zeros(1, dtype=torch.int32), "coordinate_batch_across_dp")
    get_ep_group().all_gatherv(torch.zeros(2, 2))


@multiprocess
def test_every_group_gives_up_after_the_one_timeout() -> None:
    outcomes = launcher.rank_outcomes(_stalled_world, 4, 3, env={"VLLM_COLLECTIVE_TIMEOUT_S": "6"})
    assert [o.status for o in outcomes] == ["ok"] * 4, [o.error for o in outcomes]
    for rank in range(3):
        # Rank 1 shares a DP group with the stalled one; the others meet its absence in the EP group.
        group = "dp:1" if rank == 1 else "ep:0"
        assert f"rank {rank}: collective" in outcomes[rank].value
        assert f"group {group}" in outcomes[rank].value
        assert "in step 5" in outcomes[rank].value
        assert outcomes[rank].seconds < 45


# -- the token exchange

HIDDEN, EXPERTS, TOPK = 16, 8, 2


def _tokens(dp_rank: int, num_tokens: int, dtype: torch.dtype, num_pad: int) -> tuple[torch.Tensor, ...]:
    """Small integers and weights of 1/2: all sums are exact. The last ``num_pad`` rows are padding with NaN states."""
    generator = torch.Generator().manual_seed(dp_rank)
    hidden = torch.randint(-4, 5, (num_tokens, HIDDEN), generator=generator).to(dtype)
    ids = torch.rand((num_tokens, EXPERTS), generator=generator).argsort(1)[:, :TOPK].int()
    weights = torch.full((num_tokens, TOPK), 0.5)
    hidden[num_tokens - num_pad :] = float("nan")
    ids[num_tokens - num_pad :] = -1
    weights[num_tokens - num_pad :] = 0
    return hidden, weights, ids


def _experts(hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, local: range) -> torch.Tensor:
    """Expert e multiplies by e + 1; rows that meet no local expert stay 0."""
    out = torch.zeros_like(hidden)
    for expert in local:
        for k in range(TOPK):
            rows = ids[:, k] == expert
            out[rows] += (weights[rows, k, None] * (expert + 1)).to(hidden.dtype) * hidden[rows]
    return out


def _exchange(tp: int, dp: int, counts: list[int], dtype: torch.dtype, sp_bytes: int, num_pad: int) -> dict[str, Any]:
    _start(tp, dp)
    ep, dp_group, tp_group = get_ep_group(), get_dp_group(), get_tp_group()
    manager = AgRsAll2AllManager(ep, dp_group, tp_group, sequence_parallel_bytes=sp_bytes)
    dp_rank = dp_group.rank_in_group
    hidden, weights, ids = _tokens(dp_rank, counts[dp_rank], dtype, min(num_pad, counts[dp_rank]))
    local = range(ep.rank_in_group * EXPERTS // ep.world_size, (ep.rank_in_group + 1) * EXPERTS // ep.world_size)
    share = torch.full_like(hidden, 1 / tp)  # a shared expert cut over TP: its parts sum to 1
    metadata = DPMetadata.make(counts, dp_rank, counts[dp_rank])
    with observed(0.02) as ledger, backend_calls() as calls, set_forward_context({}, dp_metadata=metadata):
        with unchanged(hidden, weights, ids):
            sent = manager.dispatch(hidden, weights, ids)
        output = _experts(sent.hidden_states, sent.topk_weights, sent.topk_ids, local)
        with unchanged(share):
            result = manager.combine(output, sent, share)
    expected = _experts(hidden, weights, ids, range(EXPERTS)) + 1
    assert_same(result, expected)
    assert torch.isfinite(result).all()
    return {
        "ops": [(r.op, r.group.split(":")[0], r.sizes) for r in ledger.records],
        "bytes": [r.num_bytes for r in ledger.records],
        "calls": calls,
        "rows": sent.hidden_states.shape[0],
        "pads": int((sent.topk_ids == -1).all(1).sum()),
    }


ALWAYS, NEVER = 0, 1 << 60


@multiprocess
@pytest.mark.parametrize("policies", ["cpu", "xpu"])
@pytest.mark.parametrize(("tp", "dp"), LAYOUTS)
def test_exchange_equals_one_rank(tp: int, dp: int, policies: str) -> None:
    counts = {1: [7], 2: [26, 30], 4: [3, 0, 2, 4]}[dp]
    for sp_bytes in [ALWAYS, NEVER] if tp > 1 and dp > 1 else [NEVER]:
        for dtype, load in [(torch.float32, counts), (torch.bfloat16, [5, 0, 1, 1][:dp])]:
            found = launcher.run_ranks(
                _exchange, tp * dp, tp, dp, load, dtype, sp_bytes, 2, env={"VLLM_POLICIES": policies}, poison=True
            )
            assert len({str(f["ops"]) for f in found if tp == 1}) <= 1


@multiprocess
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_case_11_expert_parallelism_on_cpu(dtype: torch.dtype) -> None:
    launcher.run_ranks(_exchange, 4, 1, 4, [3, 0, 2, 4], dtype, NEVER, 0, poison=True)


@multiprocess
def test_a_moe_layer_costs_one_gather_and_one_reduce_scatter() -> None:
    row = HIDDEN * 4 + TOPK * 8
    for rank, cost in enumerate(launcher.run_ranks(_exchange, 4, 2, 2, [26, 30], torch.float32, NEVER, 0)):
        rows = [26, 30][rank // 2]
        assert cost["ops"] == [("all_gatherv", "dp", (26, 30)), ("reduce_scatterv", "ep", (26, 26, 30, 30))]
        assert len(cost["calls"]) == 2
        assert cost["bytes"] == [rows * row, 112 * HIDDEN * 4]
        assert cost["rows"] == 56
    for cost in launcher.run_ranks(_exchange, 2, 1, 2, [26, 30], torch.float32, NEVER, 0):
        assert cost["ops"] == [("all_gatherv", "ep", (26, 30)), ("reduce_scatterv", "ep", (26, 30))]
        assert len(cost["calls"]) == 2
    for cost in launcher.run_ranks(_exchange, 2, 2, 1, [7], torch.float32, NEVER, 0):
        assert cost["ops"] == [("all_reduce", "tp", None)]


@multiprocess
def test_sequence_parallel_slices() -> None:
    sizes = (13, 13, 15, 15)
    for cost in launcher.run_ranks(_exchange, 4, 2, 2, [26, 30], torch.float32, ALWAYS, 0):
        assert cost["ops"][:2] == [("all_gatherv", "ep", sizes), ("reduce_scatterv", "ep", sizes)]
        assert [op[:2] for op in cost["ops"][2:]] == [("all_gather", "tp")]
        assert cost["rows"] == 56
        assert cost["pads"] == 0
    for cost in launcher.run_ranks(_exchange, 4, 2, 2, [1, 5], torch.float32, ALWAYS, 0):
        assert cost["rows"] == 8  # (1, 1, 3, 3): two rows are padding
        assert cost["pads"] == 2


def _case_10() -> tuple[torch.Tensor, torch.Tensor]:
    """DP 2 x TP 2, the same rows on both DP ranks: the same result everywhere, equal to a lone rank's."""
    _start(2, 2)
    ep = get_ep_group()
    hidden, weights, ids = _tokens(0, 6, torch.float32, 0)
    sent = ep.dispatch(hidden, weights, ids, [6, 6])
    local = range(ep.rank_in_group * 2, ep.rank_in_group * 2 + 2)
    result = ep.combine(_experts(sent.hidden_states, sent.topk_weights, sent.topk_ids, local), sent)
    undispatched = tensor_model_parallel_all_reduce(_experts(hidden, weights, ids, local))  # the fault: no exchange
    return result, undispatched


@multiprocess
def test_case_10_same_rows_on_both_dp_ranks() -> None:
    hidden, weights, ids = _tokens(0, 6, torch.float32, 0)
    expected = _experts(hidden, weights, ids, range(EXPERTS))
    for result, undispatched in launcher.run_ranks(_case_10, 4, poison=True):
        assert_same(result, expected)
        assert torch.isfinite(undispatched).all()  # plausible numbers, and wrong
        assert not torch.equal(undispatched, expected)


def test_counts_that_were_not_agreed_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"DP rank 1 agreed on 30 rows \(all ranks: \[26, 30\]\) but runs 26"):
        DPMetadata.make([26, 30], 1, 26)
    assert DPMetadata.make([26, 30], 1, 30).sp_local_sizes(2) == (13, 13, 15, 15)


# -- fix 6


def _entry_skew(policies_barrier: bool) -> tuple[float, float, list[str]]:
    """Rank 1 routes late: without a barrier, when rank 0 is in the gather. When does each rank come, and when does it
    enter the gather itself, on the host's one clock?"""
    _start(1, 2)
    manager = AgRsAll2AllManager(get_ep_group(), get_dp_group(), get_tp_group(), barrier=policies_barrier)
    entered: list[float] = []
    communicator, store = get_ep_group().device_communicator, get_store()
    gather = communicator._gather_bytes

    def timed(*args: Any) -> torch.Tensor:
        entered.append(time.monotonic())
        store.set(f"{own_rank()} is in the gather", "")
        return gather(*args)

    communicator._gather_bytes = timed  # type: ignore[method-assign]
    hidden, weights, ids = _tokens(own_rank(), 3, torch.float32, 0)
    get_world_group().barrier()
    with observed() as ledger:
        if own_rank() == 1 and policies_barrier:
            time.sleep(0.5)
        elif own_rank() == 1:
            store.wait(["0 is in the gather"])
        came = time.monotonic()
        manager.combine(hidden.new_zeros(6, HIDDEN), manager.dispatch(hidden, weights, ids, [3, 3]))
    return came, entered[0], [r.op for r in ledger.records]


@multiprocess
def test_fix_6_a_late_rank_is_waited_for_in_the_barrier() -> None:
    (_, first, ops), (came, _, _) = launcher.run_ranks(_entry_skew, 2, False)
    assert ops == ["all_gatherv", "reduce_scatterv"]
    assert first < came  # the fault: rank 0 sits in the collective for as long as rank 1 is late
    (_, first, ops), (came, _, _) = launcher.run_ranks(_entry_skew, 2, True)
    assert ops == ["barrier", "all_gatherv", "barrier", "reduce_scatterv"]
    assert first > came


def _policy_wiring() -> tuple[str, bool, bool]:
    _start(1, own_world())
    ep = get_ep_group()
    assert ep.all2all_manager is not None
    comm = ep.device_communicator
    return type(comm).__name__, ep.all2all_manager.barrier, comm.ordered_sums


@multiprocess
def test_policies_reach_the_groups() -> None:
    expected = {"cpu": ("CpuCommunicator", False, True), "xpu": ("XpuCommunicator", True, False)}
    for name, wiring in expected.items():
        assert launcher.run_ranks(_policy_wiring, 2, env={"VLLM_POLICIES": name}) == [wiring] * 2
    assert "VLLM_POLICIES" not in os.environ
