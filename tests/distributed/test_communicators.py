# SPDX-License-Identifier: Apache-2.0
"""One contract for every communicator, on 2 and 4 Gloo ranks with poisoned memory; expected values are computed by
hand from every rank's seeded input."""

from __future__ import annotations

import os
import time
import types
import warnings
from datetime import timedelta
from typing import Any

import launcher
import pytest
import torch
import torch.distributed as dist
from rank_checks import assert_same, backend_calls, observed, own_rank, own_world, unchanged

from vllm import forward_context
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator
from vllm.distributed.device_communicators.xpu_communicator import XpuCommunicator
from vllm.distributed.observer import CollectiveError

pytestmark = pytest.mark.multiprocess

# (class, constructor arguments): the platforms' own settings, and each sum policy on the padded path.
KINDS: dict[str, tuple[type[DeviceCommunicatorBase], dict[str, Any]]] = {
    "cpu": (CpuCommunicator, {}),
    "cpu-backend-sums": (CpuCommunicator, {"ordered_sums": False}),
    "xpu": (XpuCommunicator, {}),
    "xpu-ordered-sums": (XpuCommunicator, {"ordered_sums": True}),
    "cuda": (CudaCommunicator, {}),
    "xpu-by-way-of-host": (XpuCommunicator, {"device": torch.device("xpu", 0)}),
    "cuda-by-way-of-host": (CudaCommunicator, {"device": torch.device("cuda", 0)}),
}
SIZES = {2: [[3, 5], [26, 30], [0, 9], [4, 4], [1, 200]], 4: [[3, 5, 2, 4], [13, 13, 15, 15], [3, 0, 2, 4], [6] * 4]}
DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def _join(timeout_s: float = 20) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))


def _communicator(kind: str, ranks: list[int] | None = None, name: str = "ep:0") -> DeviceCommunicatorBase:
    cls, options = KINDS[kind]
    ranks = ranks or list(range(own_world()))
    pairs = [(dist.new_group(ranks, backend="gloo"), dist.new_group(ranks, backend="gloo"))]
    options = {"device": torch.device("cpu"), **options}
    comm = cls(pairs[0][0], device_group=pairs[0][1], unique_name=name, ranks=ranks, rank=own_rank(), **options)
    if options["device"].type != "cpu":
        _keep_device_memory_from_the_backend(comm)
    return comm


def _keep_device_memory_from_the_backend(comm: DeviceCommunicatorBase) -> None:
    run = comm._run

    def checked(collective: Any, *args: Any, **kwargs: Any) -> None:
        on_device = {x.data_ptr() for x in args if isinstance(x, torch.Tensor)}

        def on_host(*given: Any, **more: Any) -> Any:
            reached = [x for x in given if isinstance(x, torch.Tensor) and x.data_ptr() in on_device]
            assert not reached, f"{collective.__name__} over Gloo was given memory of {comm.device}"
            assert "device_ids" not in more or more["device_ids"] is None, "Gloo's barrier knows no devices"
            return collective(*given, **more)

        run(on_host, *args, **kwargs)

    comm._run = checked  # type: ignore[method-assign]


