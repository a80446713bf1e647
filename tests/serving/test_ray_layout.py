# SPDX-License-Identifier: Apache-2.0
"""Ranks as Ray actors, without Ray: where a stand-in says they are, what they are told, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from vllm import LLM
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli import serve
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.launch import Launch
from vllm.v1.engine.ray_launch import RayAgent, neighbours_together, resources, variables_of_ranks


def place(node: str, device: str = "", name: str = "CUDA_VISIBLE_DEVICES", port: int = 7000) -> dict[str, Any]:
    devices = {name: device} if device else {}
    return {"node": node, "address": f"10.0.0.{node}", "interface": f"eth{node}", "port": port, "devices": devices}


class StandIn(types.ModuleType):
    """Ray with a cluster of ``cpus``, as far as placing goes."""

    def __init__(self, cpus: float) -> None:
        super().__init__("ray")
        self.cpus, self.asked, self.is_down = cpus, [], False
        self.util = types.ModuleType("ray.util")
        self.util.placement_group = types.ModuleType("ray.util.placement_group")
        self.util.placement_group.placement_group = self.place

    def init(self, **_: Any) -> None:
        if self.cpus < 0:
            raise ConnectionError("nobody answers")

    def shutdown(self) -> None:
        self.is_down = True

    def available_resources(self) -> dict[str, float]:
        return {"CPU": self.cpus}

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": self.cpus + 1, "memory": 1e9}

    def nodes(self) -> list[dict[str, bool]]:
        return [{"Alive": True}, {"Alive": False}]

    def place(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        self.asked.append((bundles, strategy))
        fits = sum(bundle["CPU"] for group, _ in self.asked for bundle in group) <= self.cpus
        return types.SimpleNamespace(wait=lambda seconds: fits)


@pytest.fixture
def stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    ray = StandIn(request.param)
    for name, module in (("ray", ray), ("ray.util", ray.util), ("ray.util.placement_group", ray.util.placement_group)):
        monkeypatch.setitem(sys.modules, name, module)
    return ray


def agent(tp: int, dp: int) -> RayAgent:
    args = {"model": "m", "distributed_executor_backend": "ray", "tensor_parallel_size": tp, "data_parallel_size": dp}
    return RayAgent(Launch(args, tp * dp))


@pytest.mark.parametrize("stand_in", [4], indirect=True)
def test_a_bundle_for_each_rank_and_a_group_for_each_dp_rank(stand_in: StandIn) -> None:
    assert len(agent(2, 2)._place(resources("cpu"))) == 2
    assert stand_in.asked == [([{"CPU": 1}, {"CPU": 1}], "PACK")] * 2
    assert resources("cuda") == resources("xpu") == {"GPU": 1}


@pytest.mark.parametrize("stand_in", [3], indirect=True)
def test_no_room_says_what_was_asked_and_what_there_is(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLACEMENT_TIMEOUT_S", "1.5")
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    asked = "4 ranks (data_parallel_size=2 placement groups of tensor_parallel_size=2 bundles, each of {'CPU': 1.0})"
    with pytest.raises(ValueError, match=re.escape(f"{asked} in 1.5 s: its 1 nodes have 4 CPU, of which 3 were free")):
        agent(2, 2).run()
    assert stand_in.is_down


@pytest.mark.parametrize("stand_in", [-1], indirect=True)
def test_a_cluster_that_does_not_answer(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.9.9.9:6379")
    with pytest.raises(ValueError, match=r"RAY_ADDRESS='10\.9\.9\.9:6379': .*nobody answers; give the address"):
        agent(1, 2).run()


def test_groups_of_a_machine_are_neighbours() -> None:
    places = [place(node) for node in "1122112313"]
    assert neighbours_together(places, 2) == [0, 1, 4, 5, 8, 9, 2, 3, 6, 7]
    assert neighbours_together(places[:3], 1) == [0, 1, 2]


def test_variables_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ORDERED_SUMS", "1")
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.99")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("PATH_OF_MINE", "x")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("_VLLM_FRONT_END", "{}")
    places = [place("1", "3", port=71), place("1", "0", port=72), place("2", "5", port=73)]
    found = variables_of_ranks(places, attempt=2)
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    assert [[variables[name] for name in names] for variables in found] == [
        ["0", "3", "0", "2", "10.0.0.1", "71"],
        ["1", "3", "1", "2", "10.0.0.1", "71"],
        ["2", "3", "0", "1", "10.0.0.1", "71"],
    ]
    assert [variables.get("CUDA_VISIBLE_DEVICES") for variables in found] == ["3,0", "3,0", None]
    assert [variables["GLOO_SOCKET_IFNAME"] for variables in found] == ["eth1", "eth1", "eth2"]
    assert {variables["TORCHELASTIC_RESTART_COUNT"] for variables in found} == {"2"}
    assert [variables["_VLLM_NODE"] for variables in found] == ["1", "1", "2"]
    for variables in found:
        assert variables["VLLM_ORDERED_SUMS"] == "1"
        assert variables["_VLLM_FRONT_END"] == "{}"
        assert not {"VLLM_HOST_IP", "VLLM_API_KEY", "PATH_OF_MINE"} & set(variables)
    assert "GLOO_SOCKET_IFNAME" not in variables_of_ranks(places[:2], 0)[0]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    assert variables_of_ranks(places, 0)[2]["GLOO_SOCKET_IFNAME"] == "mine"


@pytest.mark.parametrize(
    ("name", "own", "joint"),
    [
        ("ZE_AFFINITY_MASK", ["1", "0"], "1,0"),
        ("ONEAPI_DEVICE_SELECTOR", ["level_zero:1", "level_zero:0"], "level_zero:1,0"),
        ("CUDA_VISIBLE_DEVICES", ["0,1", "0,1"], None),  # Ray was told to leave it alone
    ],
)
def test_ranks_of_a_machine_see_its_devices(name: str, own: list[str], joint: str | None) -> None:
    found = variables_of_ranks([place("1", device, name) for device in own], 0)
    assert [variables.get(name) for variables in found] == [joint] * 2


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given: dict[str, Any] = {"distributed_executor_backend": "ray", "skip_tokenizer_init": True}
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 99}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = str(tmp_path)
    with pytest.raises(NotImplementedError, match=r"'ray' is not supported by LLM.* use vllm serve or AsyncLLM"):
        LLM(model, **given)
    args = EngineArgs(model, data_parallel_size=2, **given)
    find = importlib.util.find_spec
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else find(name, *rest))
        with pytest.raises(ValueError, match=r'not installed: pip install "ray>=2.40"'):
            AsyncLLM.from_engine_args(args)
        patch.setattr(importlib.util, "find_spec", lambda name, *rest: True if name == "ray" else find(name, *rest))
        with pytest.raises(ValueError, match=r"nnodes=2 with Ray.*leave nnodes out"):
            AsyncLLM.from_engine_args(args, nnodes=2)
    words = [model, "--distributed-executor-backend", "ray", "--skip-tokenizer-init", "--headless"]
    assert serve.main(words) == 2
    assert "--headless with Ray" in capsys.readouterr().err
