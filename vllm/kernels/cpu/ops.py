# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: PT018
"""The C++ kernels of ``csrc`` behind the operators' signatures; contracts and letters are those of ``kernels.ops``.

All take float32, bfloat16 or float16 and sum in float32. A row's result depends neither on the other rows of the batch,
nor on its place, nor on the number of threads: bitwise (other implementations promise this within rounding only).
Shapes that contradict each other are an ``AssertionError`` with both numbers.

``VLLM_CPU_AMX=0`` keeps bfloat16 off the processor's matrix unit, which is used where it is there and passes its test;
``VLLM_CPU_BF16_PAIRS=0`` keeps it off AVX512_BF16's products of pairs. Ranks on unlike processors want both.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import Any

import torch
from torch import Tensor

from vllm.compilation import recording
from vllm.kernels.cpu import build
from vllm.kernels.memory import huge_page_empty
from vllm.kernels.quantized import QuantizedWeight
from vllm.kernels.weights import PackedExperts, PackedWeight
from vllm.logger import init_logger

logger = init_logger(__name__)

FP8 = torch.float8_e4m3fn
_threads = torch.get_num_threads


class _DtypeCodes(dict[torch.dtype, int]):
    def __missing__(self, dtype: torch.dtype) -> int:
        raise ValueError(f"the CPU kernels know {[str(d) for d in self]}, not {dtype}; cast the tensors first")


_CODE = _DtypeCodes({torch.float32: 0, torch.bfloat16: 1, torch.float16: 2})


def _at(tensor: Tensor) -> int:
    """A tensor's address for a kernel; ``ValueError`` for one that the kernels cannot read."""
    if not tensor.is_cpu:
        raise ValueError(
            f"the CPU kernels were given a tensor {tuple(tensor.shape)} on {tensor.device}: move it to the CPU, or use "
            "the operators of its own device (VLLM_KERNELS, VLLM_ATTENTION_BACKEND)"
        )
    if recording.active is not None:
        recording.active.keep(tensor)
    return tensor.data_ptr()


# A kernel takes one packed record of 8-byte fields, as its ``...Args`` in csrc has them: converting a dozen arguments
# one by one would cost ctypes more than most calls compute.
_i5, _i7, _i8, _i10, _i12, _i16, _i19 = (struct.Struct(f"{n}q").pack for n in (5, 7, 8, 10, 12, 16, 19))
_i15_f, _i24_ff, _i32_fff = (struct.Struct(layout).pack for layout in ("15qd", "24qdd", "32qddd"))
_FUNCTIONS = (
    "vc_panel_width",
    "vc_matrix_unit",
    "vc_pack",
    "vc_linear",
    "vc_embedding",
    "vc_rms_norm",
    "vc_silu_and_mul",
    "vc_gelu_tanh_and_mul",
    "vc_sigmoid_gate",
    "vc_rotary",
    "vc_reshape_and_cache",
    "vc_zero_padding_rows",
    "vc_paged_attention",
    "vc_route",
    "vc_row_max",
    "vc_fused_experts",
    "vc_quantized_panel",
    "vc_pack_quantized",
    "vc_quantized_linear",
    "vc_quantized_embedding",
    "vc_quantized_experts",
    "vc_gated_delta_net",
    "vc_run",
    "vc_step_inputs",
)
# A step may be made of these; the others are for weights that are loaded, and around steps.
_OUTSIDE_STEPS = ("vc_panel_width", "vc_matrix_unit", "vc_run", "vc_step_inputs")
_OF_A_STEP = tuple(name for name in _FUNCTIONS if name not in _OUTSIDE_STEPS)


def _kernels() -> Any:
    """The loaded library, or None where it cannot be built or is switched off; while a step is recorded, what stands
    in its place."""
    library = _library()
    return library if recording.active is None else recording.active.in_place_of(library, _OF_A_STEP)


@functools.cache
def _library() -> Any:
    library = build.load()
    if library is not None:
        for name in _FUNCTIONS:
            function = getattr(library, name)
            function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int64
        if library.vc_matrix_unit(None) == 2:
            logger.warning("the processor's matrix unit failed its test, the vector kernels run bfloat16 instead")
    return library