def _input(rank: int, rows: int, trailing: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Small integers: every sum of them is exact in every dtype here."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randint(0, 9, (rows, *trailing), generator=generator).to(dtype)


# -- the contract, run by every rank


def _contract(kind: str, max_delay_s: float) -> dict[str, int]:
    _join()
    comm, rank, world = _communicator(kind), own_rank(), own_world()
    with warnings.catch_warnings(), observed(max_delay_s) as ledger:
        warnings.simplefilter("error")
        checks = _check_gathers(comm, rank, world) + _check_mixed_lists(comm, rank, world)
        checks += _check_sums(comm, rank, world) + _check_broadcast(comm, rank, world)
        comm.barrier()
    seqs = [r.seq for r in ledger.records]  # the mixed lists were seen by an inner observer
    assert seqs == sorted(set(seqs))
    assert seqs[-1] == len(seqs) - 1 + len(SIZES[world])
    return {"checks": checks, "collectives": len(ledger.records)}


def _check_gathers(comm: DeviceCommunicatorBase, rank: int, world: int) -> int:
    done = 0
    for salt, sizes in enumerate(SIZES[world]):
        for dtype in DTYPES:
            for trailing in [(), (5,), (2, 3)]:
                inputs = [_input(r, n, trailing, dtype, salt) for r, n in enumerate(sizes)]
                with unchanged(inputs[rank]):
                    assert_same(comm.all_gatherv(inputs[rank], 0, sizes), torch.cat(inputs))
                done += 1
        columns = [_input(r, n, (7,), torch.float32, salt).t() for r, n in enumerate(sizes)]  # not contiguous
        with unchanged(columns[rank]):
            assert_same(comm.all_gatherv(columns[rank], 1, sizes), torch.cat(columns, 1))
            assert_same(comm.all_gatherv(columns[rank], -1, sizes), torch.cat(columns, 1))
        strided = [_input(r, 2 * n, (6,), torch.bfloat16, salt)[::2, ::3] for r, n in enumerate(sizes)]
        assert_same(comm.all_gatherv(strided[rank], 0, sizes), torch.cat(strided))
        done += 3
    for dim in (0, 1, -1):
        inputs = [_input(r, 3, (4,), torch.float16) for r in range(world)]
        assert_same(comm.all_gather(inputs[rank], dim), torch.cat(inputs, dim))
        assert_same(comm.all_gatherv(inputs[rank]), torch.cat(inputs))
    for empty in ([0] * world,):  # nothing to send, on any rank: no collective
        assert comm.all_gatherv(torch.zeros(0, 4), 0, empty).shape == (0, 4)
    return done


def _check_mixed_lists(comm: DeviceCommunicatorBase, rank: int, world: int) -> int:
    # Odd widths put the later columns at addresses that suit no wider dtype.
    columns = list(enumerate(zip([(1,), (3,), (5,), (), (2,), (7,), (3, 3), ()], DTYPES, strict=True)))
    for salt, sizes in enumerate(SIZES[world]):
        everyones = [
            [_input(r, sizes[r], shape, dtype, salt + 10 * i) for i, (shape, dtype) in columns] for r in range(world)
        ]
        own = everyones[rank]
        own[2] = own[2].t().contiguous().t()  # same values, other strides
        with observed() as ledger, backend_calls() as calls, unchanged(*own):
            gathered = comm.all_gatherv(own, 0, sizes)
        assert len(calls) == len(ledger.records) == 1, calls
        assert ledger.records[0].num_bytes == sum(x.numel() * x.element_size() for x in own)
        assert ledger.records[0].path == ("uniform" if len(set(sizes)) == 1 else "variable-size")
        assert ledger.records[0].sizes == tuple(sizes)
        for i, x in enumerate(gathered):
            assert_same(x, torch.cat([of[i] for of in everyones]))
    return len(SIZES[world])


def _check_sums(comm: DeviceCommunicatorBase, rank: int, world: int) -> int:
    done = 0
    for salt, sizes in enumerate(SIZES[world]):
        offsets = [sum(sizes[:r]) for r in range(world)]
        mine = slice(offsets[rank], offsets[rank] + sizes[rank])
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64):
            for trailing in [(), (5,), (2, 3)]:
                inputs = [_input(r, sum(sizes), trailing, dtype, salt) for r in range(world)]
                with unchanged(inputs[rank]), backend_calls() as calls:
                    result = comm.reduce_scatterv(inputs[rank], 0, sizes)
                assert len(calls) == 1, calls
                assert_same(result, torch.stack(inputs).sum(0).to(dtype)[mine])
                done += 1
        columns = [_input(r, sum(sizes), (7,), torch.float32, salt).t() for r in range(world)]
        with unchanged(columns[rank]):
            assert_same(comm.reduce_scatterv(columns[rank], 1, sizes), torch.stack(columns).sum(0)[:, mine])
        done += 1
    for rows in (1, 6, 70_011):  # the last takes the two-phase path of ordered sums, with a remainder
        for dtype in (torch.float32, torch.bfloat16, torch.int32):
            inputs = [_input(r, rows, (3,), dtype) for r in range(world)]
            with unchanged(inputs[rank]):
                assert_same(comm.all_reduce(inputs[rank]), torch.stack(inputs).sum(0).to(dtype))
            assert_same(comm.all_reduce(inputs[rank].t()), torch.stack(inputs).sum(0).to(dtype).t())
            done += 2
    equal = [_input(r, 2 * world, (3,), torch.float32) for r in range(world)]
    total = torch.stack(equal).sum(0)
    assert_same(comm.reduce_scatter(equal[rank], 0), total[2 * rank : 2 * rank + 2])
    assert_same(comm.reduce_scatter(equal[rank].t(), -1), total.t()[:, 2 * rank : 2 * rank + 2])
    return done


