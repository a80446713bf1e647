# SPDX-License-Identifier: Apache-2.0
"""This process's place among the ranks, as whatever started it says: the one reader of launchers' variables.

Needs neither torch nor a device. What the variables leave open (None) the ranks find out when they meet: once the
groups exist ``vllm.distributed.get_local_rank`` and ``get_local_world_size`` are known.
"""

from __future__ import annotations

import os
import re
import zlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Launcher:
    """The variables of one launcher. ``local_world_size`` of SLURM lists all nodes; ``job`` names the run, alike on all
    its ranks; ``address`` and ``port`` say where they meet."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str = ""
    job: tuple[str, ...] = ()
    address: str = "MASTER_ADDR"
    port: str = "MASTER_PORT"

    def numbers(self) -> tuple[int, int] | None:
        """(rank, world size), or None where this launcher did not start the process."""
        rank, world_size = _number(self.rank), _number(self.world_size)
        return None if rank is None or world_size is None else (rank, world_size)

    def read_local_world_size(self) -> int | None:
        if self.local_world_size != "SLURM_STEP_TASKS_PER_NODE":
            return _number(self.local_world_size)
        # 2(x3),1 is 2 tasks on nodes 0 to 2 and 1 on node 3.
        node = _number("SLURM_NODEID") or 0
        for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get(self.local_world_size, "")):
            if node < int(times or 1):
                return int(tasks)
            node -= int(times or 1)
        return None


def _mpi(name: str, prefix: str, *job: str) -> Launcher:
    return Launcher(name, f"{prefix}RANK", f"{prefix}SIZE", f"{prefix}LOCAL_RANK", f"{prefix}LOCAL_SIZE", job)


_TORCHRUN = Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_DP = Launcher(
    "VLLM_DP_RANK",
    "VLLM_DP_RANK",
    "VLLM_DP_SIZE",
    "VLLM_DP_RANK_LOCAL",
    address="VLLM_DP_MASTER_IP",
    port="VLLM_DP_MASTER_PORT",
)
# MPI's come before SLURM's: inside an allocation mpirun starts its own daemons by srun, one a node. A batch script has
# SLURM_PROCID and SLURM_NTASKS though it runs once; only srun sets the STEP ones.
LAUNCHERS = (
    _TORCHRUN,
    _DP,
    _mpi("Open MPI", "OMPI_COMM_WORLD_", "PMIX_NAMESPACE"),
    _mpi("MVAPICH", "MV2_COMM_WORLD_"),
    Launcher("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Launcher(
        "SLURM",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
)


@dataclass(frozen=True)
class Place:
    """Where this process is.

    Attributes:
        launcher: whose numbers these are; None for a process that was started alone.
        rank, world_size: among all ranks.
        local_rank, local_world_size: among the ranks of this host; None where no variable tells.
    """

    launcher: Launcher | None
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None

    def fit(self, num_ranks: int) -> Place:
        """The place in an engine of ``num_ranks``: MPI and SLURM also start processes that have nothing to do with
        each other, so there an engine of one rank is a world of its own, which shares the host."""
        if num_ranks == 1 and self.launcher not in (None, _TORCHRUN, _DP):
            local_rank, local_world_size = self.local_rank or 0, self.local_world_size or 1
            return Place(self.launcher, 0, 1, local_rank, local_world_size)
        return self

    def init_method(self) -> str:
        """Where the ranks meet, for ``torch.distributed``.

        Raises ``ValueError`` where nothing says it: torchrun, SLURM and, on one host, Open MPI do.
        """
        launcher = self.launcher or _TORCHRUN
        address, port = os.environ.get(launcher.address, ""), _number(launcher.port)
        job = [os.environ.get(name, "") for name in launcher.job]
        if all(job) and job:
            if not address:
                address = "127.0.0.1" if self.local_world_size == self.world_size else _first_slurm_host()
            if port is None:  # below the range that systems hand out
                port = 12000 + zlib.crc32(".".join(job).encode()) % 20000
        if not address or port is None:
            raise ValueError(
                f"{self.world_size} ranks were started ({launcher.rank}, {launcher.world_size}), but not told where to "
                f"meet: set {launcher.address} to rank 0's host and {launcher.port} to a free port there, alike on all"
            )
        return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def find_place(known: tuple[int, int] | None = None) -> Place:
    """What the environment says now; ``known``: (rank, world size) of a caller who has them from elsewhere.

    Raises ``ValueError`` for numbers that are none or contradict each other.
    """
    # A rank without a world, or the reverse, is a mistake in torchrun's variables and in no other's.
    alone = (_number("RANK") or 0, _number("WORLD_SIZE") or 1)
    launcher = next(
        (of for of in LAUNCHERS if (of.numbers() or alone)[1] > 1 or (of is _TORCHRUN and of.numbers())), None
    )
    rank, world_size = known or (launcher and launcher.numbers()) or alone
    if not 0 <= rank < world_size:
        names = launcher or _TORCHRUN
        raise ValueError(f"rank {rank} is outside a world of {world_size}: check {names.rank} and {names.world_size}")
    _check_dp_variables(rank, world_size)
    # One launcher inside another counts where both number this process alike.
    alike = [of for of in LAUNCHERS if of is _TORCHRUN or of.numbers() == (rank, world_size)]
    local_ranks = [_number(of.local_rank) for of in alike]
    local_sizes = [of.read_local_world_size() for of in alike if of.local_world_size]
    lone = world_size == 1
    local_rank = next((n for n in local_ranks if n is not None and n >= 0), 0 if lone else None)
    local_world_size = next((n for n in local_sizes if n), 1 if lone else None)
    return Place(launcher, rank, world_size, local_rank, local_world_size)


def data_parallel_size(given: int, tensor_parallel_size: int) -> int:
    """``VLLM_DP_SIZE`` where it is set and ``given`` leaves it open (1).

    Raises ``ValueError`` where the two differ, or where more than one rank is meant to run in one process.
    """
    size = _number(_DP.world_size)
    if size is None or size == given:
        size = given
    elif given != 1:
        raise ValueError(f"data_parallel_size={given}, but VLLM_DP_SIZE={size}: unset one, or set both alike")
    if size > 1 and tensor_parallel_size > 1 and _DP.numbers() and _TORCHRUN.numbers() is None:
        raise ValueError(
            f"VLLM_DP_RANK and VLLM_DP_SIZE={size} place one process for each DP rank, but tensor_parallel_size="
            f"{tensor_parallel_size} needs {tensor_parallel_size} each: start all {size * tensor_parallel_size} with "
            f"torchrun and data_parallel_size={size} instead"
        )
    return size


def rank_label() -> str | None:
    """This process's rank for log lines, as its launcher wrote it; None for a process that was started alone."""
    return next((os.environ[of.rank] for of in LAUNCHERS if {of.rank, of.world_size} <= os.environ.keys()), None)


def _check_dp_variables(rank: int, world_size: int) -> None:
    dp_rank, dp_size = _number(_DP.rank), _number(_DP.world_size)
    if dp_size is None or dp_size == 1:
        return
    if dp_rank is None:
        raise ValueError(f"VLLM_DP_SIZE={dp_size} without VLLM_DP_RANK: set it to 0..{dp_size - 1}, one for each rank")
    if world_size % dp_size or rank * dp_size // world_size != dp_rank:
        raise ValueError(
            f"VLLM_DP_RANK={dp_rank} of VLLM_DP_SIZE={dp_size} is not where RANK={rank} of WORLD_SIZE={world_size} is "
            "(dp_rank = RANK // tensor_parallel_size): unset one of the two pairs"
        )


def _first_slurm_host() -> str:
    """``node[01-03,07],gpu1`` → ``node01``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", os.environ.get("SLURM_STEP_NODELIST", ""))
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group() if first else "")


def _number(name: str) -> int | None:
    text = os.environ.get(name, "") if name else ""
    try:
        return int(text) if text else None
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a number; start the ranks with a launcher, which sets it") from None
