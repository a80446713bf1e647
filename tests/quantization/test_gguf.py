# SPDX-License-Identifier: Apache-2.0
"""GGUF files whose matrices stay as they are: decoded as the package gguf does, transformers' tokens, and refusals."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny_gguf
import tiny_models as tiny
import tiny_quantised as quantised
import torch
from gguf_blocks import round_to

from vllm.kernels.quantized import QuantizedWeight, dequantize
from vllm.model_executor.layers.fused_moe import FusedMoE
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader import gguf_loader
from vllm.model_executor.model_loader.gguf_loader import gguf_tensors, read_gguf

KEPT = ("Q4_0", "Q8_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
BITS = {"int4": 4.5, "int8": 8.5, "q4_1": 5, "q5_0": 5.5, "q5_1": 6, "q4_k": 4.625, "q5_k": 5.625, "q6_k": 6.5625}


def one_matrix(path: Path, kind: str, raw: np.ndarray, name: str = "token_embd.weight") -> gguf_loader.StoredTensor:
    """A file of one matrix, its bytes ``raw``, and heads that rows of q belong to."""
    writer = gguf.GGUFWriter(path, "llama")
    for key in ("embedding_length", "feed_forward_length", "block_count", "context_length"):
        writer.add_uint32(f"llama.{key}", 64)
    writer.add_uint32("llama.attention.head_count", 2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    names = {"token_embd.weight", name}
    for tensor in sorted(names):
        writer.add_tensor(tensor, raw, raw_dtype=tiny_gguf.Kind[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(t for t in gguf_tensors(path) if ("embed" in t.name) == (name == "token_embd.weight"))


def random_rows(kind: str, rows: int = 40) -> np.ndarray:
    """Any bits, but finite units."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[tiny_gguf.Kind[kind]]
    raw = np.random.default_rng(0).integers(0, 256, (rows, 3, block_bytes), np.uint8)
    for at in {"Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}.get(kind, (0, 2)):
        raw[..., at + 1] &= 0xBF  # the exponent's first bit
    return raw.reshape(rows, -1)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), (other + 0.0).view(torch.int32))


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.0.attn_q.weight"])
@pytest.mark.parametrize("kind", KEPT)
def test_decoded_bit_for_bit_as_gguf_does(tmp_path, kind, name, monkeypatch):
    """Any bits; all rows, a slice, some of them, none; rows of q with their heads' halves put side by side again."""
    monkeypatch.setattr(gguf_loader, "_CHUNK_ELEMENTS", 7 * 96)
    raw = random_rows(kind)
    tensor = one_matrix(tmp_path / "m.gguf", kind, raw, name)
    right = torch.from_numpy(gguf.quants.dequantize(raw, tiny_gguf.Kind[kind]).copy()) + 0.0  # no -0
    if "attn_q" in name:
        right = right.view(2, 10, 2, -1).transpose(1, 2).reshape(40, -1)
    for rows in (None, slice(0, 40), slice(13, 29), slice(40, 40), torch.tensor([39, 2, 2])):
        weight = tensor.codes.read(torch.float32, rows)
        want = right if rows is None else right[rows]
        assert tuple(want.shape) == (weight.N, weight.K)
        assert same_bits(dequantize(weight) + 0.0, want), rows
        file_bytes = want.numel() // gguf.GGML_QUANT_SIZES[tiny_gguf.Kind[kind]][0]
        file_bytes *= gguf.GGML_QUANT_SIZES[tiny_gguf.Kind[kind]][1]
        held = weight.codes.nbytes + (0 if weight.scales is None else weight.scales.nbytes)
        assert held == file_bytes