def _check_broadcast(comm: DeviceCommunicatorBase, rank: int, world: int) -> int:
    for src in range(world):
        for dtype in DTYPES:
            x = _input(rank, 3, (4,), dtype)
            assert_same(comm.broadcast(x, src), _input(src, 3, (4,), dtype))
            strided = _input(rank, 4, (6,), dtype)[::2, ::2]
            assert_same(comm.broadcast(strided, src), _input(src, 4, (6,), dtype)[::2, ::2])
    return world * len(DTYPES)


@pytest.mark.parametrize(
    ("kind", "world"),
    # Among two ranks all go one way each; among four also past others.
    [
        pytest.param(k, n, marks=[pytest.mark.slow] * (n == 2 and k not in ("cpu", "xpu")))
        for k in KINDS
        for n in (2, 4)
    ],
)
def test_contract(kind: str, world: int) -> None:
    """Case 7 ([13, 13, 15, 15], [3, 5, 2, 4], [3, 0, 2, 4]) and case 8 (inputs unchanged) among others."""
    results = launcher.run_ranks(_contract, world, kind, 0.002, poison=True)
    assert len({tuple(r.items()) for r in results}) == 1
    assert results[0]["checks"] > 100


# -- single properties


def _case_7(kind: str) -> None:
    _join()
    comm, rank = _communicator(kind), own_rank()
    for sizes in ([13, 13, 15, 15], [3, 5, 2, 4], [3, 0, 2, 4]):
        with observed(0.05):
            for turn in range(3):
                inputs = [_input(r, n, (64,), torch.bfloat16, turn) for r, n in enumerate(sizes)]
                gathered = comm.all_gatherv(inputs[rank], 0, sizes)
                assert_same(gathered, torch.cat(inputs))
                begin = sum(sizes[:rank])
                assert_same(comm.reduce_scatterv(gathered, 0, sizes), 4 * gathered[begin : begin + sizes[rank]])


@pytest.mark.parametrize("kind", ["cpu", "xpu"])
def test_case_7_and_11_ragged_sizes_under_random_delays(kind: str) -> None:
    launcher.run_ranks(_case_7, 4, kind, poison=True)


def _case_9(kind: str) -> list[float]:
    _join()
    rank = own_rank()
    subgroups = []
    for ranks in ([0, 1], [2, 3]):
        cpu_group, device_group = dist.new_group(ranks), dist.new_group(ranks)
        if rank in ranks:
            cls, options = KINDS[kind]
            subgroups.append(cls(cpu_group, torch.device("cpu"), device_group, f"tp:{rank // 2}", **options))
    (comm,) = subgroups
    with observed(0.05):
        own = torch.full((2, 2), float(10**rank))
        peers = [float(10**r) for r in comm.ranks]
        assert comm.all_reduce(own).unique().tolist() == [sum(peers)]
        assert comm.all_gather(own, 0)[:, 0].tolist() == [peers[0]] * 2 + [peers[1]] * 2
        sizes = [1, 2] if rank < 2 else [2, 1]
        ragged = own[: sizes[comm.rank_in_group]]
        assert comm.all_gatherv(ragged, 0, sizes)[:, 0].tolist() == [peers[0]] * sizes[0] + [peers[1]] * sizes[1]
        assert comm.reduce_scatterv(torch.ones(3, 2) * own[0], 0, sizes).unique().tolist() == [sum(peers)]
        assert comm.broadcast(own.clone(), 1).unique().tolist() == [peers[1]]  # group rank 1, not global rank 1
        comm.barrier()
    return peers


@pytest.mark.parametrize("kind", ["cpu", "xpu"])
def test_case_9_sub_groups_do_not_mix(kind: str) -> None:
    assert launcher.run_ranks(_case_9, 4, kind) == [[1.0, 10.0]] * 2 + [[100.0, 1000.0]] * 2


_ORDER = [1e8, 1.0, -1e8, 1.0]  # fp32: ((1e8 + 1) - 1e8) + 1 = 1 in rank order, 0 or 2 in others


def _ordered(kind: str) -> tuple[list[float], ...]:
    _join()
    comm, rank = _communicator(kind), own_rank()
    few = torch.full((5, 2), _ORDER[rank])
    many = torch.full((70_003, 2), _ORDER[rank])
    half = torch.full((5, 2), [256.0, 1.0, 1.0, 1.0][rank], dtype=torch.bfloat16)  # bf16: 256 + 1 = 256
    return (
        comm.all_reduce(few).unique().tolist(),
        comm.all_reduce(many).unique().tolist(),
        comm.reduce_scatterv(few, 0, [2, 1, 1, 1]).unique().tolist(),
        comm.all_reduce(half).unique().tolist(),
    )