def kernels_available() -> bool:
    """Whether the C++ kernels run in this process (builds them on the first call)."""
    return _library() is not None


# ---------------------------------------------------------------------------------------------------------------------
# Linear layers


class _Arena:
    """Hands out parts of large chunks on huge pages: reading weights is what a decode step waits for, and with small
    pages a good part of that is looking up addresses."""

    CHUNK = 32 << 20

    def __init__(self) -> None:
        self.rest = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, size: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of ``size`` elements, contents undefined."""
        wanted = -(-size * dtype.itemsize // 64) * 64
        if wanted > self.rest.numel():
            chunk = huge_page_empty(max(wanted, self.CHUNK), torch.uint8)
            if wanted >= self.CHUNK:
                return chunk.view(dtype)[:size]
            self.rest = chunk
        part, self.rest = self.rest[:wanted], self.rest[wanted:]
        return part.view(dtype)[:size]


_arena = _Arena()


def _packed_size(N: int, K: int, dtype: torch.dtype) -> int:
    width = _kernels().vc_panel_width(None)
    return -(-N // width) * width * (-(-K // 32) * 32 if dtype is torch.bfloat16 else K)


def _pack_into(weight_NK: Tensor, out: Tensor) -> None:
    N, K = weight_NK.shape
    assert weight_NK.stride(1) == 1 or K == 1, f"weight rows must be contiguous, stride is {weight_NK.stride(1)}"
    _kernels().vc_pack(_i7(_CODE[weight_NK.dtype], N, K, _at(weight_NK), weight_NK.stride(0), _at(out), _threads()))


def pack_linear_weight(weight_NK: Tensor, into: PackedWeight | None = None) -> PackedWeight:
    N, K = weight_NK.shape
    dtype = weight_NK.dtype
    if into is not None:
        assert (into.N, into.K, into.dtype) == (N, K, dtype), f"{into.N, into.K, into.dtype} is not {N, K, dtype}"
        _pack_into(weight_NK, into.data)
        return into
    _CODE[dtype]
    data = _arena.take(_packed_size(N, K, dtype), dtype)
    _pack_into(weight_NK, data)
    return PackedWeight(N, K, dtype, data, "panels")


def unpack_linear_weight(packed: PackedWeight) -> Tensor:
    # Packing only moves elements, the same way in each panel: where it puts the row and column numbers tells how.
    N, K, dtype = packed.N, packed.K, packed.dtype
    bits, mask = (torch.int32, -1) if dtype.itemsize == 4 else (torch.int16, 0xFFFF)
    assert K < 2**16, f"{K} columns cannot be numbered in 16 bits"
    width = _kernels().vc_panel_width(None)
    places = []
    for numbers in (torch.arange(width)[:, None], torch.arange(1, K + 1)[None]):
        panel = torch.zeros(_packed_size(width, K, dtype), dtype=dtype)
        _pack_into(numbers.expand(width, K).to(bits).contiguous().view(dtype), panel)
        places.append(panel.view(bits).long() & mask)
    row_of, column_of = places
    used = column_of.nonzero()[:, 0]
    place = torch.empty(width, K, dtype=torch.int64)
    place[row_of[used], column_of[used] - 1] = used
    return packed.data.view(-1, len(row_of))[:, place.flatten()].view(-1, K)[:N].contiguous()


def _panels(packed: PackedWeight | PackedExperts) -> None:
    if packed.kind != "panels":
        raise NotImplementedError(f"the C++ kernels read weights that they packed, not {packed.kind} ones")


def linear(x_TK: Tensor, packed: PackedWeight, bias_N: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    _panels(packed)
    return run_linear(_kernels().vc_linear, x_TK, packed, packed.address, bias_N, out)


def run_linear(
    kernel: Any,
    x_TK: Tensor,
    packed: PackedWeight | QuantizedWeight,
    address: int,
    bias_N: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    T, K = x_TK.shape
    x0, x1 = x_TK.stride()
    N, dtype = packed.N, packed.dtype
    assert K == packed.K and x_TK.dtype is dtype, f"input is {K} x {x_TK.dtype}, weight is {packed.K} x {dtype}"
    assert x1 == 1 or K == 1, f"input rows must be contiguous, stride is {x1}"
    code = _CODE[dtype]
    if out is None:
        out = x_TK.new_empty(T, N)
        out_code, out0 = code, N
    else:
        out_code, (out0, out1) = _CODE[out.dtype], out.stride()
        assert out.shape == (T, N) and (out1 == 1 or N == 1), f"out is {out.shape} {out.stride()}, needed {(T, N)}"
        assert out_code in (code, 0), f"out is {out.dtype}, needed {dtype} or float32"
    bias = 0
    if bias_N is not None:
        assert bias_N.shape == (N,) and bias_N.dtype is dtype and bias_N.is_contiguous(), (
            f"bias is {bias_N.shape} {bias_N.dtype}, needed {(N,)} {dtype}"
        )
        bias = _at(bias_N)
    if T:
        kernel(_i12(code, out_code, T, N, K, _at(x_TK), x0, address, bias, _at(out), out0, _threads()))
    return out


def embedding(ids_T: Tensor, packed: PackedWeight, vocab_range: tuple[int, int] | None = None) -> Tensor:
    _panels(packed)
    ids_T, first, rows = ids_and_rows(ids_T, packed, vocab_range)
    T = ids_T.shape[0]
    out = ids_T.new_empty((T, packed.K), dtype=packed.dtype)
    code, shared = _CODE[packed.dtype], vocab_range is not None
    bad = _kernels().vc_embedding(
        _i10(code, T, rows, packed.K, _at(ids_T), packed.address, _at(out), _threads(), first, shared)
    )
    assert not bad, f"ids from {ids_T.min()} to {ids_T.max()} do not fit {packed.N} rows"
    return out


def ids_and_rows(
    ids_T: Tensor, packed: PackedWeight | QuantizedWeight, vocab_range: tuple[int, int] | None
) -> tuple[Tensor, int, int]:
    """Contiguous ids, the id of the weight's first row, and how many rows have an id."""
    assert ids_T.dtype is torch.int64 and ids_T.dim() == 1, f"ids are {ids_T.shape} {ids_T.dtype}, needed int64 [T]"
    first, last = (0, packed.N) if vocab_range is None else vocab_range
    assert last - first <= packed.N, f"ids from {first} to {last - 1} do not fit {packed.N} rows"
    return ids_T.contiguous(), first, last - first


