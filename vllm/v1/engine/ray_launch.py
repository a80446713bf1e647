# SPDX-License-Identifier: Apache-2.0
"""Ranks as Ray actors: what the agent runs in place of torch's with ``distributed_executor_backend="ray"``.

Each actor has its rank as a child process, which ends with it, and the actors end with the agent, which is their
driver. Of a lost rank the front end hears by the rank's own connection, as without Ray.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from vllm import envs
from vllm.utils.network_utils import get_open_port
from vllm.v1.engine.launch import AGENT, FRONT_END, NODE, Launch, interface_of

# What a rank needs of the front end's environment; that machine's address and the server's key are not among it.
_PASSED_ON = re.compile(
    r"(?!VLLM_(HOST_IP|API_KEY)$)(VLLM|HF|TRANSFORMERS|TOKENIZERS|TORCH|TRITON|GLOO|NCCL|CCL|OMP|KMP)_.*|PYTHONPATH"
)
# In one of them Ray tells an actor its devices.
_DEVICES = ("CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR")
_POLL_S = 0.25
_HEAR_S = 2.0


def check_installed() -> None:
    if importlib.util.find_spec("ray") is None:
        raise ValueError('distributed_executor_backend="ray", but Ray is not installed: pip install "ray>=2.40"')


class RankActor:
    """On the machine that Ray chose for a rank."""

    def about(self) -> dict[str, Any]:
        """This machine, a port that is free on it, and the devices that Ray lets this actor use."""
        import ray

        address = ray.util.get_node_ip_address()
        return {
            "node": f"{address} ({ray.get_runtime_context().get_node_id()[:8]})",
            "address": address,
            "interface": interface_of(address),
            "port": get_open_port(),
            "devices": {name: os.environ[name] for name in _DEVICES if os.environ.get(name)},
        }

    def run(self, arguments: str, variables: dict[str, str]) -> int:
        """The rank to its end; returns its exit code."""
        env = {**os.environ, AGENT: str(os.getpid()), **variables}
        if "OMP_NUM_THREADS" not in variables:  # Ray's, and the rank knows better
            env.pop("OMP_NUM_THREADS", None)
        command = [sys.executable, "-m", "vllm.v1.engine.rank_process", arguments]
        return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL).wait()


def resources(device_type: str) -> dict[str, float]:
    """What one rank asks Ray for."""
    return {"CPU": 1.0} if device_type == "cpu" else {"GPU": 1.0}


def neighbours_together(places: Sequence[dict[str, Any]], tp_size: int) -> list[int]:
    """The order of actors, made group by group, in which those are the ranks: groups of one machine are neighbours."""
    nodes = list(dict.fromkeys(place["node"] for place in places))
    groups = sorted(range(0, len(places), tp_size), key=lambda first: nodes.index(places[first]["node"]))
    return [first + i for first in groups for i in range(tp_size)]


def variables_of_ranks(places: Sequence[dict[str, Any]], attempt: int) -> list[dict[str, str]]:
    """torchrun's variables, and others, for the ranks in ``places``. All ranks of a machine see its devices, in their
    order: each takes that of its LOCAL_RANK."""
    passed_on = {name: value for name, value in os.environ.items() if _PASSED_ON.fullmatch(name) or name == FRONT_END}
    several = len({place["node"] for place in places}) > 1
    found = []
    for rank, place in enumerate(places):
        here = [other for other, there in enumerate(places) if there["node"] == place["node"]]
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(places)),
            "LOCAL_RANK": str(here.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(here)),
            "MASTER_ADDR": places[0]["address"],
            "MASTER_PORT": str(places[0]["port"]),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            NODE: place["node"],
        }
        if several and place["interface"]:  # by the host's name Gloo may find the loopback
            variables["GLOO_SOCKET_IFNAME"] = place["interface"]
        for name in place["devices"]:
            values = dict.fromkeys(places[other]["devices"].get(name, "") for other in here)
            if len(values) > 1:
                kind, colon, _ = place["devices"][name].rpartition(":")
                variables[name] = kind + colon + ",".join(value.rpartition(":")[2] for value in values)
        found.append({**variables, **passed_on})
    return found


class RayAgent:
    """``killed``: attempts whose ranks another thread has end, and start again where they may."""

    def __init__(self, launch: Launch) -> None:
        self.launch, self.killed = launch, set[int]()
        self.tp_size = int(launch.engine_args.get("tensor_parallel_size", 1))

    def run(self) -> int:
        """The ranks to their end; returns the exit code. Raises ``ValueError`` where Ray cannot be reached or has no
        room, ``RuntimeError`` with the rank that was lost."""
        import ray

        from vllm.platforms import current_platform

        try:
            ray.init(include_dashboard=False, namespace="vllm")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"RAY_ADDRESS={os.environ.get('RAY_ADDRESS', '')!r}: Ray cannot be reached or started: {error}; give "
                "the address of a node that runs `ray start`, or unset it"
            ) from error
        try:
            wanted = resources(current_platform.device_type)
            groups = self._place(wanted)
            for attempt in range(self.launch.max_restarts + 1):
                actors = self._make_actors(groups, wanted)
                try:
                    lost = self._run_ranks(actors, attempt)
                    if lost is None:
                        return 0
                    print(f"vllm: {lost}", file=sys.stderr, flush=True)
                    self._let_front_end_hear(attempt)
                finally:
                    for actor in actors:
                        ray.kill(actor)
            raise RuntimeError(lost)
        finally:
            ray.shutdown()

    def _let_front_end_hear(self, attempt: int) -> None:
        """Which rank was lost first, before the others are."""
        end = time.monotonic() + _HEAR_S
        while attempt not in self.killed and time.monotonic() < end:
            time.sleep(_POLL_S / 5)

    def _place(self, wanted: dict[str, float]) -> list[Any]:
        """A placement group for each DP group, on as few machines as hold it."""
        import ray
        from ray.util.placement_group import placement_group

        free, bound_s = ray.available_resources(), envs.VLLM_PLACEMENT_TIMEOUT_S
        num_groups, end = self.launch.num_ranks // self.tp_size, time.monotonic() + bound_s
        groups = [placement_group([wanted] * self.tp_size, strategy="PACK") for _ in range(num_groups)]
        if all(group.wait(max(end - time.monotonic(), 0.01)) for group in groups):
            return groups
        total, (name,) = ray.cluster_resources(), wanted
        nodes = sum(node["Alive"] for node in ray.nodes())
        raise ValueError(
            f"Ray found no room for {self.launch.num_ranks} ranks (data_parallel_size={num_groups} placement groups of "
            f"tensor_parallel_size={self.tp_size} bundles, each of {wanted}) in {bound_s:g} s: its {nodes} nodes have "
            f"{total.get(name, 0):g} {name}, of which {free.get(name, 0):g} were free; add nodes (ray start "
            "--address=…), end what uses them, ask for fewer ranks, or for more time with VLLM_PLACEMENT_TIMEOUT_S"
        )

    def _make_actors(self, groups: list[Any], wanted: dict[str, float]) -> list[Any]:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        make = ray.remote(RankActor)
        return [
            make.options(
                num_cpus=wanted.get("CPU", 0),
                num_gpus=wanted.get("GPU", 0),
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            ).remote()
            for group in groups
            for index in range(self.tp_size)
        ]

    def _run_ranks(self, actors: list[Any], attempt: int) -> str | None:
        """Returns the rank that was lost and how, None where all left together."""
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        bound_s = envs.VLLM_PLACEMENT_TIMEOUT_S
        try:
            places = ray.get([actor.about.remote() for actor in actors], timeout=bound_s)
        except GetTimeoutError:
            return f"Ray did not start the ranks' actors in {bound_s:g} s (VLLM_PLACEMENT_TIMEOUT_S)"
        except RayError as error:
            return f"an actor died before its rank was started: {error}"
        order = neighbours_together(places, self.tp_size)
        places = [places[index] for index in order]
        arguments = json.dumps(self.launch.engine_args)
        variables = variables_of_ranks(places, attempt)
        running = {actors[index].run.remote(arguments, variables[rank]): rank for rank, index in enumerate(order)}
        while running:
            ended, _ = ray.wait(list(running), timeout=_POLL_S)
            if attempt in self.killed:
                return "the front end has lost a rank"
            for run in ended:
                rank = running.pop(run)
                try:
                    how = f"ended with code {code}" if (code := ray.get(run)) else None
                except RayError as error:
                    how = f"ended with its actor: {' '.join(str(error).split())}"
                if how is not None:
                    return f"rank {rank} on node {places[rank]['node']} {how}"
        return None
