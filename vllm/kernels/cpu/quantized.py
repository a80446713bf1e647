# SPDX-License-Identifier: Apache-2.0
"""Products with weights that stay quantised, by the C++ kernels, with the contracts of ``kernels.ops``; what
``kernels.cpu.ops`` says of rows holds.

Where inputs have 16 bits, or the weight rounds them to int8, codes meet inputs rounded to int8 in blocks of 16 to 64
columns (``csrc/quantized.h``); fp8 codes have become int8 themselves then, with a scale for 32 columns, but for weights
that are packed to be exact. All else is decoded in the cache and multiplied in float32.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.kernels.cpu import ops
from vllm.kernels.cpu.ops import _CODE, _at, _threads
from vllm.kernels.quantized import FORMATS, QuantizedWeight

_FORMATS = {format: i for i, format in enumerate(FORMATS)}  # csrc has them in that order
_BLOCKS = {"q4_1": 32, "q5_0": 32, "q5_1": 32, "q4_k": 32, "q5_k": 32, "q6_k": 16}  # columns of one scale
_ACTIVATIONS = {None: 0, "int8": 1, "fp8": 2}
_MOST_COLUMNS = 1 << 15  # whose products of int8 an int32 can surely sum up
_FEWEST_ROWS = 128  # whose largest result is surely large enough for 2 ** -6 of it to cover what rounding moves
_i9, _i11 = (struct.Struct(f"{n}q").pack for n in (9, 11))


@dataclass(frozen=True)
class PanelWeight(QuantizedWeight):
    """``codes`` [(E,) bytes] hold everything; ``record`` is the ``Quantized`` of csrc that describes them."""

    record: bytes = b""

    @functools.cached_property
    def record_address(self) -> int:
        buffer = ctypes.create_string_buffer(self.record)
        object.__setattr__(self, "_buffer", buffer)
        return ctypes.addressof(buffer)


def _round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def pack_quantized_weight(weight: QuantizedWeight, exact: bool = False) -> QuantizedWeight:
    """In panels. As it is where the kernels have no form for it; the plain operators run then."""
    scales, zeros, codes, order, K = weight.scales, weight.zeros, weight.codes, weight.input_order, weight.K
    format, act, fp8_group = weight.format, weight.activations, 0
    group = _round_up(K, 16 if K < 64 else 64) if weight.group_size >= K else weight.group_size
    if weight.kind == "panels" or format not in _FORMATS or group % 16 or weight.dtype not in _CODE:
        return weight
    in_blocks = not FORMATS[format].scaled
    if in_blocks and (act is not None or order is not None):
        return weight
    if zeros is not None and (zeros.int().abs().max() > 127 or format in ("fp8", "mxfp4")):
        return weight
    if scales is not None:
        scales = (scales if scales.dtype in _CODE else scales.float()).contiguous()
    zeros = None if zeros is None else zeros.to(torch.int8).contiguous()
    order = None if order is None else order.contiguous()
    if in_blocks:
        group = FORMATS[format].columns
    block = _BLOCKS.get(format) or next(size for size in (64, 32, 16) if group % size == 0)
    if act == "int8":
        integer, block = format != "fp8", group if group <= _MOST_COLUMNS else block
    else:
        integer = weight.dtype.itemsize == 2 and weight.N >= _FEWEST_ROWS and not (exact and format == "fp8")
    scale_dtype = torch.float16 if scales is None else scales.dtype
    if integer and format == "fp8":
        fp8_group, format, scale_dtype, group, block = group, "int8", torch.bfloat16, 32, 32

    halves = 2 if weight.gated else 1
    matrices = [codes] if codes.dim() == 2 else [part for matrix in codes for part in matrix.chunk(halves)]
    rows = matrices[0].shape[0]
    assert rows * len(matrices) == codes.shape[:-1].numel(), f"{weight.N} rows are no {halves} equal parts"
    assert codes.stride(-1) == 1, f"codes of a row must be contiguous, stride is {codes.stride(-1)}"

    def record(N: int, address: int) -> bytes:
        return _i11(
            _FORMATS[format], _CODE[scale_dtype], zeros is not None, _ACTIVATIONS[act], integer, N, K, group, block,
            0 if order is None else _at(order), address,
        )  # fmt: skip

    kernels = ops._kernels()
    size = kernels.vc_quantized_panel(record(rows, 0)) * -(-rows // kernels.vc_panel_width(None))
    out = ops._arena.take(size * len(matrices), torch.uint8)
    its_scales = None if scales is None else scales.view(len(matrices), rows, -1)
    its_zeros = None if zeros is None else zeros.view(len(matrices), rows, -1)

    def at(tensors: Tensor | None, i: int) -> int:
        return 0 if tensors is None else _at(tensors[i])

    for i, matrix in enumerate(matrices):
        kernels.vc_pack_quantized(
            record(rows, 0)
            + _i9(
                _at(matrix), matrix.stride(0), at(its_scales, i), at(its_zeros, i), _at(out) + i * size, fp8_group,
                _CODE[scale_dtype if scales is None else scales.dtype], FORMATS[format].bytes if in_blocks else 0,
                _threads(),
            )
        )  # fmt: skip
    held = {field.name: getattr(weight, field.name) for field in dataclasses.fields(QuantizedWeight)}
    held |= {"codes": out if codes.dim() == 2 else out.view(weight.E, -1), "scales": None, "zeros": None}
    return PanelWeight(**held | {"input_order": order, "kind": "panels", "record": record(weight.N, _at(out))})


def _panels(weight: QuantizedWeight) -> PanelWeight:
    if not isinstance(weight, PanelWeight):
        raise NotImplementedError(f"the C++ kernels read weights that they packed, not {weight.kind} ones")
    return weight


def quantized_linear(
    x_TK: Tensor, weight: QuantizedWeight, bias_N: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    return ops.run_linear(ops._kernels().vc_quantized_linear, x_TK, weight, _panels(weight).record_address, bias_N, out)


def quantized_embedding(ids_T: Tensor, weight: QuantizedWeight, vocab_range: tuple[int, int] | None = None) -> Tensor:
    record, shared = _panels(weight).record_address, vocab_range is not None
    ids_T, first, rows = ops.ids_and_rows(ids_T, weight, vocab_range)
    out = ids_T.new_empty((ids_T.shape[0], weight.K), dtype=weight.dtype)
    bad = ops._kernels().vc_quantized_embedding(
        _i9(_CODE[weight.dtype], len(ids_T), rows, _at(ids_T), record, _at(out), _threads(), first, shared)
    )
    assert not bad, f"ids from {ids_T.min()} to {ids_T.max()} do not fit {weight.N} rows"
    return out


def quantized_experts(
    x_TD: Tensor,
    w13: QuantizedWeight,
    w2: QuantizedWeight,
    topk_ids_TS: Tensor,
    topk_weights_TS: Tensor,
    out: Tensor | None = None,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    addresses = _panels(w13).record_address, _panels(w2).record_address
    rows = x_TD, topk_ids_TS, topk_weights_TS, out
    return ops.run_experts(ops._kernels().vc_quantized_experts, addresses, w13, w2, *rows, b13, b2, activation)
