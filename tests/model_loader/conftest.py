# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from toy_checkpoint import ToyModel

from vllm.model_executor.models.registry import ModelRegistry


@pytest.fixture(autouse=True)
def toy_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRegistry, "_known", dict(ModelRegistry._known))
    ModelRegistry.register_model("ToyModel", ToyModel)


@pytest.fixture
def poison():
    """Uninitialised memory is NaN (floats) or the largest value (integers)."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]
