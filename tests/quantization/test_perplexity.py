# SPDX-License-Identifier: Apache-2.0
"""SmolLM2 quantised to each format: its perplexity on real text is that of the matrices it means, and near its own."""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny_quantised as quantised
import torch
from gguf_blocks import round_to
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from vllm.model_executor.model_loader.gguf_loader import gguf_tensors, read_gguf

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples" / "offline_inference"))

# (format, columns of a group) → the most that perplexity may grow over the float model's, a little above what was
# measured for the dequantised reference; benchmarks/README.md has those figures
GROWTH = {
    ("fp8-tensor", 0): 1.03,
    ("ct-fp8-rows", 0): 1.05,
    ("fp8-block", 0): 1.04,
    ("fp8", 0): 1.05,
    ("ct-int8", 32): 1.005,
    ("ct-w8a8", 0): 1.06,
    ("int8", 0): 1.02,
    ("gptq", 64): 1.33,
    ("gptq-order", 64): 1.4,
    ("awq", 64): 1.33,
    ("auto-round", 64): 1.46,
    ("ct-int4", 32): 1.28,
    ("ct-int4", 64): 1.33,
    ("ct-int4", 128): 1.36,
    ("ct-int4-sym", 32): 1.37,
    ("ct-mxfp4", 32): 1.65,
}
ALWAYS = {("fp8-block", 0), ("ct-int4", 64)}


@pytest.fixture(scope="module")
def source() -> Path:
    from smollm2 import ensure_checkpoint

    return ensure_checkpoint("dense")


@pytest.fixture(scope="module")
def token_ids(source) -> list[int]:
    from vllm.tokenizers import get_tokenizer

    return get_tokenizer(str(source)).encode((ROOT / "tests" / "quantization" / "perplexity.txt").read_text())[:700]


def perplexity(logprobs: list[float]) -> float:
    return math.exp(-sum(logprobs) / len(logprobs))


def theirs(folder: Path, ids: list[int], rounded: bool = False) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name, module in model.named_modules():
        if rounded and isinstance(module, torch.nn.Linear) and "lm_head" not in name:
            module.register_forward_pre_hook(quantised._round_rows)
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return perplexity(logits.gather(1, torch.tensor(ids[1:])[:, None]).flatten().tolist())


def ours(folder: Path, ids: list[int], **kwargs) -> float:
    from vllm import SamplingParams

    llm = quantised.make_llm("", model=str(folder), max_model_len=1024, max_num_batched_tokens=1024, **kwargs)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    llm.shutdown()
    return perplexity([entry[i].logprob for i, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True)])


@pytest.fixture(scope="module")
def float_perplexity(source, token_ids) -> float:
    return theirs(source, token_ids)


CASES = [
    pytest.param(*case, marks=[] if case in ALWAYS else pytest.mark.slow, id=f"{case[0]}-{case[1]}") for case in GROWTH
]


@pytest.mark.parametrize(("format", "group"), CASES)
def test_smollm2(tmp_path, monkeypatch, source, token_ids, float_perplexity, format, group):
    quantised.in_groups_of(monkeypatch, group or 32, (128, 128))
    if format in ("fp8", "int8"):
        got = ours(source, token_ids, quantization=format)
        expected = got
    else:
        quantised.write(source, tmp_path / "quantised", format, twin=tmp_path / "float")
        got = ours(tmp_path / "quantised", token_ids)
        expected = theirs(tmp_path / "float", token_ids, rounded=format == "ct-w8a8")
    print(f"| {format} | {group or ''} | {got:.3f} | {expected:.3f} | {expected / float_perplexity:.4f} |")
    # Where inputs are rounded too, those between two steps go either way.
    assert got == pytest.approx(expected, rel=1e-2 if format == "ct-w8a8" else 1e-3)
    assert got <= GROWTH[format, group] * float_perplexity


# Each kind is decoded in test_gguf.py and multiplied in test_cpu_blocks.py by default; here, the file and a mixed one.
MORE_KINDS = ["Q4_0", "Q8_0", "Q5_K and Q5_1", "Q6_K and Q4_1"]


@pytest.mark.parametrize(
    "kinds",
    ["as it is", "Q4_K and Q5_0", *[pytest.param(kinds, marks=pytest.mark.slow) for kinds in MORE_KINDS]],
)
def test_smollm2_in_gguf(tmp_path, source, token_ids, float_perplexity, kinds):
    """Kinds of 256 columns where these are whole (``down_proj``), the other elsewhere, as released files have them."""
    from smollm2 import gguf_file

    file = gguf_file() if kinds == "as it is" else tmp_path / "m.gguf"
    if kinds != "as it is":
        whole, writer, (wide, *narrow) = read_gguf(gguf_file()), gguf.GGUFWriter(file, "llama"), kinds.split(" and ")
        for key, value in whole.metadata.items():
            if key.startswith("llama."):
                (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
        for tensor in whole.tensors:
            raw = np.fromfile(whole.path, np.uint8, tensor.nbytes, offset=tensor.offset)
            w = gguf.quants.dequantize(raw.reshape(*tensor.shape[:-1], -1) if tensor.kind else raw, tensor.kind)
            kind = "F32" if len(tensor.shape) == 1 else narrow[0] if narrow and tensor.shape[-1] % 256 else wide
            w = w.view(np.float32) if w.dtype == np.uint8 else w
            raw = round_to(kind, w.reshape(tensor.shape))
            writer.add_tensor(tensor.name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    twin = tmp_path / "float"
    twin.mkdir()
    shutil.copy(source / "config.json", twin)
    meant = {tensor.name: tensor.read(torch.float32).clone() for tensor in gguf_tensors(file)}
    save_file(meant, twin / "model.safetensors", {"format": "pt"})
    expected, got, half = theirs(twin, token_ids), ours(file, token_ids), ours(file, token_ids, dtype="bfloat16")
    print(f"{kinds}: {got:.3f}, in bf16 {half:.3f}, dequantised {expected:.3f}, float {float_perplexity:.3f}")
    assert got == pytest.approx(expected, rel=1e-3)
    assert half == pytest.approx(expected, rel=2e-2)
