# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of one machine: torch's elastic agent as a process of its own (``agent.py``), which ends with its
front end."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from typing import Any

# The front end's address and key, for the ranks that it starts; others ask the ranks' store.
FRONT_END = "_VLLM_FRONT_END"
AGENT = "_VLLM_AGENT"
# The name of a rank's machine, where its launcher tells it.
NODE = "_VLLM_NODE"
ALIVE, KILL_RANKS = b"\0", b"k"
# The agent's last words, after one of these: what its front end raises as a ``ValueError``, or why the engine is lost.
REFUSED, LOST = b"r", b"l"
_PR_SET_PDEATHSIG = 1
_SIOCGIFADDR = 0x8915


class RankFailed(RuntimeError):
    """Which rank ended first, and how."""

    def __init__(self, rank: int, code: int) -> None:
        why = " (memory ran out, where nobody sent it)" if code == -signal.SIGKILL else ""
        super().__init__(f"rank {rank} {how_ended(code)}{why}")


@dataclass(frozen=True)
class Launch:
    """How ranks are started.

    Attributes:
        engine_args: of ``EngineArgs``, as JSON holds them.
        num_ranks: in all, the same number on each machine.
        nnodes, node_rank: how many machines, and which of them this is; machine 0 has the front end.
        master_addr, master_port: where the machines meet, on machine 0.
        by_torchrun: other processes, which torchrun started too, are the other ranks; this one is rank 0's.
        max_restarts: how often all ranks are started again after one was lost.
        silence_s: who says nothing for so long is taken for dead.
    """

    engine_args: dict[str, Any]
    num_ranks: int
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 29501
    max_restarts: int = 0
    by_torchrun: bool = False
    silence_s: float = 8.0

    def __post_init__(self) -> None:
        if self.nnodes < 1 or not 0 <= self.node_rank < self.nnodes:
            raise ValueError(f"node_rank={self.node_rank} of nnodes={self.nnodes}: give 0 to nnodes - 1")
        if self.num_ranks % self.nnodes:
            raise ValueError(
                f"{self.num_ranks} ranks (tensor_parallel_size x data_parallel_size) on nnodes={self.nnodes} machines: "
                "each runs as many, so give a number of machines that divides them"
            )
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts={self.max_restarts}: give 0 or more")
        if self.by_torchrun and (self.on_ray or self.max_restarts):
            what = 'distributed_executor_backend="ray"' if self.on_ray else f"max_restarts={self.max_restarts}"
            raise ValueError(f"{what} under torchrun, which starts the ranks itself, with its own --max-restarts")
        if self.on_ray and self.nnodes > 1:
            raise ValueError(f"nnodes={self.nnodes} with Ray, which knows its machines: leave nnodes out")

    @property
    def on_ray(self) -> bool:
        return self.engine_args.get("distributed_executor_backend") == "ray"


def how_ended(code: int) -> str:
    """``code``: as of ``subprocess``, negative for a signal."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def die_with(parent: int) -> None:
    """Have the kernel end this process with the thread of ``parent`` that started it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def die_with_the_agent() -> None:
    if AGENT in os.environ:
        die_with(int(os.environ[AGENT]))


def end_at_the_agents_word() -> None:
    """Where SIGTERM is blocked, as the agent leaves it to its ranks: one that the agent sends ends this process."""
    if signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, []):
        return

    def wait() -> None:
        while signal.sigwaitinfo([signal.SIGTERM]).si_pid != int(os.environ[AGENT]):
            pass
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, name="vllm-agents-word", daemon=True).start()


class Agent:
    """The front end's handle on its agent. Made by a thread that lives until the agent has ended."""

    def __init__(self, launch: Launch, front_end: dict[str, Any]) -> None:
        self.socket, remote = socket.socketpair()
        self.socket.setblocking(False)
        arguments = json.dumps({"launch": asdict(launch), "fd": remote.fileno(), "parent": os.getpid()})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vllm.v1.engine.agent", arguments],
            stdin=subprocess.DEVNULL,
            pass_fds=[remote.fileno()],
            start_new_session=True,  # an interrupt at the terminal is the front end's to answer
            env={**os.environ, FRONT_END: json.dumps(front_end)},
        )
        remote.close()

    def tell(self, what: bytes = ALIVE) -> None:
        with contextlib.suppress(OSError):
            self.socket.send(what)

    def kill(self) -> None:
        """End it and, with it, its ranks; returns when it is gone."""
        self.process.kill()
        self.process.wait()


def run_rank_0(launch: Launch) -> None:
    """Run it to its end, in the place that torchrun gave to this process; raises ``RankFailed``."""
    os.environ[AGENT] = str(os.getpid())
    if code := subprocess.call([sys.executable, "-m", "vllm.v1.engine.rank_process", json.dumps(launch.engine_args)]):
        raise RankFailed(0, code)


def run_agent(launch: Launch) -> int:
    """Run the ranks of this machine to their end; returns the exit code. Raises ``RankFailed``."""
    if launch.by_torchrun:
        run_rank_0(launch)
        return 0
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    os.environ[AGENT] = str(os.getpid())
    single, address = launch.nnodes == 1, "127.0.0.1"
    if not single:
        address, interface = own_address(launch)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # by the host's name it may find the loopback
        # An agent says only once where its store is: a machine that comes back would wait for it in vain.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = LaunchConfig(
        min_nodes=launch.nnodes,
        max_nodes=launch.nnodes,
        nproc_per_node=launch.num_ranks // launch.nnodes,
        run_id="vllm",
        role="rank",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0" if single else f"{launch.master_addr}:{launch.master_port}",
        rdzv_configs={"timeout": 900} if single else {"timeout": 900, "is_host": str(launch.node_rank == 0)},
        local_addr=address,
        max_restarts=launch.max_restarts,
        monitor_interval=0.25,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # else it leaves a folder in /tmp
    )
    try:
        launch_agent(config, sys.executable, ["-m", "vllm.v1.engine.rank_process", json.dumps(launch.engine_args)])
    except SignalException as error:
        return 128 + error.sigval
    except ChildFailedError as error:
        # One that was killed makes the others fail; torch knows the times in whole seconds.
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        rank = next((rank for rank, code in codes.items() if code < 0), error.get_first_failure()[0])
        raise RankFailed(rank, codes[rank]) from None
    return 0


def own_address(launch: Launch) -> tuple[str, str]:
    """By what address the other machines see this one, and its network interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((launch.master_addr, launch.master_port))
        except OSError as error:
            raise ValueError(f"master_addr={launch.master_addr!r} cannot be reached from here: {error}") from error
        address = probe.getsockname()[0]
    if (name := interface_of(address)) is None:
        raise ValueError(f"no network interface has the address {address}, by which {launch.master_addr!r} is reached")
    return address, name


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has an IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # without an address
                asked = struct.pack("256s", name.encode()[:15])
                if socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)[20:24]) == address:
                    return name
    return None


def leave(code: int) -> None:
    """End without the interpreter's farewell, which takes seconds with all that was imported."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
