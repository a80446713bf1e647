# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys

import pytest
from torch import nn
from toy_checkpoint import ToyModel

from vllm.model_executor.models.registry import ModelRegistry, _ModelRegistry

REQUIRED = {"LlamaForCausalLM", "Qwen3ForCausalLM", "MixtralForCausalLM", "Qwen3MoeForCausalLM"}


def test_knows_the_required_architectures():
    assert set(ModelRegistry.get_supported_archs()) >= REQUIRED


def test_unknown_architecture_lists_the_known():
    with pytest.raises(ValueError) as caught:
        ModelRegistry.resolve_model_cls(["NoSuchForCausalLM"])
    for name in ("NoSuchForCausalLM", "register_model", *REQUIRED):
        assert name in str(caught.value)


def test_empty_architectures_list_the_known():
    with pytest.raises(ValueError, match="LlamaForCausalLM"):
        ModelRegistry.resolve_model_cls([])


def test_first_known_of_several_architectures():
    assert ModelRegistry.resolve_model_cls(["NoSuchForCausalLM", "ToyModel"]) == (ToyModel, "ToyModel")


def test_imports_on_first_use(tmp_path, monkeypatch):
    (tmp_path / "lazily_imported_model.py").write_text("from torch import nn\nclass Lazy(nn.Module): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry = _ModelRegistry({"Lazy": "lazily_imported_model:Lazy"})
    assert "lazily_imported_model" not in sys.modules
    model_cls, name = registry.resolve_model_cls("Lazy")
    assert (model_cls.__name__, name) == ("Lazy", "Lazy")
    monkeypatch.delitem(sys.modules, "lazily_imported_model")


def test_registers_classes_and_names():
    registry = _ModelRegistry({})
    registry.register_model("A", nn.Linear)
    registry.register_model("B", "torch.nn:Embedding")
    assert registry.resolve_model_cls(["A"])[0] is nn.Linear
    assert registry.resolve_model_cls(["B"])[0] is nn.Embedding


@pytest.mark.parametrize("model_cls", ["torch.nn.Linear", "torch.nn:", ":Linear", int, nn.Linear(1, 1)])
def test_refuses_what_is_no_model_class(model_cls):
    with pytest.raises(ValueError, match="module:class"):
        _ModelRegistry({}).register_model("A", model_cls)
