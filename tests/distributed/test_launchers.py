# SPDX-License-Identifier: Apache-2.0
"""Who started this process: the place among the ranks by each launcher's variables, and what contradicts itself."""

from __future__ import annotations

import pytest

from vllm import launchers
from vllm.launchers import find_place

VARIABLES = {
    *(name for of in launchers.LAUNCHERS for name in (of.rank, of.world_size, of.local_rank, of.local_world_size)),
    *(name for of in launchers.LAUNCHERS for name in (*of.job, of.address, of.port)),
    *("SLURM_NODEID", "SLURM_NTASKS", "SLURM_STEP_NODELIST"),
}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES - {""}:
        monkeypatch.delenv(name, raising=False)


def put(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    for assignment in text.split():
        monkeypatch.setenv(*assignment.split("=", 1))


def seen(place: launchers.Place) -> tuple[int | None, ...]:
    return place.rank, place.world_size, place.local_rank, place.local_world_size


# What srun sets on the second of three nodes, for the fourth of five tasks, as its manual page describes it.
SRUN = (
    "SLURM_PROCID=3 SLURM_NTASKS=5 SLURM_STEP_NUM_TASKS=5 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_JOB_ID=77 "
    "SLURM_STEP_ID=0 SLURM_STEP_TASKS_PER_NODE=2(x2),1 SLURM_STEP_NODELIST=rack[3-4]n[07,09],gpu1"
)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ("", (0, 1, 0, 1)),
        ("RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2", (3, 4, 1, 2)),
        ("RANK=3 WORLD_SIZE=4", (3, 4, None, None)),
        ("LOCAL_RANK=2", (0, 1, 2, 1)),
        # As mpirun of Open MPI 5, MPICH 5 and Intel MPI 2021 set them.
        (
            "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2",
            (1, 2, 1, 2),
        ),
        ("PMI_RANK=1 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2", (1, 4, 1, 2)),
        (
            "MV2_COMM_WORLD_RANK=1 MV2_COMM_WORLD_SIZE=2 MV2_COMM_WORLD_LOCAL_RANK=0 MV2_COMM_WORLD_LOCAL_SIZE=1",
            (1, 2, 0, 1),
        ),
        (SRUN, (3, 5, 1, 2)),
        (SRUN.replace("NODEID=1", "NODEID=2").replace("PROCID=3", "PROCID=4"), (4, 5, 1, 1)),
        # The script sets torchrun's pair from SLURM's, the rest comes from there.
        (f"{SRUN} RANK=3 WORLD_SIZE=5", (3, 5, 1, 2)),
        # One torchrun a node inside a step of two tasks: SLURM's local numbers are those of the two torchruns.
        (
            "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0 SLURM_STEP_TASKS_PER_NODE=1(x2) RANK=5 WORLD_SIZE=8",
            (5, 8, None, None),
        ),
        # mpirun inside an allocation: its daemons are SLURM's tasks.
        (
            "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0 SLURM_STEP_TASKS_PER_NODE=1(x2) "
            "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=2",
            (2, 4, 0, 2),
        ),
        # srun --mpi=pmi2
        (f"{SRUN} PMI_RANK=3 PMI_SIZE=5", (3, 5, 1, 2)),
        # A batch script runs once, however many tasks it asked for.
        ("SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_JOB_ID=77", (0, 1, 0, 1)),
        # The offline data-parallel example, in a step of one task.
        ("VLLM_DP_RANK=1 VLLM_DP_SIZE=2 VLLM_DP_RANK_LOCAL=1 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1", (1, 2, 1, None)),
        ("VLLM_DP_RANK=0 VLLM_DP_SIZE=1", (0, 1, 0, 1)),
        ("VLLM_DP_RANK=1 VLLM_DP_SIZE=2 RANK=3 WORLD_SIZE=4 LOCAL_RANK=3 LOCAL_WORLD_SIZE=4", (3, 4, 3, 4)),
    ],
)
def test_place(monkeypatch: pytest.MonkeyPatch, variables: str, expected: tuple[int | None, ...]) -> None:
    put(monkeypatch, variables)
    assert seen(find_place()) == expected


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ("RANK=5", "rank 5 is outside a world of 1: check RANK and WORLD_SIZE"),
        ("WORLD_SIZE=4", None),
        ("RANK=one", "RANK='one' is not a number"),
        ("PMI_RANK=2 PMI_SIZE=2", "rank 2 is outside a world of 2: check PMI_RANK and PMI_SIZE"),
        ("VLLM_DP_SIZE=2", r"VLLM_DP_SIZE=2 without VLLM_DP_RANK: set it to 0\.\.1"),
        ("VLLM_DP_RANK=0 VLLM_DP_SIZE=2 RANK=3 WORLD_SIZE=4", "VLLM_DP_RANK=0 of VLLM_DP_SIZE=2 is not where RANK=3"),
        ("VLLM_DP_RANK=1 VLLM_DP_SIZE=2 RANK=1 WORLD_SIZE=3", "VLLM_DP_RANK=1 of VLLM_DP_SIZE=2 is not where RANK=1"),
    ],
)
def test_contradictions(monkeypatch: pytest.MonkeyPatch, variables: str, message: str | None) -> None:
    put(monkeypatch, variables)
    if message is None:
        assert seen(find_place()) == (0, 4, None, None)
        return
    with pytest.raises(ValueError, match=message):
        find_place()


