# SPDX-License-Identifier: Apache-2.0
"""load_weights on a running engine: afterwards it is the engine of the other checkpoint."""

from __future__ import annotations

import pytest
import tiny_hybrids
import torch
from tiny_models import generate, greedy, make_llm, prompt, reference_model, tokens

from vllm.kernels import ops
from vllm.model_executor.layers.layernorm import RMSNorm

PROMPTS = [prompt(40), prompt(7)]


def load_weights(llm, weights) -> set[str]:
    """On the path that trainers take."""
    return llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights(weights)


@pytest.mark.parametrize("name", ["llama", "llama-bias", "qwen3", "qwen3-moe", "qwen3-moe-mixed"])
@pytest.mark.parametrize("together", [False, True], ids=["one-by-one", "together"])
def test_another_checkpoint_in_place(name, together):
    llm = make_llm(name, enable_prefix_caching=True)
    generate(llm, PROMPTS, 8)
    places = {
        module: module.packed.data.data_ptr()
        for module in llm.llm_engine.worker.runner.model.modules()
        if getattr(module, "packed", None) is not None
    }
    # The trainer's parameters, as transformers names them: experts are stacked.
    named = [(n, p.detach()) for n, p in reference_model(name, seed=3).named_parameters()]
    for part in [named] if together else [[one] for one in reversed(named)]:
        load_weights(llm, iter(part))
    outputs = generate(llm, PROMPTS, 8)
    assert tokens(outputs) == [greedy(name, p, 8, seed=3) for p in PROMPTS]
    assert all(output.num_cached_tokens == 0 for output in outputs), "prefixes of the old weights are stale"
    assert {module: module.packed.data.data_ptr() for module in places} == places, "memory is reused"
    llm.shutdown()


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5-moe"])
def test_recurrent_layers(name):
    """One tensor a call: the small ones of a layer are replaced one after the other."""
    llm = tiny_hybrids.make_llm(name)
    generate(llm, PROMPTS, 4)
    for one in tiny_hybrids.reference_model(name, seed=3).named_parameters():
        load_weights(llm, [one])
    assert tokens(generate(llm, PROMPTS, 8)) == [tiny_hybrids.greedy(name, p, 8, seed=3) for p in PROMPTS]
    llm.shutdown()


def test_faults_are_named():
    llm = make_llm("qwen3")
    with pytest.raises(ValueError, match=r"no weight 'model.layers.0.self_attn.q_pro.weight'; the nearest is .*q_proj"):
        load_weights(llm, [("model.layers.0.self_attn.q_pro.weight", torch.zeros(1))])
    with pytest.raises(ValueError, match=r"shape \(3,\), the model's is \(64,\).*whole tensor"):
        load_weights(llm, [("model.norm.weight", torch.zeros(3))])
    assert load_weights(llm, [("model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(8))]) == set()
    llm.shutdown()


def test_the_trainers_tensor_is_copied():
    llm = make_llm("qwen3")
    ones = torch.ones(64)
    load_weights(llm, [("model.norm.weight", ones)])
    ones.fill_(float("nan"))
    norm = llm.llm_engine.worker.runner.model.model.norm
    assert isinstance(norm, RMSNorm)
    assert torch.equal(norm.weight, torch.ones(64))
    llm.shutdown()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (7, 5), (16, 64), (70, 33), (129, 96)])
def test_unpacked_is_what_was_packed(rows, cols, dtype):
    weight = torch.randn(rows, cols).to(dtype)
    weight[0, 0] = float("nan")
    packed = ops.pack_linear_weight(weight.clone())
    again = ops.unpack_linear_weight(packed)
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    assert torch.equal(again.view(bits), weight.view(bits))
    other = torch.randn(rows, cols).to(dtype)
    place = packed.data.data_ptr()
    packed = ops.pack_linear_weight(other, packed)
    if packed.kind == "panels":
        assert packed.data.data_ptr() == place
        assert torch.equal(ops.unpack_linear_weight(packed), other)
