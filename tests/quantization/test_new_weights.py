# SPDX-License-Identifier: Apache-2.0
"""New weights for layers that are held quantised: the tokens of an engine that was given them at its start."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import tiny_models as tiny
import tiny_quantised as quantised
import torch
from tiny_quantised import stored

PROMPTS = [tiny.prompt(9, seed=4), tiny.prompt(3)]


def tokens(llm) -> list[tuple[int, ...]]:
    return tiny.tokens(tiny.generate(llm, PROMPTS, 8))


def model_of(llm):
    return llm.llm_engine.worker.get_model()


def load_apart(llm, weights) -> None:
    """One tensor a call, none of them there any more after it."""
    for name, tensor in weights:
        lent = tensor.clone()
        model_of(llm).load_weights([(name, lent)])
        lent.view(torch.uint8).fill_(0xFF) if lent.dim() else lent.fill_(0)


def other_checkpoint(name: str, tmp_path: Path) -> tuple[Path, list[tuple[int, ...]]]:
    """The same model with other weights in the same format, and transformers' tokens of what they mean."""
    format, model, *rest = name.split(":")
    folder, twin = tmp_path / "quantised", tmp_path / "float"
    source = Path(tiny.checkpoint(model, 3))
    quantised.write(source, folder, format, rest[0] if rest else None, twin=twin)
    reference = tiny.AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32).eval()
    reference.generation_config.eos_token_id = None
    made = [
        reference.generate(torch.tensor([p]), max_new_tokens=8, do_sample=False, pad_token_id=0)[0, len(p) :].tolist()
        for p in PROMPTS
    ]
    return folder, [tuple(ids) for ids in made]


NAMES = [
    "gptq-order:qwen3-moe",
    "fp8-block:mixtral",
    "ct-int4:llama",
    "ct-mxfp4:qwen3-moe",
    r"gptq:llama-bias:layers\.0\.self_attn\.k_proj|layers\.1\.mlp\.gate_proj|layers\.1\.mlp\.down_proj",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("nan_poison")
def test_another_checkpoint_in_the_same_format(name, tmp_path):
    """In the order of the files, in none with each tensor in a call of its own, and after sleep(level=2)."""
    other, expected = other_checkpoint(name, tmp_path)
    llm = quantised.make_llm(name, enable_prefix_caching=True)
    first = tokens(llm)
    assert first == [quantised.greedy(name, prompt, 8) for prompt in PROMPTS] != expected
    specs = {spec.name for spec in model_of(llm).weight_specs() if not spec.optional}
    assert model_of(llm).load_weights(iter(stored(other))) >= specs
    assert tokens(llm) == expected
    mixed = stored(quantised.checkpoint(name))
    random.Random(0).shuffle(mixed)
    load_apart(llm, mixed)
    assert tokens(llm) == first
    llm.sleep(level=2)
    assert not any(getattr(module, "is_quantized", False) for module in model_of(llm).modules())
    llm.wake_up()
    with pytest.raises(ValueError, match="have not come back"):
        tokens(llm)
    load_apart(llm, reversed(stored(other)))
    assert tokens(llm) == expected
    llm.shutdown()


@pytest.mark.parametrize("format", ["fp8", "int8"])
@pytest.mark.parametrize("name", ["qwen3-moe", "llama-bias"])
@pytest.mark.usefixtures("nan_poison")
def test_16_bits_for_what_the_engine_quantises(name, format):
    """As trainers send them, stacked experts too."""
    other = tiny.make_llm(name, 3, quantization=format)
    expected = tokens(other)
    other.shutdown()
    llm = tiny.make_llm(name, quantization=format)
    first = tokens(llm)
    assert first != expected
    named = [(n, p.detach()) for n, p in tiny.reference_model(name, seed=3).named_parameters()]
    model_of(llm).load_weights(iter(named))
    assert tokens(llm) == expected
    llm.sleep(level=2)
    llm.wake_up()
    load_apart(llm, stored(tiny.checkpoint(name)))
    assert tokens(llm) == first
    llm.shutdown()


def test_into_weights_that_were_made_up():
    """Which tensors a matrix has nobody has told then; those that the engine quantises itself come as any others."""
    llm = quantised.make_llm("gptq:llama", load_format="dummy")
    with pytest.raises(ValueError, match=r"made-up weights in the form of gptq .*; load one, or quantization='fp8'"):
        model_of(llm).load_weights(stored(quantised.checkpoint("gptq:llama")))
    llm.shutdown()
    given, made_up = (tiny.make_llm("qwen3", quantization="int8", load_format=f) for f in ("auto", "dummy"))
    load_apart(made_up, stored(tiny.checkpoint("qwen3")))
    assert tokens(made_up) == tokens(given)
    for llm in (given, made_up):
        llm.shutdown()


Q = "model.layers.0.self_attn.q_proj"


def test_a_part_alone_is_waited_for():
    """A matrix of which tensors lack, and one that lies in memory with others that have not come."""
    llm = quantised.make_llm("gptq:llama")
    expected, weights = tokens(llm), dict(stored(quantised.checkpoint("gptq:llama")))
    model_of(llm).load_weights([(f"{Q}.scales", weights[f"{Q}.scales"])])
    with pytest.raises(ValueError, match=rf"1 weights .* have not come back \({Q}\)"):
        tokens(llm)
    rest = [(n, t) for n, t in weights.items() if n.startswith(Q) and not n.endswith("scales")]
    assert model_of(llm).load_weights(rest) == {f"{Q}.weight"}
    with pytest.raises(ValueError, match=r"2 weights .* have not come back \(.*k_proj.weight, .*v_proj.weight\)"):
        tokens(llm)
    model_of(llm).load_weights([(n, t) for n, t in weights.items() if re.search(r"layers\.0\..*[kv]_proj", n)])
    assert tokens(llm) == expected
    llm.shutdown()


@pytest.mark.parametrize(
    ("leaf", "change", "told"),
    [
        ("scales", lambda t: t * float("nan"), rf"{Q}\.weight: \d+ of \d+ scales cannot be.* nan"),
        ("scales", lambda t: t[:, :32], r"scales has shape \[8, 32\], needed"),
        ("qweight", lambda t: t.float(), rf"{Q}\.qweight .*float32.*needed .* int32"),
    ],
)
def test_faults(leaf, change, told):
    llm = quantised.make_llm("gptq:llama")
    weights = [(n, t) for n, t in stored(quantised.checkpoint("gptq:llama")) if n.startswith(Q)]
    with pytest.raises(ValueError, match=told):
        model_of(llm).load_weights([(n, change(t) if n.endswith(leaf) else t) for n, t in weights])
    llm.shutdown()


def test_codes_for_what_the_engine_quantises():
    llm = tiny.make_llm("llama", quantization="int8")
    with pytest.raises(ValueError, match=rf"{Q}\.weight: given as torch.int8"):
        model_of(llm).load_weights([(f"{Q}.weight", torch.zeros(64, 64, dtype=torch.int8))])
    llm.shutdown()
