# SPDX-License-Identifier: Apache-2.0
"""How engines begin and end: scripts that forget ``shutdown()``, second engines, two at once, and other launchers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import launcher
import pytest
import tiny_models as tiny

from vllm.launchers import LAUNCHERS

pytestmark = pytest.mark.multiprocess

SCRIPT = str(Path(__file__).with_name("lifetimes.py"))
LAYOUTS = [(1, 1, 0), (2, 1, 0), (1, 2, 0), (1, 2, 1), (2, 2, 0), (2, 2, 1)]
FOREIGN = {name for of in LAUNCHERS for name in (of.rank, of.world_size, of.local_rank, of.local_world_size)}
ENV = {
    **{name: value for name, value in os.environ.items() if name not in FOREIGN},
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """Forks ranks in milliseconds; see lifetimes.py."""
    command = [sys.executable, SCRIPT, tiny.checkpoint("mixtral")]
    with subprocess.Popen(
        command, env=ENV, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        yield process
        end(process)


class Ended(NamedTuple):
    codes: list[int]
    outputs: list[str]


def fork(server: subprocess.Popen[str], way: str, tp: int, dp: int, ep: int, environments: list[Any]) -> Ended:
    """Run a way on ranks with these variables; every token that they print must be transformers'."""
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps([way, tp, dp, ep, environments]) + "\n")
    server.stdin.flush()
    ended = Ended(*map(list, zip(*json.loads(server.stdout.readline()), strict=True)))
    assert check_tokens("".join(ended.outputs)) >= len(environments), ended
    return ended


def run(server: subprocess.Popen[str], way: str, tp: int = 1, dp: int = 1, ep: int = 0, replicas: int = 1) -> Ended:
    size = tp * dp * replicas
    world = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "BACKEND": "external_launcher", **meeting()}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank), **world} for rank in range(size)]
    return fork(server, way, tp, dp, ep, ranks if size > 1 else [{}])


def check_tokens(output: str) -> int:
    told = re.findall(r"TOKENS rank=\d length=(\d+) \[(.*)\]", output)
    for length, tokens in told:
        right = tiny.greedy("mixtral", tuple(range(3, 3 + int(length))), 4)
        assert tuple(map(int, tokens.split(","))) == right
    return len(told)


def meeting() -> dict[str, str]:
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(launcher.free_port())}


def torchrun(way: str, tp: int, dp: int, ep: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={tp * dp}"]
    command += [SCRIPT, tiny.checkpoint("mixtral"), way, str(tp), str(dp), str(ep)]
    return subprocess.Popen(
        command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=300)
    finally:
        end(process)
    check_tokens(out)
    return process.returncode, out, err


def end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize(
    ("tp", "dp", "ep"),
    # Ranks of DP meet in more groups with EP than without.
    [pytest.param(*layout, marks=[pytest.mark.slow] * (layout[1:] == (2, 0))) for layout in LAYOUTS],
)
def test_a_script_that_ends_without_shutdown_ends_well(
    server: subprocess.Popen[str], tp: int, dp: int, ep: int
) -> None:
    ended = run(server, "falls off its end", tp, dp, ep)
    assert ended.codes == [0] * (tp * dp), ended.outputs


def test_no_thread_is_inside_the_store_when_the_interpreter_goes(server: subprocess.Popen[str]) -> None:
    ended = run(server, "polls all the time", 1, 2)
    assert ended.codes == [0, 0], ended.outputs


@pytest.mark.parametrize("way", ["sys.exit(0)", "del llm"])
def test_other_good_ends(server: subprocess.Popen[str], way: str) -> None:
    ended = run(server, way, 1, 2)
    assert ended.codes == [0, 0], ended.outputs


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("tp", "dp", "ep"), [*LAYOUTS, (4, 1, 0), (4, 1, 1), (1, 4, 0), (1, 4, 1)])
def test_fifty_good_ends(server: subprocess.Popen[str], tp: int, dp: int, ep: int) -> None:
    ways = ["falls off its end", "sys.exit(0)", "del llm", "polls all the time"]
    codes = [run(server, ways[i % len(ways)], tp, dp, ep).codes for i in range(50)]
    assert codes == [[0] * (tp * dp)] * 50


def test_a_rank_that_lingers_is_not_hurt_and_holds_nobody_for_long(server: subprocess.Popen[str]) -> None:
    ended = run(server, "one rank lingers", 1, 2)
    assert ended.codes == [0, 0], ended.outputs


def test_an_exception_ends_all_with_its_traceback(server: subprocess.Popen[str]) -> None:
    """Rank 1 is in a call that needs rank 0."""
    ended = run(server, "raises", 1, 2)
    assert ended.codes == [1, 1], ended.outputs
    assert ended.outputs[0].rstrip().endswith("KeyError: 'of the script'")
    assert "CollectiveError" in ended.outputs[1]