CASES = [
    *(f"{kinds}:llama" for kinds in ("q4_0", "q4_1", "q4_k_m", "q5_k_m")),
    "q8_0:mixtral",
    "q4_k_m:mixtral",
    "q5_k_m:qwen3moe",
]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("nan_poison")
def test_tokens(name, log):
    llm = quantised.make_llm("", model=tiny_gguf.checkpoint(name), max_model_len=256)
    prompts = [tiny.prompt(n, seed=3) for n in (5, 24, 1)]
    got = tiny.tokens(tiny.generate(llm, prompts, 12))
    assert got == [tiny_gguf.greedy(name, prompt, 12) for prompt in prompts]
    model = llm.llm_engine.worker.get_model()
    layers = [m for m in model.modules() if isinstance(m, LinearBase | FusedMoE)]
    assert all(m.is_quantized or "gate.weight" in m.shards[0].name for m in layers)
    assert model.model.embed_tokens.is_quantized
    assert model.lm_head.is_quantized or "llama" in name
    held = [w for m in layers for w in weights_of(m)]
    for weight in [*held, model.model.embed_tokens.packed]:
        padded = -(-weight.N // 32) * 32 if weight.codes.dim() == 1 else weight.E * weight.N
        assert weight.codes.nbytes <= BITS[weight.format] / 8 * padded * weight.K
    kinds = {k for k in tiny_gguf.KINDS[name.split(":")[0]].values() if k}
    (line,) = re.findall(r"GGUF matrices kept as they are: (.*); dequantised to float32: none", log.text)
    assert {part.split()[1] for part in line.split(", ")} == kinds
    llm.shutdown()


def weights_of(module: LinearBase | FusedMoE) -> list[QuantizedWeight]:
    held = [module.w13, module.w2] if isinstance(module, FusedMoE) else [module.packed]
    if isinstance(module, LinearBase) and module.products is not None:
        held = [packed for _, packed in module.products]
    return [weight for weight in held if isinstance(weight, QuantizedWeight)]


@pytest.mark.usefixtures("nan_poison")
def test_what_cannot_stay_is_dequantised_and_said(log):
    """Kinds that no operator reads, and experts of two kinds."""
    llm = quantised.make_llm("", model=tiny_gguf.checkpoint("odd:mixtral"), max_model_len=256)
    prompt = tiny.prompt(9, seed=4)
    assert tiny.tokens(tiny.generate(llm, [prompt], 10)) == [tiny_gguf.greedy("odd:mixtral", prompt, 10)]
    layer = llm.llm_engine.worker.get_model().model.layers[0]
    moe = next(m for m in layer.modules() if isinstance(m, FusedMoE))
    assert not moe.is_quantized
    assert [isinstance(packed, QuantizedWeight) for _, packed in layer.self_attn.qkv_proj.products] == [False, True]
    assert (
        "kept as they are: 6 Q4_K; dequantised to float32: 16 Q4_K beside other experts, 8 Q5_K beside other "
        "experts, 2 TQ1_0" in log.text
    )
    llm.shutdown()


@pytest.mark.parametrize("kind", KEPT)
def test_a_scale_that_is_none_is_refused(tmp_path, kind):
    block, block_bytes = gguf.GGML_QUANT_SIZES[tiny_gguf.Kind[kind]]
    for at in {"Q6_K": (208,), "Q4_1": (0, 2), "Q5_K": (0, 2)}.get(kind, (0,)):
        for bits in (0x7C00, 0xFE01):  # infinity, NaN
            raw = round_to(kind, np.ones((3, 2 * block), np.float32))
            raw[1, block_bytes + at : block_bytes + at + 2] = [bits % 256, bits // 256]
            tensor = one_matrix(tmp_path / "m.gguf", kind, raw)
            message = r"m\.gguf: token_embd\.weight: 1 of \d+ scales are NaN or infinite; .*fetch it again"
            with pytest.raises(ValueError, match=message):
                tensor.codes.read(torch.float32, None)
            tensor.codes.read(torch.float32, slice(2, 3))


def test_types_that_do_not_exist_and_cut_blocks_name_their_tensor(tmp_path):
    path = tmp_path / "m.gguf"
    one_matrix(path, "Q4_K", random_rows("Q4_K"))
    whole = path.read_bytes()
    at = whole.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 2 * 8
    path.write_bytes(whole[:at] + (250).to_bytes(4, "little") + whole[at + 4 :])
    with pytest.raises(ValueError, match=r"token_embd\.weight is of type 250, unknown to the installed gguf: pip"):
        read_gguf(path)
    path.write_bytes(whole[: -max(gguf.GGML_QUANT_SIZES[tiny_gguf.Kind.Q4_K])])
    with pytest.raises(ValueError, match=r"token_embd\.weight ends at byte \d+, the file at \d+.*fetch it again"):
        read_gguf(path)
    path.write_bytes(whole[: at - 16] + (100).to_bytes(8, "little") + whole[at - 8 :])
    with pytest.raises(ValueError, match=r"token_embd\.weight of shape \(40, 100\) in Q4_K blocks of 256"):
        read_gguf(path)
