# SPDX-License-Identifier: Apache-2.0
"""The kind of fault: a captured step reads a tensor that its module has replaced since."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tiny_models as tiny
import torch

from vllm.kernels.cpu.ops import kernels_available
from vllm.model_executor.layers.layer import Layer

pytestmark = pytest.mark.skipif(not kernels_available(), reason="the C++ kernels cannot be built here")


def by_name(norm: Layer, weight: torch.Tensor) -> None:
    norm.weight = weight


def after_it_is_gone(norm: Layer, weight: torch.Tensor) -> None:
    del norm.weight
    norm.weight = weight


def as_a_parameter(norm: Layer, weight: torch.Tensor) -> None:
    norm.weight = torch.nn.Parameter(weight, requires_grad=False)


def as_a_parameter_of_another_value(norm: Layer, weight: torch.Tensor) -> None:
    """The attribute itself says nothing of the second change."""
    norm.weight = torch.nn.Parameter(torch.ones_like(weight), requires_grad=False)
    norm._parameters["weight"] = torch.nn.Parameter(weight, requires_grad=False)


@pytest.mark.parametrize("replace", [by_name, after_it_is_gone, as_a_parameter, as_a_parameter_of_another_value])
def test_a_replaced_tensor_is_read(replace: Callable[[Layer, torch.Tensor], None]) -> None:
    sizes = {"compilation_config": {"cudagraph_capture_sizes": [1]}, "max_num_seqs": 1}
    engines = [tiny.make_llm("llama", enforce_eager=eager, **sizes) for eager in (True, False)]
    runner = engines[1].llm_engine.engine_core.worker.runner
    found = []
    for change in (None, replace):
        before = runner.counts.replayed
        for llm in engines:
            if change is not None:
                norm = llm.llm_engine.engine_core.worker.runner.model.model.norm
                change(norm, norm.weight.flip(0) * torch.linspace(-2, 2, len(norm.weight)))
        expected, got = (tiny.tokens(tiny.generate(llm, [tiny.prompt(5)], 8)) for llm in engines)
        assert got == expected
        assert runner.counts.replayed - before == 7
        found.append(got)
    assert found[0] != found[1]
    for llm in engines:
        llm.shutdown()