@pytest.mark.parametrize(
    ("variables", "method"),
    [
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=29", "tcp://h:29"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=fe80::1 MASTER_PORT=29", "tcp://[fe80::1]:29"),
        ("VLLM_DP_RANK=0 VLLM_DP_SIZE=2 VLLM_DP_MASTER_IP=10.0.0.1 VLLM_DP_MASTER_PORT=13", "tcp://10.0.0.1:13"),
        (f"{SRUN} MASTER_ADDR=h MASTER_PORT=29", "tcp://h:29"),
        (f"{SRUN} MASTER_PORT=29", "tcp://rack3n07:29"),
        (f"{SRUN} MASTER_PORT=29 SLURM_STEP_NODELIST=gpu1,node[2-3]", "tcp://gpu1:29"),
        ("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2 SLURM_JOB_ID=1 SLURM_STEP_ID=0", "127"),
    ],
)
def test_where_ranks_meet(monkeypatch: pytest.MonkeyPatch, variables: str, method: str) -> None:
    put(monkeypatch, variables)
    found = find_place().init_method()
    if method == "127":
        address, port = found.rsplit(":", 1)
        assert address == "tcp://127.0.0.1"
        assert 1024 < int(port) < 32768
        monkeypatch.setenv("SLURM_STEP_ID", "1")
        assert find_place().init_method() != found
    else:
        assert found == method


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        ("RANK=0 WORLD_SIZE=2", ("MASTER_ADDR", "MASTER_PORT")),
        ("PMI_RANK=0 PMI_SIZE=2 MASTER_ADDR=h", ("MASTER_ADDR", "MASTER_PORT")),
        ("VLLM_DP_RANK=0 VLLM_DP_SIZE=2 VLLM_DP_MASTER_IP=h", ("VLLM_DP_MASTER_IP", "VLLM_DP_MASTER_PORT")),
    ],
)
def test_nowhere_to_meet_is_named(monkeypatch: pytest.MonkeyPatch, variables: str, names: tuple[str, str]) -> None:
    put(monkeypatch, variables)
    with pytest.raises(ValueError, match=f"set {names[0]} to rank 0's host and {names[1]} to a free port"):
        find_place().init_method()


def test_an_engine_of_one_rank_is_its_own_world_but_shares_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, SRUN)
    assert seen(find_place().fit(1)) == (0, 1, 1, 2)
    assert seen(find_place().fit(5)) == (3, 5, 1, 2)
    put(monkeypatch, "RANK=3 WORLD_SIZE=5")
    assert seen(find_place().fit(1)) == (3, 5, 1, 2)


def test_data_parallel_size(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launchers.data_parallel_size(1, 2) == 1
    put(monkeypatch, "VLLM_DP_RANK=1 VLLM_DP_SIZE=2")
    assert launchers.data_parallel_size(1, 1) == 2
    assert launchers.data_parallel_size(2, 1) == 2
    with pytest.raises(ValueError, match="data_parallel_size=4, but VLLM_DP_SIZE=2"):
        launchers.data_parallel_size(4, 1)
    with pytest.raises(ValueError, match="tensor_parallel_size=2 needs 2 each: start all 4 with torchrun"):
        launchers.data_parallel_size(1, 2)
    put(monkeypatch, "RANK=3 WORLD_SIZE=4")
    assert launchers.data_parallel_size(1, 2) == 2
