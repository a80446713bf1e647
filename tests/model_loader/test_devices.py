# SPDX-License-Identifier: Apache-2.0
"""Checkpoints load for any device: files are read on the CPU, what a module keeps is on the device.

The meta device stands for the other one: it has no memory that a CPU kernel or numpy could take for its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_gguf_loader
import tiny_deepseeks  # noqa: F401
import tiny_hybrids as hybrids
import tiny_models as tiny
import torch
from torch import nn

from vllm import LLM
from vllm.kernels import ops, reference
from vllm.kernels.weights import PackedExperts
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models.causal_lm import CausalLM


def kept(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that ``value`` holds in attributes, fields, items or submodules, with the way to it."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, nn.Module) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        for name, part in vars(value).items():
            yield from kept(part, f"{path}.{name}", seen)
    elif isinstance(value, dict | list | tuple):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from kept(part, f"{path}[{name}]", seen)


def assert_all_on_meta(model: nn.Module) -> None:
    tensors = dict(kept(model, "model", set()))
    # The rows of a shard are indices into the checkpoint's tensor, on the CPU.
    elsewhere = [path for path, t in tensors.items() if t.device.type != "meta" and "shards" not in path]
    assert not elsewhere
    assert len(tensors) > 10


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("name", ["llama-bias", "mixtral", "qwen3-next", "qwen3.5-moe", "v3"])
def test_folders_and_dummy_weights(name: str, load_format: str) -> None:
    models = tiny if name in tiny.CHECKPOINTS else hybrids
    llm = models.make_llm(name, load_format=load_format)
    with torch.device("meta"):
        model = get_model(llm.llm_engine.vllm_config)
    llm.shutdown()
    assert_all_on_meta(model)


def test_gguf_files(tmp_path: Path) -> None:
    test_gguf_loader.write_gguf(tmp_path / "m.gguf", "mixtral", test_gguf_loader.Kind.Q8_0)
    settings = {"skip_tokenizer_init": True, "max_model_len": 64, "num_gpu_blocks_override": 20}
    llm = LLM(str(tmp_path / "m.gguf"), **settings)
    with torch.device("meta"):
        model = get_model(llm.llm_engine.vllm_config)
    llm.shutdown()
    assert_all_on_meta(model)


@pytest.mark.parametrize("name", ["mixtral", "qwen3.5-moe", "v3"])
def test_a_step_makes_its_tensors_on_the_device_of_its_inputs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another default device shows each tensor that is made without naming one: the operators refuse to mix them."""
    models = tiny if name in tiny.CHECKPOINTS else hybrids
    forward, compute_logits, experts = CausalLM.forward, CausalLM.compute_logits, []

    def elsewhere(method):
        def call(self, *args):
            with torch.device("meta"):
                return method(self, *args)

        return call

    def experts_ref(*args):
        experts.append(args[0].shape)
        return fused_experts(*args)

    fused_experts = reference.fused_experts
    monkeypatch.setenv("VLLM_KERNELS", "reference")
    monkeypatch.setattr(CausalLM, "forward", elsewhere(forward))
    monkeypatch.setattr(CausalLM, "compute_logits", elsewhere(compute_logits))
    monkeypatch.setattr(reference, "fused_experts", experts_ref)
    llm = models.make_llm(name)
    (tokens,) = tiny.tokens(tiny.generate(llm, [tiny.prompt(9)], 6))
    llm.shutdown()
    assert tokens == models.greedy(name, tiny.prompt(9), 6)
    assert experts


def test_the_twins_make_their_tensors_on_the_device_of_their_inputs() -> None:
    def run() -> list[torch.Tensor]:
        generator = torch.Generator("cpu").manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device="cpu")

        w13, w2 = (PackedExperts(3, n, k, torch.float32, draw(3, n, k), "plain", n == 16) for n, k in ((16, 4), (4, 8)))
        ids = torch.tensor([[0, 2], [-1, -1], [1, -1]], dtype=torch.int32, device="cpu")
        moe = reference.fused_experts(draw(3, 4), w13, w2, ids, draw(3, 2))
        query, keys, values, out = draw(5, 2, 4), draw(4, 1, 4, 4), draw(4, 1, 4, 4), draw(5, 2, 4)
        table, starts, lengths = (
            torch.tensor(x, dtype=torch.int32, device="cpu") for x in ([[1, 2], [3, 0]], [0, 3, 5], [7, 2])
        )
        reference.paged_attention(query, keys, values, table, starts, lengths, 0.5, out, sliding_window=3)
        return [moe, out]

    expected = run()
    with torch.device("meta"):
        found = run()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_experts_of_another_device_are_not_packed_for_the_cpu() -> None:
    packed = ops.pack_expert_weights(torch.empty(2, 32, 16, device="meta"), gated=True)
    assert (packed.kind, packed.data.device.type, packed.data.shape) == ("plain", "meta", (2, 32, 16))