# ---------------------------------------------------------------------------------------------------------------------
# Row-wise operations


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    kernels = _kernels()
    shape, dtype, weight_dtype = x.shape, x.dtype, weight_D.dtype
    D = shape[-1]
    if out is None:
        out = x.new_empty(shape)
    assert out.shape == shape and out.dtype is dtype, f"out is {out.shape} {out.dtype}, x {shape} {dtype}"
    assert weight_D.shape == (D,) and (weight_dtype is dtype or weight_dtype is torch.float32), (
        f"weight is {weight_D.shape} {weight_dtype}, x {shape} {dtype}"
    )
    if len(shape) == 2:
        n0, n1, (x0, x2), (o0, o2), x1, o1 = shape[0], 1, x.stride(), out.stride(), 0, 0
    else:
        assert len(shape) == 3, f"x has {len(shape)} dimensions, needed 2 or 3"
        n0, n1, (x0, x1, x2), (o0, o1, o2) = shape[0], shape[1], x.stride(), out.stride()
    assert (x2 == o2 == 1) or D == 1, f"last strides are {x2}, {o2}, needed 1"
    kernels.vc_rms_norm(
        _i15_f(
            _CODE[dtype], _CODE[weight_dtype], n0, n1, D, _at(x), x0, x1, 0, 0, _at(weight_D),
            _at(out), o0, o1, _threads(), eps,
        )
    )  # fmt: skip
    return out


