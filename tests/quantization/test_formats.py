# SPDX-License-Identifier: Apache-2.0
"""What each format's tensors mean, bit for bit, against matrices packed by hand, whole and by rows and columns."""

from __future__ import annotations

import pytest
import tiny_quantised as quantised
import torch
from safetensors.torch import save_file

from vllm.kernels.quantized import dequantize
from vllm.model_executor.layers.quantization import resolve_quantization
from vllm.model_executor.model_loader.weight_utils import StoredTensor, read_safetensors
from vllm.model_executor.parameter import WeightSpec

N, K = 48, 64


def weights(rows: int = N, columns: int = K) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns))


def stored(tmp_path, tensors, config, shape=(N, K), **more) -> StoredTensor:
    save_file({f"x.{leaf}": t.contiguous() for leaf, t in tensors.items()}, tmp_path / "model.safetensors")
    specs = [WeightSpec("x.weight", shape, print, quantized=True)]
    resolved = resolve_quantization(None, config)
    assert resolved is not None
    found = resolved.adapt(read_safetensors([tmp_path / "model.safetensors"]), specs)
    (matrix,) = [tensor for tensor in found if tensor.name == "x.weight"]
    return matrix


@pytest.mark.parametrize("format", quantised.FORMAT_NAMES)
@pytest.mark.usefixtures("nan_poison")
def test_every_format_means_what_it_was_packed_from(tmp_path, format):
    pack, config = quantised.FORMATS[format]
    tensors, meant = pack(weights())
    matrix = stored(tmp_path, tensors, config)
    assert matrix.unreadable is None
    assert matrix.shape == (N, K)
    assert torch.equal(matrix.read(torch.float32), meant)
    assert matrix.codes is not None
    indices = torch.tensor([40, 3, 4, 17])
    for rows in (slice(5, 31), slice(8, 8), indices):
        weight = matrix.codes.read(torch.float32, rows)
        assert torch.equal(dequantize(weight), meant[rows])
        assert weight.codes.shape[0] == weight.N == len(meant[rows])
    whole = matrix.codes.read(torch.bfloat16, None)
    assert whole.dtype is torch.bfloat16
    assert (whole.format, whole.group_size) == (matrix.codes.format, matrix.codes.group_size)
    if whole.input_order is None:
        assert not matrix.codes.ordered()
        assert torch.equal(dequantize(whole.columns(slice(32, 64))), meant[:, 32:])
    else:
        assert matrix.codes.ordered()
        with pytest.raises(ValueError, match="act-order"):
            whole.columns(slice(32, 64))


@pytest.mark.parametrize("format", ["fp8-block", "ct-fp8-block", "ct-int4", "ct-int8", "ct-w8a8", "fp8-tensor"])
def test_ragged_shapes(tmp_path, format):
    """Neither rows nor columns are whole blocks, groups or words."""
    pack, config = quantised.FORMATS[format]
    tensors, meant = pack(weights(37, 52))
    matrix = stored(tmp_path, tensors, config, (37, 52))
    assert matrix.unreadable is None
    assert torch.equal(matrix.read(torch.float32), meant)
    assert torch.equal(
        dequantize(matrix.codes.read(torch.float32, slice(11, 30)).columns(slice(48, 52))), meant[11:30, 48:]
    )


@pytest.mark.parametrize("format", ["ct-int4", "gptq", "gptq-8", "awq"])
def test_one_group_for_the_whole_row(tmp_path, format, monkeypatch):
    monkeypatch.setattr(quantised, "GROUP", K)
    pack, config = quantised.FORMATS[format]
    tensors, meant = pack(weights()) if format != "ct-int4" else quantised.packed_integers(weights(), 4, False, K)
    matrix = stored(tmp_path, tensors, {**config, "group_size": -1})
    assert matrix.unreadable is None
    assert torch.equal(matrix.read(torch.float32), meant)


def test_zero_points_of_zero_in_gptqs_first_format(tmp_path):
    """GPTQModel makes them by subtracting over whole words, so one borrows from the next field."""
    tensors, meant = quantised.gptq(weights(), v2=True)
    zeros = tensors["qzeros"].clone()
    zeros[:, 0] = zeros[:, 0] & ~0xFF  # the first two fields
    tensors["qzeros"] = zeros
    meant_v2 = stored(tmp_path, tensors, quantised.FORMATS["gptq-v2"][1]).read(torch.float32)
    assert not torch.equal(meant_v2, meant)
    tensors["qzeros"] = zeros - 0x11111111
    assert torch.equal(stored(tmp_path, tensors, quantised.FORMATS["gptq"][1]).read(torch.float32), meant_v2)