@pytest.mark.parametrize("kind", ["cpu", "xpu-ordered-sums"])
def test_ordered_sums_do_not_depend_on_rows_or_path(kind: str) -> None:
    # 259 rounds to 260 in bf16; adding in bf16 would give 256.
    assert launcher.run_ranks(_ordered, 4, kind) == [([1.0], [1.0], [1.0], [260.0])] * 4


def _two_terms() -> None:
    _join()
    comm, rank = _communicator("cpu"), own_rank()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        inputs = [torch.randn(999, generator=torch.Generator().manual_seed(r)).to(dtype) for r in (0, 1)]
        expected = (inputs[0].double() + inputs[1].double()).to(torch.float32).to(dtype)
        assert_same(comm.all_reduce(inputs[rank]), expected)
        assert_same(comm.reduce_scatterv(inputs[rank], 0, [500, 499]), expected.split([500, 499])[rank])


def test_sums_of_two_are_rounded_once() -> None:
    launcher.run_ranks(_two_terms, 2)


def test_case_24_barriers_name_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def barrier(group: Any = None, device_ids: Any = None, async_op: bool = False) -> Any:
        seen.append(device_ids)
        return types.SimpleNamespace(wait=lambda timeout: True, is_completed=lambda: True)

    monkeypatch.setattr(dist, "barrier", barrier)
    for cls in (XpuCommunicator, CudaCommunicator, CpuCommunicator):
        comm = cls(None)
        comm.world_size = 2
        comm.device = torch.device("xpu", 3) if cls is XpuCommunicator else torch.device("cuda", 1)
        if cls is CpuCommunicator:
            comm.device = torch.device("cpu")
        comm.barrier()
    assert seen == [[3], [1], None]


def test_a_group_of_one_needs_no_process_group() -> None:
    assert not dist.is_initialized()
    for cls in (CpuCommunicator, XpuCommunicator, CudaCommunicator):
        comm = cls(None)
        x = torch.randn(3, 4)
        for y in (
            comm.all_reduce(x),
            comm.all_gather(x),
            comm.all_gatherv(x, 0, [3]),
            comm.all_gatherv([x, x], 0)[1],
            comm.reduce_scatter(x),
            comm.reduce_scatterv(x, 0, [3]),
            comm.broadcast(x),
        ):
            assert_same(y, x)
        comm.barrier()


def test_wrong_sizes_name_the_numbers() -> None:
    comm = CpuCommunicator(None)
    with pytest.raises(AssertionError, match=r"3 rows, but sizes \[4\] say 4"):
        comm.all_gatherv(torch.zeros(3, 1), 0, [4])
    with pytest.raises(AssertionError, match=r"2 sizes \[2, 1\]"):
        comm.reduce_scatterv(torch.zeros(3, 1), 0, [2, 1])
    with pytest.raises(AssertionError, match=r"must agree along dim 0: \[\(3, 1\), \(2, 1\)\]"):
        comm.all_gatherv([torch.zeros(3, 1), torch.zeros(2, 1)])


# -- faults put back


def _fault_1_uneven_gather() -> str:
    """Fix 1's fault: uneven rows go straight into the backend's equal-size collective."""
    _join()
    comm, rank = _communicator("xpu"), own_rank()

    def unpadded(x_NB: torch.Tensor, sizes: list[int], uniform: bool) -> torch.Tensor:
        parts = [x_NB.new_empty((size, x_NB.shape[1])) for size in sizes]
        dist.all_gather(parts, x_NB, group=comm.device_group)
        return torch.cat(parts)

    comm._gather_bytes = unpadded  # type: ignore[method-assign]
    sizes = [26, 30]
    with pytest.raises(CollectiveError, match="invalid tensor size") as caught:
        comm.all_gatherv(torch.zeros(sizes[rank], 4), 0, sizes)
    return str(caught.value)


def test_fault_1_put_back_uneven_rows_fail() -> None:
    for rank, message in enumerate(launcher.run_ranks(_fault_1_uneven_gather, 2)):
        assert f"rank {rank}: collective all_gatherv #0 (variable-size, sizes=(26, 30)" in message