def fused_add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    kernels = _kernels()
    shape, dtype, weight_dtype = x_TD.shape, x_TD.dtype, weight_D.dtype
    T, D = shape
    if out is None:
        out = x_TD.new_empty(T, D)
    assert residual_TD.shape == out.shape == shape and residual_TD.dtype is out.dtype is dtype, (
        f"residual is {residual_TD.shape} {residual_TD.dtype}, out {out.shape} {out.dtype}, x {shape} {dtype}"
    )
    assert weight_D.shape == (D,) and (weight_dtype is dtype or weight_dtype is torch.float32), (
        f"weight is {weight_D.shape} {weight_dtype}, x {shape} {dtype}"
    )
    (x0, x1), (r0, r1), (o0, o1) = x_TD.stride(), residual_TD.stride(), out.stride()
    assert (x1 == r1 == o1 == 1) or D == 1, f"last strides are {x1}, {r1}, {o1}, needed 1"
    kernels.vc_rms_norm(
        _i15_f(
            _CODE[dtype], _CODE[weight_dtype], T, 1, D, _at(x_TD), x0, 0, _at(residual_TD), r0,
            _at(weight_D), _at(out), o0, 0, _threads(), eps,
        )
    )  # fmt: skip
    return out, residual_TD


def silu_and_mul(x: Tensor, out: Tensor | None = None) -> Tensor:
    return _gated(_kernels().vc_silu_and_mul, x, out)


def gelu_tanh_and_mul(x: Tensor, out: Tensor | None = None) -> Tensor:
    return _gated(_kernels().vc_gelu_tanh_and_mul, x, out)


def _gated(kernel: Any, x: Tensor, out: Tensor | None) -> Tensor:
    T, width = x.shape
    D, dtype, (x0, x1) = width // 2, x.dtype, x.stride()
    assert width == 2 * D and x1 == 1, f"x is {x.shape} {x.stride()}, needed {(T, 2 * D)}, rows contiguous"
    if out is None:
        out = x.new_empty(T, D)
    o0, o1 = out.stride()
    assert out.shape == (T, D) and out.dtype is dtype and (o1 == 1 or D == 1), (
        f"out is {out.shape} {out.dtype}, needed {(T, D)} {dtype}"
    )
    kernel(_i8(_CODE[dtype], T, D, _at(x), x0, _at(out), o0, _threads()))
    return out


def sigmoid_gate(x: Tensor, gate: Tensor) -> None:
    shape, dtype = x.shape, x.dtype
    if len(shape) == 2:
        x, gate = x[:, None], gate[:, None]
    T, H, D = x.shape
    (x0, x1, x2), (g0, g1, g2) = x.stride(), gate.stride()
    assert gate.shape in ((T, H, D), (T, H, 1)) and gate.dtype is dtype, (
        f"the gate is {gate.shape} {gate.dtype}, x {shape} {dtype}"
    )
    one = gate.shape[2] == 1
    assert (x2 == 1 or D == 1) and (g2 == 1 or one), f"last strides are {x2}, {g2}, needed 1"
    _kernels().vc_sigmoid_gate(_i12(_CODE[dtype], T, H, D, _at(x), x0, x1, _at(gate), g0, g1, one, _threads()))


def zero_padding_rows(x: Tensor, slot_mapping_T: Tensor) -> None:
    T, row = x.shape[0], x[0] if len(x) else x
    assert row.is_contiguous(), f"rows have strides {x.stride()}, needed contiguous ones"
    _kernels().vc_zero_padding_rows(_i5(T, row.nbytes, _at(x), x.stride(0) * x.itemsize, _slots(slot_mapping_T, T)))


def _slots(slot_mapping_T: Tensor, T: int) -> int:
    assert slot_mapping_T.shape == (T,) and slot_mapping_T.dtype is torch.int64 and slot_mapping_T.is_contiguous(), (
        f"slots are {slot_mapping_T.shape} {slot_mapping_T.dtype}, needed int64 {(T,)}"
    )
    return _at(slot_mapping_T)


