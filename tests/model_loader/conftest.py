# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from toy_checkpoint import ToyModel

from vllm.model_executor.models.registry import ModelRegistry


@pytest.fixture(autouse=True)
def toy_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRegistry, "_known", dict(ModelRegistry._known))
    ModelRegistry.register_model("ToyModel", ToyModel)


@pytest.fixture
def poison(nan_poison):
    """Uninitialised memory is NaN (floats), something out of range or -1 (integers)."""
