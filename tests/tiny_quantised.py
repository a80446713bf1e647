# SPDX-License-Identifier: Apache-2.0
"""The small checkpoints quantised, each format packed here by hand from its documented layout, and what transformers
computes with the matrices that they mean: ``"format:model"`` names one."""

from __future__ import annotations

import functools
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny_hybrids as hybrids
import tiny_models as tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

GROUP = 8
BLOCK = (24, 8)
# What no format quantises; releases leave the scalars of linear attention in 16 bits too.
FLOAT = re.compile(
    r"embed_tokens|norm|conv1d|in_proj_[ab]\.|in_proj_ba\.|(^|\.)gate\.weight|shared_expert_gate|lm_head"
)

Written = tuple[dict[str, Tensor], Tensor]
# Of the expert that is packed, whose columns come in an order of their own: 0 for what is no expert's.
_expert = 0


def words(fields: Tensor, bits: int) -> Tensor:
    """[..., n] of unsigned fields -> int32 [..., n * bits / 32], the first field lowest."""
    per = 32 // bits
    fields = torch.nn.functional.pad(fields.long(), (0, -fields.shape[-1] % per)).unflatten(-1, (-1, per))
    packed = sum(fields[..., i] << (bits * i) for i in range(per))
    return torch.where(packed < 2**31, packed, packed - 2**32).int()