def _fault_4_one_element_list() -> str:
    """Fix 4's fault: ``all_gather([out], x)`` where one output a rank is needed."""
    _join()
    comm = _communicator("xpu")

    def one_element_list(x_NB: torch.Tensor, sizes: list[int], uniform: bool) -> torch.Tensor:
        out = x_NB.new_empty((sum(sizes), x_NB.shape[1]))
        dist.all_gather([out], x_NB, group=comm.device_group)
        return out

    comm._gather_bytes = one_element_list  # type: ignore[method-assign]
    with pytest.raises(CollectiveError) as caught:
        comm.all_gatherv(torch.zeros(4, 4))
    return str(caught.value)


def test_fault_4_put_back_one_element_list_fails() -> None:
    for message in launcher.run_ranks(_fault_4_one_element_list, 2):
        assert "collective all_gatherv #0 (uniform" in message


def _gather_of_skewed_ranks(one_by_one: bool) -> list[list[float]]:
    """Two tensors of one shape, handed to the backend from a queue that rank 1 serves out of order.

    This stands for a device queue on which two independent collectives may start in either order: here, the second
    first on rank 1.
    """
    _join()
    comm, rank = _communicator("xpu"), own_rank()
    tensors = [torch.full((2, 2), 10.0 * rank + i) for i in (1, 2)]
    if not one_by_one:
        return [x[:, 0].tolist() for x in comm.all_gatherv(tensors)]
    results = {index: comm.all_gatherv(tensors[index]) for index in ((0, 1) if rank == 0 else (1, 0))}
    return [results[index][:, 0].tolist() for index in (0, 1)]


def test_fault_5_put_back_call_2_pairs_with_call_1() -> None:
    right = [[1.0, 1.0, 11.0, 11.0], [2.0, 2.0, 12.0, 12.0]]
    mixed = [[1.0, 1.0, 12.0, 12.0], [2.0, 2.0, 11.0, 11.0]]  # rank 0: its call 1 met rank 1's call 2, silently
    assert launcher.run_ranks(_gather_of_skewed_ranks, 2, True)[0] == mixed
    assert launcher.run_ranks(_gather_of_skewed_ranks, 2, False) == [right, right]


def _fault_8_changed_input() -> tuple[bool, bool]:
    """Case 8's fault: a reduce-scatter made of an all-reduce in place."""
    _join()
    comm, rank = _communicator("xpu"), own_rank()
    x = torch.full((5, 2), float(rank + 1))
    comm.reduce_scatterv(x, 0, [3, 2])
    sound = bool((x == rank + 1).all())
    dist.all_reduce(x, group=comm.device_group)
    return sound, bool((x == rank + 1).all())


def test_case_8_input_stays_unchanged_and_the_fault_is_seen() -> None:
    assert launcher.run_ranks(_fault_8_changed_input, 2) == [(True, False)] * 2


# -- failures


def _late_rank(dies: bool) -> tuple[CollectiveError | None, float]:
    """Rank 1 is away when both have made their group; a rank that returned keeps its connections until all have."""
    _join(60)
    rank = own_rank()
    group = dist.new_group([0, 1], timeout=timedelta(seconds=6))
    store = dist.distributed_c10d._get_default_store()
    comm = CpuCommunicator(group, torch.device("cpu"), group, "ep:0")
    forward_context.set_current_step(17)
    forward_context.set_current_layer("model.layers.3.mlp")
    if rank == 1:
        store.wait(["rank 0 is there"])
        if dies:
            os._exit(3)
        return None, 0.0
    store.set("rank 0 is there", "")
    start = time.monotonic()
    with observed() as ledger, pytest.raises(CollectiveError) as caught:
        comm.all_gatherv(torch.zeros(2, 2), 0, [2, 3])
    assert len(ledger.errors) == 1
    return caught.value, time.monotonic() - start


@pytest.mark.parametrize("dies", [False, True], ids=["stalls", "dies"])
def test_a_missing_rank_is_an_error_that_says_where(dies: bool) -> None:
    outcomes = launcher.rank_outcomes(_late_rank, 2, dies, deadline_s=90)
    assert outcomes[0].status == "ok", outcomes[0].error
    error, seconds = outcomes[0].value
    assert (error.record.op, error.record.seq, error.record.step) == ("all_gatherv", 0, 17)
    message = str(error)
    assert "rank 0: collective all_gatherv #0 (variable-size, sizes=(2, 3)" in message
    assert "group ep:0 (ranks [0, 1]) failed in step 17, layer model.layers.3.mlp" in message
    assert seconds < 30