def row_max(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    (R, V), (l0, l1) = logits_RV.shape, logits_RV.stride()
    assert l1 == 1 or V == 1, f"last stride of the logits is {l1}, needed 1"
    values = logits_RV.new_empty(R, dtype=torch.float32)
    ids = logits_RV.new_empty(R, dtype=torch.int64)
    _kernels().vc_row_max(_i8(_CODE[logits_RV.dtype], R, V, _at(logits_RV), l0, _at(values), _at(ids), _threads()))
    return values, ids


# ---------------------------------------------------------------------------------------------------------------------
# Attention


def rotary_embedding(
    positions_T: Tensor, q_THD: Tensor, k_TJD: Tensor, cos_sin_cache: Tensor, interleaved: bool = False
) -> None:
    kernels = _kernels()
    T, H, D = q_THD.shape
    _, J, _ = k_shape = k_TJD.shape
    P, rot_dim = cos_sin_cache.shape
    dtype, (q0, q1, q2), (k0, k1, k2) = q_THD.dtype, q_THD.stride(), k_TJD.stride()
    assert k_shape == (T, J, D) and k_TJD.dtype is dtype, f"q is {q_THD.shape} {dtype}, k is {k_shape} {k_TJD.dtype}"
    assert positions_T.shape == (T,) and positions_T.dtype is torch.int64 and positions_T.is_contiguous(), (
        f"positions are {positions_T.shape} {positions_T.dtype}, needed int64 {(T,)}"
    )
    assert rot_dim <= D and rot_dim % 2 == 0, f"rot_dim is {rot_dim}, head size {D}"
    assert cos_sin_cache.dtype is torch.float32 and cos_sin_cache.is_contiguous(), (
        f"cos_sin_cache is {cos_sin_cache.dtype}, needed contiguous float32"
    )
    assert q2 == k2 == 1, f"last strides are {q2}, {k2}, needed 1"
    bad = kernels.vc_rotary(
        _i16(
            _CODE[dtype], T, H, J, rot_dim, P, _at(positions_T), _at(q_THD), q0, q1, _at(k_TJD), k0,
            k1, _at(cos_sin_cache), _threads(), interleaved,
        )
    )  # fmt: skip
    assert not bad, f"positions from {positions_T.min()} to {positions_T.max()} do not fit a cache of {P}"


def _cache(cache: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, int, int]:
    """The strides of a block, of a head and of a slot of a cache that fits, of ``dtype`` or FP8."""
    dtype = FP8 if cache.dtype is FP8 else dtype
    assert cache.shape == shape and cache.dtype is dtype, (
        f"a cache is {cache.shape} {cache.dtype}, needed {shape} {dtype}"
    )
    c0, c1, c2, c3 = cache.stride()
    assert c3 == 1, f"cache strides are {cache.stride()}, the last must be 1"
    return c0, c1, c2


def reshape_and_cache(
    k_TJD: Tensor,
    v_TJD: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor | None,
    slot_mapping_T: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    kernels = _kernels()
    T, J, D = shape = k_TJD.shape
    dtype, n, c = k_TJD.dtype, k_TJD.dtype.itemsize, key_cache.dtype.itemsize
    blocks, _, block_size, _ = key_cache.shape
    k0, k1, k2 = k_TJD.stride()
    kc0, kc1, kc2 = _cache(key_cache, (blocks, J, block_size, D), dtype)
    v = values = v0 = v1 = vc0 = vc1 = vc2 = 0
    if v_TJD is not None:
        assert value_cache is not None, f"v is {v_TJD.shape}, and there is no cache for it"
        assert v_TJD.shape == shape and v_TJD.dtype is dtype, f"k is {shape} {dtype}, v is {v_TJD.shape} {v_TJD.dtype}"
        v0, v1, v2 = v_TJD.stride()
        assert v2 == 1, f"last stride of v is {v2}, needed 1"
        vc0, vc1, vc2 = _cache(value_cache, (blocks, J, block_size, D), dtype)
        assert value_cache.dtype is key_cache.dtype, f"caches are {key_cache.dtype} and {value_cache.dtype}"
        v, values = _at(v_TJD), _at(value_cache)
    assert k2 == 1, f"last stride of k is {k2}, needed 1"
    bad = kernels.vc_reshape_and_cache(
        _i24_ff(
            T, J, D, D * n, _CODE[dtype], key_cache.dtype is FP8, blocks, block_size, _at(k_TJD), k0 * n, k1 * n, v,
            v0 * n, v1 * n, _at(key_cache), kc0 * c, kc1 * c, kc2 * c, values, vc0 * c, vc1 * c, vc2 * c,
            _slots(slot_mapping_T, T), _threads(), k_scale, v_scale,
        )
    )  # fmt: skip
    assert not bad, (
        f"slots from {slot_mapping_T.min()} to {slot_mapping_T.max()} do not fit {blocks} blocks of {block_size}"
    )


def paged_attention(
    q_THD: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    out_THD: Tensor,
    sliding_window: int = 0,
    num_reqs: int | None = None,
    sinks: Tensor | None = None,
    soft_cap: float = 0.0,
    query_start_loc_cpu: Tensor | None = None,
    seq_lens_cpu: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    kernels = _kernels()
    R = query_start_loc.shape[0] - 1 if num_reqs is None else num_reqs
    T, H, D = shape = q_THD.shape
    (blocks, J, block_size, _), DV, dtype = key_cache.shape, value_cache.shape[3], q_THD.dtype
    table_rows, table_blocks = block_table.shape
    assert H % J == 0, f"{H} query heads are no multiple of {J} key-value heads"
    assert out_THD.shape == (T, H, DV) and out_THD.dtype is dtype, (
        f"out is {out_THD.shape} {out_THD.dtype}, q {shape} {dtype}, values {value_cache.shape}"
    )
    kc0, kc1, kc2 = _cache(key_cache, (blocks, J, block_size, D), dtype)
    vc0, vc1, vc2 = _cache(value_cache, (blocks, J, block_size, DV), dtype)
    assert value_cache.dtype is key_cache.dtype, f"caches are {key_cache.dtype} and {value_cache.dtype}"
    (q0, q1, q2), (o0, o1, o2) = q_THD.stride(), out_THD.stride()
    assert q2 == o2 == 1, f"last strides are {q2}, {o2}, needed 1"
    assert block_table.dtype is query_start_loc.dtype is seq_lens.dtype is torch.int32, (
        f"tables are {block_table.dtype}, {query_start_loc.dtype}, {seq_lens.dtype}, needed int32"
    )
    (table0, table1), (start0,), (lens0,) = block_table.stride(), query_start_loc.stride(), seq_lens.stride()
    assert table1 == start0 == lens0 == 1 or table_blocks == 1, f"strides are {table1}, {start0}, {lens0}, needed 1"
    assert table_rows >= R and query_start_loc.shape[0] > R and seq_lens.shape[0] >= R, (
        f"{R} requests, tables for {table_rows}, {query_start_loc.shape[0] - 1}, {seq_lens.shape[0]}"
    )
    of_sinks = 0
    if sinks is not None:
        sinks = sinks.float().contiguous()
        assert sinks.shape == (H,), f"sinks are {sinks.shape}, needed {(H,)}"
        of_sinks = _at(sinks)
    bad = kernels.vc_paged_attention(
        _i32_fff(
            _CODE[dtype], _at(q_THD), q0, q1, _at(key_cache), kc0, kc1, kc2, _at(value_cache), vc0, vc1, vc2,
            _at(block_table), table0, _at(query_start_loc), _at(seq_lens), R, T, H, J, D, DV, blocks, block_size,
            table_blocks, sliding_window, _at(out_THD), o0, o1, of_sinks, _threads(),
            key_cache.dtype is FP8, scale * k_scale, soft_cap, v_scale,
        )
    )  # fmt: skip
    assert not bad, (
        f"{T} rows, {blocks} blocks of {block_size}, table of {block_table.shape[1]} do not fit query_start_loc "
        f"{query_start_loc[: R + 1].tolist()}, seq_lens {seq_lens[:R].tolist()}, block_table {block_table[:R].tolist()}"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Experts


def empty_experts(E: int, N: int, K: int, dtype: torch.dtype, gated: bool = False) -> PackedExperts:
    _CODE[dtype]
    parts = 2 if gated else 1
    assert N % parts == 0, f"a gated weight has an even number of rows, not {N}"
    size = _packed_size(N // parts, K, dtype)
    return PackedExperts(E, N, K, dtype, _arena.take(E * parts * size, dtype).view(E, parts, size), "panels", gated)


def pack_expert_weights(weight_ENK: Tensor, gated: bool = False) -> PackedExperts:
    E, N, K = weight_ENK.shape
    packed = empty_experts(E, N, K, weight_ENK.dtype, gated)
    for expert, weight in enumerate(weight_ENK):
        for part, half in enumerate(weight.chunk(2 if gated else 1)):
            repack_expert_weight(packed, expert, half, part)
    return packed


def repack_expert_weight(packed: PackedExperts, expert: int, weight_NK: Tensor, part: int = 0) -> None:
    place = (packed.N // (2 if packed.gated else 1), packed.K)
    assert weight_NK.shape == place and weight_NK.dtype is packed.dtype, (
        f"the weight is {tuple(weight_NK.shape)} {weight_NK.dtype}, its place {place} {packed.dtype}"
    )
    _pack_into(weight_NK, packed.data[expert, part])


def _bias(bias: Tensor | None, shape: tuple[int, int]) -> int:
    if bias is None:
        return 0
    assert bias.shape == shape and bias.dtype is torch.float32 and bias.is_contiguous(), (
        f"bias is {tuple(bias.shape)} {bias.dtype}, needed contiguous float32 {shape}"
    )
    return _at(bias)


def fused_experts(
    x_TD: Tensor,
    w13: PackedExperts,
    w2: PackedExperts,
    topk_ids_TS: Tensor,
    topk_weights_TS: Tensor,
    out: Tensor | None = None,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    _panels(w13)
    addresses = _at(w13.data), _at(w2.data)
    rows = x_TD, topk_ids_TS, topk_weights_TS, out
    return run_experts(_kernels().vc_fused_experts, addresses, w13, w2, *rows, b13, b2, activation)


def run_experts(
    kernel: Any,
    addresses: tuple[int, int],
    w13: PackedExperts | QuantizedWeight,
    w2: PackedExperts | QuantizedWeight,
    x_TD: Tensor,
    topk_ids_TS: Tensor,
    topk_weights_TS: Tensor,
    out: Tensor | None,
    b13: Tensor | None,
    b2: Tensor | None,
    activation: str,
) -> Tensor:
    T, D = x_TD.shape
    E, I = w13.E, w2.K
    dtype = x_TD.dtype
    assert w13.gated and not w2.gated and w2.kind == w13.kind, f"w13 gated {w13.gated}, w2 gated {w2.gated}"
    assert (w13.N, w13.K, w2.E, w2.N) == (2 * I, D, E, D) and dtype is w13.dtype is w2.dtype, (
        f"x {x_TD.shape} {dtype}, w13 {(w13.E, w13.N, w13.K)} {w13.dtype}, w2 {(w2.E, w2.N, w2.K)} {w2.dtype}"
    )
    S = topk_ids_TS.shape[1]
    assert topk_ids_TS.shape == topk_weights_TS.shape == (T, S), f"{topk_ids_TS.shape}, {topk_weights_TS.shape}, T {T}"
    assert topk_ids_TS.dtype in (torch.int32, torch.int64) and topk_weights_TS.dtype is torch.float32, (
        f"ids are {topk_ids_TS.dtype}, weights {topk_weights_TS.dtype}; needed int32 or int64, float32"
    )
    if out is None:
        out = x_TD.new_empty(T, D)
    assert out.shape == (T, D) and out.dtype is dtype, f"out is {out.shape} {out.dtype}, needed {(T, D)} {dtype}"
    assert x_TD.stride(1) == 1 and out.stride(1) == 1, f"last strides are {x_TD.stride(1)}, {out.stride(1)}, needed 1"
    topk_ids_TS, topk_weights_TS = topk_ids_TS.contiguous(), topk_weights_TS.contiguous()
    bad = kernel(
        _i19(
            _CODE[dtype], topk_ids_TS.dtype is torch.int64, T, S, E, I, D, _at(x_TD), x_TD.stride(0),
            *addresses, _at(topk_ids_TS), _at(topk_weights_TS),
            _at(out), out.stride(0), _threads(), _bias(b13, (E, 2 * I)), _bias(b2, (E, D)),
            ("silu", "swigluoai").index(activation),
        )
    )  # fmt: skip
    assert not bad, f"expert ids from {topk_ids_TS.min()} to {topk_ids_TS.max()} do not fit {E} experts"
    return out