def grid(w: Tensor, bits: int, groups: Tensor, symmetric: bool, lowest_zero: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K], zeros [N, G] and scales fp16 [N, G] of w [N, K], column k in group ``groups[k]``."""
    top, count = 2**bits - 1, int(groups.max()) + 1
    zeros, scales, codes = torch.zeros(len(w), count), torch.zeros(len(w), count), torch.zeros_like(w)
    for g in range(count):
        part = w[:, groups == g]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            scales[:, g] = 2 * torch.maximum(high, -low) / top
            zeros[:, g] = 2 ** (bits - 1)
        else:
            scales[:, g] = (high - low) / top
            zeros[:, g] = (-low / scales[:, g]).round().clamp(lowest_zero, top)
        scales[:, g] = scales[:, g].clamp(min=1e-4).half().float()
        codes[:, groups == g] = (part / scales[:, g, None] + zeros[:, g, None]).round().clamp(0, top)
    return codes.long(), zeros.long(), scales.half()


def meant(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    return (codes - zeros[:, groups]).float() * scales.float()[:, groups]


def plain_groups(K: int, size: int) -> Tensor:
    return torch.arange(K) // size


def gptq(w: Tensor, bits: int = 4, v2: bool = False, ordered: bool = False, symmetric: bool = False) -> Written:
    groups = plain_groups(w.shape[1], GROUP)
    if ordered:
        seed = len(groups) + 1000 * _expert
        groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed))]
    codes, zeros, scales = grid(w, bits, groups, symmetric, 0 if v2 else 1)
    tensors = {
        "qweight": words(codes, bits).T.contiguous(),
        "qzeros": words((zeros if v2 else zeros - 1).T, bits),
        "scales": scales.T.contiguous(),
        "g_idx": groups.int(),
    }
    return tensors, meant(codes, zeros, scales, groups)


def awq(w: Tensor) -> Written:
    groups = plain_groups(w.shape[1], GROUP)
    codes, zeros, scales = grid(w, 4, groups, False)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(fields: Tensor) -> Tensor:
        return words(fields.T.unflatten(1, (-1, 8))[..., order].flatten(1), 4)

    tensors = {"qweight": packed(codes), "qzeros": packed(zeros), "scales": scales.T.contiguous()}
    return tensors, meant(codes, zeros, scales, groups)


def packed_integers(w: Tensor, bits: int, symmetric: bool, size: int | None = None, ordered: bool = False) -> Written:
    """compressed-tensors, pack-quantized."""
    groups = plain_groups(w.shape[1], size or GROUP)
    if ordered:
        groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(1 + 1000 * _expert))]
    codes, zeros, scales = grid(w, bits, groups, symmetric)
    tensors = {
        "weight_packed": words(codes, bits),
        "weight_scale": scales.bfloat16(),
        "weight_shape": torch.tensor(w.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
    if ordered:
        tensors["weight_g_idx"] = groups.int()
    return tensors, meant(codes, zeros, scales.bfloat16(), groups)


def int8_rows(w: Tensor) -> Written:
    scales = (w.abs().amax(1, keepdim=True) / 127).clamp(min=1e-4)
    codes = (w / scales).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales


def fp8(w: Tensor, block: tuple[int, int] | None = None, rows: bool = False, name: str = "weight_scale") -> Written:
    N, K = w.shape
    size = block or ((1, K) if rows else (N, K))
    high = [-(-N // size[0]), -(-K // size[1])]
    scales = torch.empty(high)
    codes = torch.empty(N, K, dtype=torch.float8_e4m3fn)
    means = torch.empty(N, K)
    for i in range(high[0]):
        for j in range(high[1]):
            at = slice(i * size[0], (i + 1) * size[0]), slice(j * size[1], (j + 1) * size[1])
            scales[i, j] = (w[at].abs().max() / 448).clamp(min=1e-4)
            codes[at] = (w[at] / scales[i, j]).to(torch.float8_e4m3fn)
            means[at] = codes[at].float() * scales[i, j]
    scales = scales if block or rows else scales.reshape(())
    return {"weight": codes, name: scales}, means


def mxfp4(w: Tensor) -> Written:
    """compressed-tensors, mxfp4-pack-quantized: K a multiple of 32."""
    K = w.shape[1]
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    parts = w.unflatten(1, (K // 32, 32))
    exponent = parts.abs().amax(-1).clamp(min=1e-6).log2().floor() - 2
    scaled = parts / 2 ** exponent[..., None]
    nearest = (scaled.abs()[..., None] - values).abs().argmin(-1)
    means = (values[nearest] * scaled.sign() * 2 ** exponent[..., None]).flatten(1)
    codes = (nearest + 8 * (scaled < 0)).flatten(1)
    packed = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)
    return {"weight_packed": packed, "weight_scale": (exponent + 127).to(torch.uint8)}, means


def _tensors_config(weights: dict[str, Any], format: str, inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
INT4 = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": GROUP}
ROUNDED = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}

# name → (how it packs a matrix, quantization_config)
FORMATS: dict[str, tuple[Callable[[Tensor], Written], dict[str, Any]]] = {
    "fp8-block": (
        lambda w: fp8(w, BLOCK, name="weight_scale_inv"),
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)},
    ),
    "fp8-tensor": (fp8, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "ct-fp8-rows": (
        lambda w: fp8(w, rows=True),
        _tensors_config({"num_bits": 8, "type": "float", "strategy": "channel"}, "float-quantized"),
    ),
    "ct-fp8-block": (
        lambda w: fp8(w, BLOCK),
        _tensors_config(
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": list(BLOCK)}, "float-quantized"
        ),
    ),
    "ct-int4": (lambda w: packed_integers(w, 4, False), _tensors_config(INT4, "pack-quantized")),
    "ct-int4-sym": (
        lambda w: packed_integers(w, 4, True),
        _tensors_config({**INT4, "symmetric": True}, "pack-quantized"),
    ),
    "ct-int8": (lambda w: packed_integers(w, 8, False), _tensors_config({**INT4, "num_bits": 8}, "pack-quantized")),
    "ct-int4-order": (lambda w: packed_integers(w, 4, False, ordered=True), _tensors_config(INT4, "pack-quantized")),
    "ct-w8a8": (
        int8_rows,
        _tensors_config({"num_bits": 8, "type": "int", "strategy": "channel"}, "int-quantized", ROUNDED),
    ),
    "ct-mxfp4": (
        mxfp4,
        _tensors_config(
            {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}, "mxfp4-pack-quantized"
        ),
    ),
    "gptq": (gptq, GPTQ),
    "gptq-8": (lambda w: gptq(w, 8), {**GPTQ, "bits": 8}),
    "gptq-v2": (lambda w: gptq(w, v2=True), {**GPTQ, "checkpoint_format": "gptq_v2"}),
    "gptq-sym": (lambda w: gptq(w, symmetric=True), {**GPTQ, "sym": True}),
    "gptq-order": (lambda w: gptq(w, ordered=True), {**GPTQ, "desc_act": True}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "auto-round": (
        lambda w: gptq(w, symmetric=True),
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": GROUP,
            "sym": True,
            "packing_format": "auto_round:auto_gptq",
        },
    ),
    "auto-round-awq": (
        awq,
        {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "packing_format": "auto_round:auto_awq"},
    ),
}
FORMAT_NAMES = tuple(FORMATS)


def in_groups_of(patch: Any, group: int, block: tuple[int, int]) -> None:
    """Other sizes than ``GROUP`` and ``BLOCK``, as kernels want them; ``patch``: pytest's ``MonkeyPatch``."""
    for _, declared in FORMATS.values():
        for sizes in (declared, *(g["weights"] for g in declared.get("config_groups", {}).values())):
            for key, old, new in (("group_size", GROUP, group), *((k, list(BLOCK), list(block)) for k in _BLOCKS)):
                if sizes.get(key) == old:
                    patch.setitem(sizes, key, new)
    patch.setitem(globals(), "GROUP", group)
    patch.setitem(globals(), "BLOCK", block)


_BLOCKS = ("weight_block_size", "block_structure")

_folders = tempfile.TemporaryDirectory(prefix="vllm-quantised-")


def _source(model: str) -> Path:
    return Path((hybrids if model in hybrids.CHECKPOINTS else tiny).checkpoint(model))


