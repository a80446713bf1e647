# SPDX-License-Identifier: Apache-2.0
"""Layer outputs live in buffers that the layers share: a step allocates nothing for each layer."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models as tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm.forward_context import set_forward_context
from vllm.kernels.cpu.ops import kernels_available
from vllm.model_executor.layers.step_buffers import StepBuffers, buffer_key, step_buffer


class Allocations(TorchDispatchMode):
    """The operations whose results lie in memory that none of their inputs has."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        new = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        if any(x.untyped_storage().data_ptr() not in given for x in new):
            self.found.append(str(func))
        return out


@pytest.mark.skipif(not kernels_available(), reason="the plain torch twins allocate; no C++ compiler here")
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_step_allocates_nothing_in_its_layers(name: str) -> None:
    from vllm import LLM

    limits = {"max_model_len": 64, "max_num_seqs": 4}
    llm = LLM(tiny.checkpoint(name), dtype="float32", skip_tokenizer_init=True, enforce_eager=True, **limits)
    layers = llm.llm_engine.worker.runner.model.model.layers
    by_step: list[list[str]] = []
    calls = [layer.forward for layer in layers]

    def counted(call: Any) -> Any:
        def forward(*args: Any) -> Any:
            with Allocations() as seen:
                out = call(*args)
            by_step.append(seen.found)
            return out

        return forward

    tiny.generate(llm, [tiny.prompt(9)], 2)
    for layer, call in zip(list(layers)[1:], calls[1:], strict=True):
        layer.forward = counted(call)
    tiny.generate(llm, [tiny.prompt(9)], 4)
    assert len(by_step) == 4 * (len(layers) - 1)
    assert not any(by_step), by_step


def test_layers_of_a_kind_share_a_buffer_of_the_largest_step() -> None:
    buffers = StepBuffers(5)
    first, second = (buffer_key(f"model.layers.{i}.mlp.down_proj.weight", 8, torch.float32) for i in (0, 11))
    other = buffer_key("model.layers.0.self_attn.o_proj.weight", 8, torch.float32)
    assert first == second
    three = buffers.take(first, 3)
    assert three.shape == (3, 8)
    assert buffers.take(second, 3).data_ptr() == three.data_ptr()
    assert buffers.take(first, 2).data_ptr() == three.data_ptr()
    assert buffers.take(first, 2).shape == (2, 8)
    assert buffers.take(other, 3).data_ptr() != three.data_ptr()
    assert buffers.take(first, 5).shape == (5, 8)
    assert buffers.take(first, 5).data_ptr() == three.data_ptr()
    assert buffers.nbytes == 2 * 5 * 8 * 4
    with pytest.raises(AssertionError, match="6 rows in a step of at most 5"):
        buffers.take(first, 6)


def test_outside_a_step_the_caller_allocates() -> None:
    key = buffer_key("lm_head.weight", 8, torch.float32)
    assert step_buffer(key, 3) is None
    with set_forward_context(None):
        assert step_buffer(key, 3) is None
    with set_forward_context(None, step_buffers=StepBuffers(3)):
        taken = step_buffer(key, 3)
        assert taken is not None
        assert taken.shape == (3, 8)