def test_how_one_process_fails(server: subprocess.Popen[str]) -> None:
    ended = run(server, "raises")
    assert ended.codes == [1]
    assert ended.outputs[0].rstrip().endswith("KeyError: 'of the script'")
    ended = run(server, "interrupts itself")
    assert ended.codes == [-signal.SIGINT]
    assert ended.outputs[0].rstrip().endswith("KeyboardInterrupt")


def test_ctrl_c_ends_all() -> None:
    """As a terminal sends it: to the launcher and to every rank."""
    process = torchrun("interrupted", 2, 2, 0)
    try:
        assert process.stdout is not None
        while "READY" not in (line := process.stdout.readline()):
            assert line
        begun = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=120)
    finally:
        end(process)
    assert time.monotonic() - begun < 30
    assert process.returncode != 0
    assert "terminate called" not in err
    assert "KeyboardInterrupt" in err


def test_three_engines_in_the_store_of_torchrun() -> None:
    code, out, err = finish(torchrun("cleans up three times", 2, 1, 0))
    assert code == 0, err[-4000:]
    assert out.count("TOKENS") == 6


@pytest.mark.parametrize("way", ["shuts down three times", "drops three times"])
def test_three_engines_one_after_another(server: subprocess.Popen[str], way: str) -> None:
    ended = run(server, way, 2, 1)
    assert ended.codes == [0, 0], ended.outputs
    assert "".join(ended.outputs).count("TOKENS") == 6


@pytest.mark.parametrize(
    ("way", "tp"),
    [
        ("falls off its end", 1),
        pytest.param("one rank lingers", 2, marks=pytest.mark.slow),  # one engine's ranks do below and above alike
        ("drops three times", 2),
    ],
)
def test_replicas_end_well(server: subprocess.Popen[str], way: str, tp: int) -> None:
    ended = run(server, way, tp, replicas=2)
    assert ended.codes == [0] * 2 * tp, ended.outputs


@pytest.mark.parametrize("dp", [1, 2])
def test_two_engines_at_once(server: subprocess.Popen[str], dp: int) -> None:
    ended = run(server, "two engines", 1, dp)
    assert ended.codes == [0] * dp, ended.outputs
    assert "".join(ended.outputs).count("TOKENS") == 4 * dp


# -- other launchers


def places(
    server: subprocess.Popen[str], tp: int, dp: int, way: str = "says where it is", **variables: str
) -> list[str]:
    """What two ranks say that were started with these variables, ``#`` standing for the rank."""
    ranks = [{name: text.replace("#", str(rank)) for name, text in variables.items()} for rank in range(2)]
    ended = fork(server, way, tp, dp, 0, [{"OWN_RANK": str(i), **rank} for i, rank in enumerate(ranks)])
    assert ended.codes == [0, 0], ended.outputs
    return [re.findall("PLACE (.*)", output)[0] for output in ended.outputs]


def test_ranks_of_mpirun_share_their_host(server: subprocess.Popen[str]) -> None:
    hydra = {"PMI_RANK": "#", "PMI_SIZE": "2", "MPI_LOCALRANKID": "#", "MPI_LOCALNRANKS": "2"}
    assert places(server, 1, 2, **hydra, **meeting()) == ["0 0/2", "1 1/2"]


def test_two_engines_of_srun_that_have_nothing_to_do_with_each_other_share_their_host(
    server: subprocess.Popen[str],
) -> None:
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    assert places(server, 1, 1, SLURM_PROCID="#", SLURM_LOCALID="#", **step) == ["0 0/2", "0 1/2"]


def test_ranks_without_local_variables_find_each_other(server: subprocess.Popen[str]) -> None:
    assert places(server, 2, 1, RANK="#", WORLD_SIZE="2", **meeting()) == ["0 0/2", "1 1/2"]


def test_ranks_of_the_offline_data_parallel_example(server: subprocess.Popen[str]) -> None:
    """No size is passed and no launcher used: one process for each DP rank, placed by these variables."""
    where = {"VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": str(launcher.free_port())}
    assert places(server, 1, 1, VLLM_DP_RANK="#", VLLM_DP_RANK_LOCAL="#", VLLM_DP_SIZE="2", **where) == [
        "0 0/2",
        "1 1/2",
    ]


def test_torch_distributed_initialised_by_the_caller(server: subprocess.Popen[str], tmp_path: Path) -> None:
    way = f"file://{tmp_path}/meeting"
    assert places(server, 1, 2, way, VLLM_CHECK_COLLECTIVES="1") == ["0 0/2", "1 1/2"]
