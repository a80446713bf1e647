# SPDX-License-Identifier: Apache-2.0
"""How engines begin and end: scripts that forget ``shutdown()``, second engines, two at once, and other launchers."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import launcher
import pytest
import tiny_models as tiny

from vllm.launchers import LAUNCHERS

pytestmark = pytest.mark.multiprocess

SCRIPT = str(Path(__file__).with_name("lifetimes.py"))
LAYOUTS = [(1, 1, 0), (2, 1, 0), (1, 2, 0), (1, 2, 1), (2, 2, 0), (2, 2, 1)]
ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "VLLM_LOGGING_LEVEL": "WARNING"}


def start(way: str, tp: int = 1, dp: int = 1, ep: int = 0, torchrun: bool = True) -> subprocess.Popen[str]:
    first = [sys.executable]
    if torchrun and tp * dp > 1:
        first += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={tp * dp}"]
    command = [*first, SCRIPT, way, tiny.checkpoint("mixtral"), str(tp), str(dp), str(ep)]
    return subprocess.Popen(
        command,
        env={**os.environ, **ENV},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(way: str, tp: int = 1, dp: int = 1, ep: int = 0) -> tuple[int, str, str]:
    """(exit code, stdout, stderr), once every rank's tokens are found to be transformers'."""
    process = start(way, tp, dp, ep)
    try:
        out, err = process.communicate(timeout=120)
    finally:
        end(process)
    told = re.findall(r"TOKENS rank=\d length=(\d+) \[(.*)\]", out)
    for length, tokens in told:
        right = tiny.greedy("mixtral", tuple(range(3, 3 + int(length))), 4)
        assert tuple(map(int, tokens.split(","))) == right
    assert len(told) >= tp * dp, err[-4000:]
    return process.returncode, out, err


def end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize(("tp", "dp", "ep"), LAYOUTS)
def test_a_script_that_ends_without_shutdown_ends_well(tp: int, dp: int, ep: int) -> None:
    code, _, err = run("falls off its end", tp, dp, ep)
    assert (code, "terminate" in err) == (0, False), err[-4000:]


def test_no_thread_is_inside_the_store_when_the_interpreter_goes() -> None:
    code, _, err = run("polls all the time", 1, 2)
    assert (code, "terminate" in err) == (0, False), err[-4000:]


@pytest.mark.parametrize("way", ["sys.exit(0)", "del llm"])
def test_other_good_ends(way: str) -> None:
    code, _, err = run(way, 1, 2)
    assert (code, "terminate" in err) == (0, False), err[-4000:]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("tp", "dp", "ep"), LAYOUTS)
def test_fifty_good_ends(tp: int, dp: int, ep: int) -> None:
    ways = ["falls off its end", "sys.exit(0)", "del llm"]
    codes = [run(ways[i % 3], tp, dp, ep)[0] for i in range(50)]
    assert codes == [0] * 50


def test_a_rank_that_lingers_is_not_hurt_and_holds_nobody_for_long() -> None:
    begun = time.monotonic()
    code, _, err = run("one rank lingers", 1, 2)
    assert code == 0, err[-4000:]
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize("way", ["raises", "raises, the others wait"])
def test_an_exception_ends_all_with_its_traceback(way: str) -> None:
    code, _, err = run(way, 1, 2)
    assert code == 1
    assert "KeyError: 'of the script'" in err
    assert "terminate" not in err
    assert not re.search(r"exitcode\s*: -6", err), err[-4000:]


def test_an_exception_in_one_process() -> None:
    code, _, err = run("raises")
    assert code == 1
    assert err.rstrip().endswith("KeyError: 'of the script'")


def test_ctrl_c_ends_one_process() -> None:
    code, _, err = run("interrupts itself")
    assert code == -signal.SIGINT
    assert err.rstrip().endswith("KeyboardInterrupt")


def test_ctrl_c_ends_all() -> None:
    """As a terminal sends it: to the launcher and to every rank."""
    process = start("interrupted", 2, 2)
    try:
        assert process.stdout is not None
        while "READY" not in process.stdout.readline():
            assert process.poll() is None
        time.sleep(0.3)
        begun = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert time.monotonic() - begun < 30
    finally:
        end(process)
    assert process.returncode != 0
    assert "terminate called" not in err
    assert "KeyboardInterrupt" in err


@pytest.mark.parametrize("way", ["shuts down three times", "cleans up three times", "drops three times"])
def test_three_engines_one_after_another(way: str) -> None:
    code, out, err = run(way, 2, 1)
    assert code == 0, err[-4000:]
    assert out.count("TOKENS") == 6


@pytest.mark.parametrize("dp", [1, 2])
def test_two_engines_at_once(dp: int) -> None:
    code, out, err = run("two engines", 1, dp)
    assert code == 0, err[-4000:]
    assert out.count("TOKENS") == 4 * dp


def places(tp: int, dp: int, way: str = "says where it is", **variables: str) -> list[str]:
    """What two ranks say that were started with these variables, ``#`` standing for the rank."""
    own = {name for of in LAUNCHERS for name in (of.rank, of.world_size, of.local_rank, of.local_world_size)}
    inherited = {name: value for name, value in os.environ.items() if name not in own}
    processes = [
        subprocess.Popen(
            [sys.executable, SCRIPT, way, tiny.checkpoint("mixtral"), str(tp), str(dp), "0", str(rank)],
            env={**inherited, **ENV, **{name: value.replace("#", str(rank)) for name, value in variables.items()}},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for rank in range(2)
    ]
    try:
        ends = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            end(process)
    assert [process.returncode for process in processes] == [0, 0], [err[-3000:] for _, err in ends]
    return [re.findall("PLACE (.*)", out)[0] for out, _ in ends]


def meeting() -> dict[str, str]:
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(launcher.free_port())}


def test_ranks_of_mpirun_share_their_host() -> None:
    hydra = {"PMI_RANK": "#", "PMI_SIZE": "2", "MPI_LOCALRANKID": "#", "MPI_LOCALNRANKS": "2"}
    assert places(1, 2, **hydra, **meeting()) == ["0 0/2", "1 1/2"]


def test_two_engines_of_srun_that_have_nothing_to_do_with_each_other_share_their_host() -> None:
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    assert places(1, 1, SLURM_PROCID="#", SLURM_LOCALID="#", **step) == ["0 0/2", "0 1/2"]


def test_ranks_without_local_variables_find_each_other() -> None:
    assert places(2, 1, RANK="#", WORLD_SIZE="2", **meeting()) == ["0 0/2", "1 1/2"]


def test_ranks_of_the_offline_data_parallel_example() -> None:
    """No size is passed and no launcher used: one process for each DP rank, placed by these variables."""
    where = {"VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": str(launcher.free_port())}
    assert places(1, 1, VLLM_DP_RANK="#", VLLM_DP_RANK_LOCAL="#", VLLM_DP_SIZE="2", **where) == ["0 0/2", "1 1/2"]


def test_torch_distributed_initialised_by_the_caller(tmp_path: Path) -> None:
    way = f"file://{tmp_path}/meeting"
    assert places(1, 2, way, VLLM_CHECK_COLLECTIVES="1") == ["0 0/2", "1 1/2"]
