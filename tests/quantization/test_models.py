# SPDX-License-Identifier: Apache-2.0
"""Quantised models through the engine: transformers' tokens on the dequantised weights in fp32, in one process."""

from __future__ import annotations

import pytest
import tiny_models as tiny
import tiny_quantised as quantised
import torch

from vllm.kernels.quantized import QuantizedWeight
from vllm.model_executor.layers.fused_moe import FusedMoE
from vllm.model_executor.layers.linear import LinearBase

CASES = [
    *(f"{format}:llama" for format in ("fp8-block", "ct-int8", "ct-w8a8", "gptq-order", "auto-round-awq")),
    "gptq:qwen3-moe",
    "fp8-tensor:mixtral",
    "awq:mixtral",
    "gptq-order:qwen3-moe",
    "ct-int4-order:mixtral",
    "ct-mxfp4:qwen3-moe",
    "ct-int4:qwen3.5-moe",
    "fp8-block:qwen3.5-moe",
    # single layers in 16 bits: a shard of a merged one, a feed-forward
    r"gptq:llama-bias:layers\.0\.self_attn\.k_proj|layers\.1\.mlp\.gate_proj|layers\.1\.mlp\.down_proj",
    r"ct-fp8-rows:qwen3.5-moe:in_proj_z|layers\.1\..*experts|shared_expert\.up_proj",
]


def layers(llm, kind):
    return [m for m in llm.llm_engine.worker.get_model().modules() if isinstance(m, kind)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("nan_poison")
def test_tokens(name):
    llm = quantised.make_llm(name)
    prompts = [tiny.prompt(n, seed=3) for n in (5, 24, 1)]
    got = tiny.tokens(tiny.generate(llm, prompts, 12))
    assert got == [quantised.greedy(name, prompt, 12) for prompt in prompts]
    kept = [m.is_quantized for m in layers(llm, (LinearBase, FusedMoE))]
    assert sum(kept) > len(kept) / 2
    llm.shutdown()


def test_a_shard_in_16_bits_is_a_product_of_its_own():
    name = r"gptq:llama-bias:layers\.0\.self_attn\.k_proj|layers\.1\.mlp\.gate_proj|layers\.1\.mlp\.down_proj"
    llm = quantised.make_llm(name)
    qkv = llm.llm_engine.worker.get_model().model.layers[0].self_attn.qkv_proj
    assert [isinstance(packed, QuantizedWeight) for _, packed in qkv.products] == [True, False, True]
    x = torch.randn(3, 64)
    parts = [m for n, m in quantised.reference_model(name).model.layers[0].self_attn.named_children() if n[0] in "qkv"]
    expected = torch.cat([p(x) for p in parts if isinstance(p, torch.nn.Linear)], dim=1)
    torch.testing.assert_close(qkv(x), expected, rtol=1e-4, atol=1e-4)
    llm.shutdown()


def rows_rounded(w: torch.Tensor, format: str) -> torch.Tensor:
    most = w.abs().amax(1, keepdim=True)
    if format == "int8":
        return (w / (most / 127)).round() * (most / 127)
    return (w / (most / 448)).to(torch.float8_e4m3fn).float() * (most / 448)


@pytest.mark.parametrize("format", ["fp8", "int8"])
def test_quantised_while_loading(format):
    """Each row by its largest magnitude; embeddings, heads and routers keep 16 bits."""
    llm = tiny.make_llm("qwen3-moe", quantization=format)
    reference = tiny.AutoModelForCausalLM.from_pretrained(tiny.checkpoint("qwen3-moe"), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, p in reference.named_parameters():
            if p.dim() > 1 and not any(kept in name for kept in ("embed", "lm_head", "gate.weight")):
                p.copy_(rows_rounded(p.flatten(0, -2), format).view(p.shape))
    prompt = tiny.prompt(9, seed=4)
    reference.generation_config.eos_token_id = None
    expected = reference.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False, pad_token_id=0)
    assert tiny.tokens(tiny.generate(llm, [prompt], 10)) == [tuple(expected[0, 9:].tolist())]
    model = llm.llm_engine.worker.get_model()
    assert llm.llm_engine.model_config.quantization == format
    assert not model.lm_head.is_quantized
    assert not model.model.embed_tokens.is_quantized
    assert all(m.is_quantized == ("gate" not in m.shards[0].name.split(".")) for m in layers(llm, LinearBase))
    llm.shutdown()


def test_a_quantised_head_and_embedding(tmp_path, monkeypatch):
    monkeypatch.setattr(quantised, "FLOAT", quantised.re.compile("norm"))
    folder, twin = tmp_path / "quantised", tmp_path / "float"
    quantised.write(quantised._source("qwen3"), folder, "gptq", twin=twin)
    reference = tiny.AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32).eval()
    reference.generation_config.eos_token_id = None
    prompt = tiny.prompt(9, seed=4)
    expected = reference.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False, pad_token_id=0)
    llm = quantised.make_llm("", model=str(folder))
    model = llm.llm_engine.worker.get_model()
    assert model.lm_head.is_quantized
    assert model.model.embed_tokens.is_quantized
    assert tiny.tokens(tiny.generate(llm, [prompt], 10)) == [tuple(expected[0, 9:].tolist())]
    llm.shutdown()


@pytest.mark.parametrize("head_too", [False, True], ids=["one", "both stored"])
def test_a_tied_embedding_in_fp8_is_exact(tmp_path, monkeypatch, head_too):
    """Also in bfloat16, where other products take the codes as int8: so the head's, and a stored head is found tied."""
    monkeypatch.setattr(quantised, "FLOAT", quantised.re.compile("norm"))
    quantised.write(quantised._source("llama"), tmp_path / "quantised", "fp8-tensor", twin=tmp_path / "float")
    tensors = dict(quantised.stored(tmp_path / "quantised"))
    if head_too:
        of = [n for n in tensors if "embed_tokens" in n]
        tensors |= {n.replace("model.embed_tokens", "lm_head"): tensors[n].clone() for n in of}
        quantised.save_file(tensors, tmp_path / "quantised" / "model-0.safetensors")
    llm = quantised.make_llm("", model=str(tmp_path / "quantised"), dtype="bfloat16")
    model = llm.llm_engine.worker.get_model()
    meant = dict(quantised.stored(tmp_path / "float"))["model.embed_tokens.weight"]
    assert model.lm_head.packed is None
    assert len(meant) >= 128, "few rows are exact whatever they are packed for"
    assert torch.equal(model.model.embed_tokens(torch.arange(len(meant))), meant.bfloat16())
    hidden = torch.randn(5, 64).bfloat16()
    right = hidden.double() @ meant.double().T
    assert (model.lm_head(hidden).double() - right).abs().max() <= 2**-8 * right.abs().max()
    llm.shutdown()


def test_dummy_weights_of_a_quantised_checkpoint():
    llm = quantised.make_llm("gptq:llama", load_format="dummy")
    assert all(m.is_quantized and m.packed.format == "int4" for m in layers(llm, LinearBase))
    assert len(tiny.tokens(tiny.generate(llm, [tiny.prompt(5)], 4))[0]) == 4
    llm.shutdown()