def write(
    source: Path,
    folder: Path,
    format: str,
    float_too: str | None = None,
    shards: int = 1,
    twin: Path | None = None,
) -> None:
    """The checkpoint ``source`` in ``format`` -> ``folder``, stacked experts one by one, as quantised releases are,
    and the float32 one that it means -> ``twin``. ``float_too``: a regular expression of names left as they are."""
    global _expert
    pack, declared = FORMATS[format]
    stored: dict[str, Tensor] = {}
    means: dict[str, Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if FLOAT.search(name) or tensor.dim() < 2 or (float_too and re.search(float_too, name)):
                stored[name] = means[name] = tensor
                continue
            parts = {name.removesuffix(".weight"): tensor}
            stack, _, kind = name.rpartition(".")
            if tensor.dim() == 3:
                both = kind == "gate_up_proj"
                parts = {
                    f"{stack}.{e}.{part}": rows
                    for e, matrix in enumerate(tensor)
                    for part, rows in zip(
                        ("gate_proj", "up_proj") if both else ("down_proj",), matrix.chunk(1 + both), strict=True
                    )
                }
            dequantised = []
            for base, matrix in parts.items():
                _expert = int(found[1]) if (found := re.search(r"experts\.(\d+)\.", base)) else 0
                packed, value = pack(matrix.float())
                stored |= {f"{base}.{leaf}": x.contiguous() for leaf, x in packed.items()}
                dequantised.append(value)
            means[name] = torch.cat(dequantised).view(tensor.shape)
    config = json.loads((source / "config.json").read_text())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": declared}))
    names = list(stored)
    for i in range(shards):
        save_file({name: stored[name] for name in names[i::shards]}, folder / f"model-{i}.safetensors")
    if twin is not None:
        twin.mkdir(parents=True)
        shutil.copy(source / "config.json", twin)
        if (source / "generation_config.json").exists():
            shutil.copy(source / "generation_config.json", twin)
        save_file({n: t.contiguous() for n, t in means.items()}, twin / "model.safetensors", {"format": "pt"})


def as_mxfp4(folder: Path, to: Path) -> None:
    """gpt-oss's experts as its release has them, into ``to``; in ``folder`` they become what these mean."""
    tensors, coded = load_file(folder / "model.safetensors"), {}
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        groups = tensors.pop(name).mT.unflatten(-1, (-1, 32))
        exponents = groups.abs().amax(-1).log2().floor().int() - 2  # 6 is 1.5 times 2 ** 2
        scaled = groups / exponents.exp2()[..., None]
        codes = (scaled.abs()[..., None] - values).abs().argmin(-1)
        means = values[codes] * scaled.sign() * exponents.exp2()[..., None]
        codes = codes.where(scaled >= 0, codes + 8).to(torch.uint8)
        coded[f"{name}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).contiguous()
        coded[f"{name}_scales"] = (exponents + 127).to(torch.uint8).contiguous()
        coded[name] = means.flatten(-2).mT.contiguous()
    floats = {name: coded.pop(name) for name in list(coded) if not name.endswith(("_blocks", "_scales"))}
    save_file(tensors | floats, folder / "model.safetensors", {"format": "pt"})
    save_file(tensors | coded, to / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))


def stored(folder: str | Path) -> list[tuple[str, Tensor]]:
    """The checkpoint's tensors by name."""
    return [pair for file in sorted(Path(folder).glob("*.safetensors")) for pair in load_file(file).items()]


@functools.cache
def folders(name: str) -> tuple[Path, Path]:
    """The quantised folder and its float twin."""
    format, model, *rest = name.split(":")
    folder, twin = (Path(_folders.name) / f"{name}-{kind}" for kind in ("quantised", "float"))
    write(_source(model), folder, format, rest[0] if rest else None, twin=twin)
    return folder, twin


def checkpoint(name: str) -> str:
    return str(folders(name)[0])


@functools.cache
def reference_model(name: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folders(name)[1], dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    if "w8a8" in name:
        for module_name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and "lm_head" not in module_name:
                module.register_forward_pre_hook(_round_rows)
    return model


def _round_rows(module: Any, args: tuple[Tensor]) -> tuple[Tensor]:
    step = args[0].abs().amax(-1, keepdim=True) / 127
    return ((args[0] / step).round() * step,)


@functools.cache
def greedy(name: str, prompt_ids: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """transformers' greedy continuation in fp32 with the dequantised matrices."""
    ids = torch.tensor([prompt_ids])
    with torch.inference_mode():
        out = reference_model(name).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
        )
    return tuple(out[0, len(prompt_ids) :].tolist())


def make_llm(name: str, **kwargs: Any) -> Any:
    from vllm import LLM

    settings: dict[str, Any] = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "num_gpu_blocks_override": 100,
    }
    return LLM(kwargs.pop("model", None) or checkpoint(name), **{**settings, **kwargs})
