# SPDX-License-Identifier: Apache-2.0
"""The kinds of fault: a captured step goes on as if its modules were as they were, though a tensor of one is another or
somebody wants to see what it computes; or what is captured in service for that reason costs a request its cache."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tiny_hybrids as hybrids
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


def where_parameters_are(norm: Layer, weight: torch.Tensor) -> None:
    """Which says nothing of it."""
    norm._parameters["weight"] = torch.nn.Parameter(weight, requires_grad=False)


@pytest.mark.parametrize(
    "changes",
    [[by_name], [after_it_is_gone], [as_a_parameter, where_parameters_are]],
    ids=["name", "gone", "parameter"],
)
def test_a_replaced_tensor_is_read(changes: list[Callable[[Layer, torch.Tensor], None]]) -> None:
    sizes = {"compilation_config": {"cudagraph_capture_sizes": [1]}, "max_num_seqs": 1}
    engines = [tiny.make_llm("llama", enforce_eager=eager, **sizes) for eager in (True, False)]
    norms = [llm.llm_engine.engine_core.worker.runner.model.model.norm for llm in engines]
    counts = engines[1].llm_engine.engine_core.worker.runner.counts
    found = []
    for change in (lambda norm, weight: None, *changes):
        for norm in norms:
            change(norm, norm.weight.flip(0) * torch.linspace(-2, 3, len(norm.weight)))
        before = counts.replayed
        expected, got = (tiny.tokens(tiny.generate(llm, [tiny.prompt(5)], 8)) for llm in engines)
        assert got == expected
        assert got not in found
        assert counts.replayed - before == 7
        found.append(got)
    for llm in engines:
        llm.shutdown()


def test_a_hook_that_comes_later_is_called() -> None:
    llm = tiny.make_llm("llama", compilation_config={"cudagraph_capture_sizes": [1]}, max_num_seqs=1)
    runner = llm.llm_engine.engine_core.worker.runner
    for count in (1, 2):
        tiny.generate(llm, [tiny.prompt(5)], 4)
        assert runner.counts.replayed == 3 * count
        seen: list[int] = []
        hook = runner.model.model.layers[1].register_forward_hook(lambda *_, seen=seen: seen.append(1))
        tiny.generate(llm, [tiny.prompt(5)], 4)
        assert len(seen) == 4
        hook.remove()
    llm.shutdown()


def test_batches_of_a_capture_in_service_reach_no_request() -> None:
    """They write to blocks that cached prefixes lie in: not while a request has found some, and none is found later."""
    sizes = {"compilation_config": {"cudagraph_capture_sizes": [1]}, "max_num_seqs": 1, "max_model_len": 160}
    sizes["num_gpu_blocks_override"] = 12
    llm = tiny.make_llm("llama", enable_prefix_caching=True, **sizes)
    runner = llm.llm_engine.engine_core.worker.runner
    known, other = tiny.prompt(50), tiny.prompt(3, seed=1)

    def found(prompt: tuple[int, ...]) -> int:
        (output,) = tiny.generate(llm, [prompt], 4)
        assert tiny.tokens([output]) == [tiny.greedy("llama", prompt, 4)]
        return output.num_cached_tokens

    assert found(known) == 0
    runner.model.model.norm.weight = runner.model.model.norm.weight.clone()
    assert found(known) > 0
    assert runner.graphs.is_stale, "captured while a request holds cached blocks"
    assert found(other) == 0
    assert not runner.graphs.is_stale
    assert found(known) == 0
    assert found(known) > 0
    llm.shutdown()


def test_captures_leave_no_state() -> None:
    llm = hybrids.make_llm("qwen3-next", enforce_eager=False, compilation_config={"cudagraph_capture_sizes": [8]})
    runner = llm.llm_engine.engine_core.worker.runner
    pools = [layer.recurrent_state for layer in runner.cached_layers.values() if hasattr(layer, "clear_state")]
    assert pools
    assert runner.graphs.steps
    assert not any(pool[1:].any() for pool in pools)
    llm.shutdown()
