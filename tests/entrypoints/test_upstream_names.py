# SPDX-License-Identifier: Apache-2.0
"""Every name that clients import can be imported; the absent ones say their name when they are used, not before."""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import sys
from abc import ABC
from pathlib import Path

import pytest

import vllm
from vllm import _upstream_names, envs

ROWS = [
    tuple(line.split())
    for line in Path(__file__).with_name("upstream_names.txt").read_text().splitlines()
    if not line.startswith("#")
]


def import_name(module: str, name: str):
    """As ``from module import name`` does."""
    scope: dict = {}
    exec(f"import {module}" if name == "-" else f"from {module} import {name} as it", scope)
    return scope.get("it", sys.modules[module])


def test_the_list_covers_the_table():
    listed = {(module, name) for module, name, _ in ROWS}
    assert len(ROWS) == len(listed) > 300
    assert {(m, n) for m, names in _upstream_names.NAMES.items() for n in names} <= listed


@pytest.mark.parametrize("kind", ["here", "absent"])
def test_every_name_is_imported_and_absent_ones_refuse_use(kind):
    for module, name, _ in (row for row in ROWS if row[2] == kind):
        value = import_name(module, name)
        if name.endswith("Error"):
            assert issubclass(value, Exception), name
        elif kind == "absent":
            with pytest.raises(NotImplementedError, match=rf"vllm\.\S+\.{name} is upstream's"):
                value()
        else:
            assert not (isinstance(value, type) and issubclass(value, _upstream_names.Absent)), (module, name)


def test_names_are_there_in_a_fresh_process():
    """The finder is in place before any module of the package is imported."""
    imports = "\n".join(f"from {m} import {n}" if n != "-" else f"import {m}" for m, n, _ in ROWS)
    subprocess.run([sys.executable, "-c", imports], check=True, cwd=Path(__file__).parents[2])


def test_what_scripts_do_with_absent_classes():
    from vllm.logits_process import LogitsProcessor
    from vllm.outputs import PoolingRequestOutput
    from vllm.sampling_params import GuidedDecodingParams
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.engine.exceptions import EngineDeadError

    class Mine(LogitsProcessor, ABC):
        def apply(self, logits):
            return logits

    with pytest.raises(NotImplementedError, match=r"vllm\.logits_process\.LogitsProcessor"):
        Mine()
    with pytest.raises(NotImplementedError, match=r"AsyncMPClient\.make_client.*not used"):
        AsyncMPClient.make_client(None)
    with pytest.raises(NotImplementedError, match=r"GuidedDecodingParams.*StructuredOutputsParams"):
        GuidedDecodingParams(regex="a+")
    assert not isinstance(3, PoolingRequestOutput)
    assert PoolingRequestOutput[int] is PoolingRequestOutput
    assert (PoolingRequestOutput | None) is not None
    assert not hasattr(AsyncMPClient, "__torch_function__")
    with pytest.raises(ZeroDivisionError), contextlib.suppress(EngineDeadError):
        _ = 1 / 0


def test_unlisted_names_are_errors_as_ever():
    with pytest.raises(ImportError):
        importlib.import_module("vllm.utils.nowhere")
    with pytest.raises(ImportError, match="Nothing"):
        import_name("vllm.config", "Nothing")
    with pytest.raises(AttributeError, match="Nothing"):
        _ = vllm.Nothing


def test_environment_entries():
    assert envs.VLLM_USE_V1 is True
    assert envs.VLLM_ENABLE_V1_MULTIPROCESSING is False
    assert "VLLM_LOGGING_LEVEL" in envs.environment_variables


def test_utilities(monkeypatch):
    from vllm.utils import Counter, cdiv, get_distributed_init_method, get_ip, get_open_port, random_uuid, round_up
    from vllm.utils.math_utils import next_power_of_2
    from vllm.v1.engine import FinishReason

    counter = Counter(3)
    assert (next(counter), next(counter), counter.counter) == (3, 4, 5)
    assert (cdiv(7, 3), round_up(7, 4), next_power_of_2(5), next_power_of_2(0)) == (3, 8, 8, 1)
    assert random_uuid() != random_uuid()
    assert len(random_uuid()) == 32
    assert 0 < get_open_port() < 65536
    assert get_ip()
    monkeypatch.setenv("VLLM_HOST_IP", "2001:db8::7")
    assert get_distributed_init_method(get_ip(), 80) == "tcp://[2001:db8::7]:80"
    assert FinishReason.STOP == "stop"
    assert str(FinishReason.LENGTH) == "length"


def test_set_random_seed():
    import random

    import numpy as np
    import torch

    from vllm.model_executor.utils import set_random_seed

    draws = []
    for _ in range(2):
        set_random_seed(7)
        draws.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert draws[0] == draws[1]