def test_symmetric_zeros_are_not_held(tmp_path):
    """By the config, which all ranks have, and not by what a rank's experts happen to hold."""
    for format in ("gptq-sym", "auto-round", "ct-int4-sym"):
        pack, config = quantised.FORMATS[format]
        assert stored(tmp_path, pack(weights())[0], config).codes.read(torch.float32, None).zeros is None
    tensors, _ = quantised.gptq(weights(), symmetric=True)
    assert stored(tmp_path, tensors, {**quantised.GPTQ, "sym": False}).codes.read(torch.float32, None).zeros is not None
    for format in ("gptq", "awq"):
        pack, config = quantised.FORMATS[format]
        with pytest.raises(ValueError, match=r"x\.weight: the config says sym=true, but \d+ of 384 .*\"sym\": false"):
            stored(tmp_path, pack(weights())[0], {**config, "sym": True}).read(torch.float32)


def test_a_packing_that_the_config_has_wrong_is_read_as_it_is(tmp_path):
    for packed, said in (("awq", "gptq"), ("gptq", "awq"), ("gptq", "auto-round-awq")):
        tensors, meant = quantised.FORMATS[packed][0](weights())
        assert torch.equal(stored(tmp_path, tensors, quantised.FORMATS[said][1]).read(torch.float32), meant)


def test_bits_of_a_matrix_are_its_own(tmp_path):
    """GPTQModel's ``dynamic`` and AutoRound's ``extra_config`` give single layers more bits."""
    tensors, meant = quantised.gptq(weights(), 8)
    assert torch.equal(stored(tmp_path, tensors, quantised.GPTQ).read(torch.float32), meant)
    del tensors["g_idx"]
    assert torch.equal(stored(tmp_path, tensors, quantised.GPTQ).read(torch.float32), meant)


def test_scales_of_blocks_in_other_types(tmp_path):
    tensors, _ = quantised.fp8(weights(), quantised.BLOCK, name="weight_scale_inv")
    config = quantised.FORMATS["fp8-block"][1]
    powers = 2.0 ** torch.randint(-9, 3, tensors["weight_scale_inv"].shape)
    spread = powers.repeat_interleave(24, 0).repeat_interleave(8, 1)
    for dtype in (torch.bfloat16, torch.float8_e8m0fnu):
        matrix = stored(tmp_path, {**tensors, "weight_scale_inv": powers.to(dtype)}, config)
        assert torch.equal(matrix.read(torch.float32), tensors["weight"].float() * spread)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_shapes_of_a_scale_for_the_tensor(tmp_path, shape):
    tensors, meant = quantised.fp8(weights())
    tensors["weight_scale"] = tensors["weight_scale"].reshape(shape)
    tensors["input_scale"] = torch.tensor(0.5)
    assert torch.equal(stored(tmp_path, tensors, quantised.FORMATS["fp8-tensor"][1]).read(torch.float32), meant)


def test_stacks_of_mxfp4_experts(tmp_path):
    """gpt-oss: the rows of gate and up in turns, all experts in one tensor."""
    E, inner, hidden = 3, 16, 64
    gate, up = (weights(E * inner, hidden + 32 * i)[:, :hidden].unflatten(0, (E, inner)) for i in range(2))
    down = weights(E * hidden, 32).unflatten(0, (E, hidden))
    tensors, meant = {}, {}
    for kind, both in (("gate_up_proj", torch.stack((gate, up), 2).flatten(1, 2)), ("down_proj", down)):
        packed, value = quantised.mxfp4(both.flatten(0, 1))
        rows, columns = both.shape[1:]
        tensors[f"{kind}_blocks"] = packed["weight_packed"].view(E, rows, columns // 32, 16)
        tensors[f"{kind}_scales"] = packed["weight_scale"].view(E, rows, columns // 32)
        meant[kind] = value.view(E, rows, columns)
    save_file({f"m.experts.{n}": t for n, t in tensors.items()}, tmp_path / "model.safetensors")
    config = resolve_quantization(None, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    found = {t.name: t for t in config.adapt(read_safetensors([tmp_path / "model.safetensors"]), [])}
    assert len(found) == 3 * E
    for e in range(E):
        for name, rows in (("gate_proj", slice(0, None, 2)), ("up_proj", slice(1, None, 2))):
            one = found[f"m.experts.{e}.{name}.weight"]
            assert one.shape == (inner, hidden)
            assert torch.equal(one.read(torch.float32), meant["gate_up_proj"][e, rows])
            assert torch.equal(
                dequantize(one.codes.read(torch.float32, slice(8, 16))), meant["gate_up_proj"][e, rows][8:]
            )
        assert torch.equal(found[f"m.experts.{e}.down_proj.weight"].read(torch.float32), meant["down_proj"][e])


def test_every_power_of_two_of_mxfp4():
    from vllm.model_executor.layers.quantization.mxfp4 import powers_of_two

    powers = powers_of_two(torch.arange(256).to(torch.uint8)).double()
    assert torch.equal(powers[:255], 2.0 ** (torch.arange(255) - 127).double())
    assert powers[255].isnan()
