# SPDX-License-Identifier: Apache-2.0
"""What the compressed-tensors library packs is read as that library reads it, bit for bit."""

from __future__ import annotations

import sys

import pytest
import torch
from safetensors.torch import save_file

from vllm.model_executor.layers.quantization import resolve_quantization
from vllm.model_executor.model_loader.weight_utils import read_safetensors
from vllm.model_executor.parameter import WeightSpec

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="the library needs Python 3.11")

CASES = {
    "int4-group": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}, (48, 128)),
    "int4-group-asym": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
        (44, 128),
    ),
    "int8-group-asym": (
        "pack-quantized",
        {"num_bits": 8, "strategy": "group", "group_size": 64, "symmetric": False},
        (44, 128),
    ),
    "int4-channel": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}, (40, 52)),
    "int8-channel": ("int-quantized", {"num_bits": 8, "strategy": "channel"}, (40, 52)),
    "fp8-channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, (40, 52)),
    "fp8-tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, (40, 52)),
    "fp8-block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32]},
        (96, 128),
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
        (48, 128),
    ),
}


@pytest.mark.parametrize("case", list(CASES))
def test_what_the_library_packs(tmp_path, case):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    format, weights, shape = CASES[case]
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    N, K = shape
    blocks = {"group": (1, args.group_size), "channel": (1, K), "tensor": (N, K)}
    rows, columns = blocks.get(args.strategy) or args.block_structure
    tiles = w.view(N // rows, rows, K // columns, columns)
    scale, zero = calculate_qparams(tiles.amin((1, 3)), tiles.amax((1, 3)), args)
    scale = scale.reshape(()) if args.strategy == "tensor" else scale
    state = {"weight": w, "weight_scale": scale, "weight_zero_point": zero}
    compressor = BaseCompressor.get_value_from_registry(format)
    packed = compressor.compress(state, scheme)
    meant = compressor.decompress({**packed}, scheme)["weight"]

    save_file({f"x.{name}": t.contiguous() for name, t in packed.items()}, tmp_path / "model.safetensors")
    group = {"targets": ["Linear"], "weights": {"type": "int", **weights}, "input_activations": None}
    declared = {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}
    config = resolve_quantization(None, declared)
    spec = WeightSpec("x.weight", shape, print, quantized=True)
    (matrix,) = config.adapt(read_safetensors([tmp_path / "model.safetensors"]), [spec])
    assert matrix.unreadable is None
    assert torch.equal(matrix.read(torch.float32), meant.float())
