# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: PT018
"""CPU kernels, each beside its plain torch twin ``*_ref``, which is also what runs where no kernel can be built.

Shape letters: T tokens (rows), N output features, K input features, H query heads, J key/value heads, D head size or
model width, R requests, E experts, S experts of a token, I intermediate size of an expert.

All kernels take float32, bfloat16 or float16 and sum in float32. A row's result depends neither on the other rows of
the batch, nor on its place, nor on the number of threads: bitwise (the twins promise this within rounding only).
Shapes that contradict each other are an ``AssertionError`` with both numbers.

Variables: ``VLLM_CPU_KERNELS=0`` runs the twins; ``VLLM_CPU_AMX=0`` keeps bfloat16 off the processor's matrix unit,
which is used where it is there and passes its test.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import struct
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.csrc import build
from vllm.logger import init_logger

logger = init_logger(__name__)

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
            "the operations of its own device (an attention backend other than CPU_ATTN, the twins *_ref)"
        )
    return tensor.data_ptr()


# A kernel takes one packed record of 8-byte fields, as its ``...Args`` in csrc has them: converting a dozen arguments
# one by one would cost ctypes more than most calls compute.
_i7, _i8, _i12 = struct.Struct("7q").pack, struct.Struct("8q").pack, struct.Struct("12q").pack
_i15, _i16, _i19 = struct.Struct("15q").pack, struct.Struct("16q").pack, struct.Struct("19q").pack
_i15_f, _i27_f = struct.Struct("15qd").pack, struct.Struct("27qd").pack
_FUNCTIONS = (
    "vc_panel_width",
    "vc_matrix_unit",
    "vc_pack",
    "vc_linear",
    "vc_embedding",
    "vc_rms_norm",
    "vc_silu_and_mul",
    "vc_rotary",
    "vc_reshape_and_cache",
    "vc_paged_attention",
    "vc_fused_experts",
)


@functools.cache
def _kernels() -> Any:
    """The loaded library, or None where the twins run."""
    library = build.load()
    if library is not None:
        for name in _FUNCTIONS:
            getattr(library, name).argtypes = [ctypes.c_char_p]
        if library.vc_matrix_unit(None) == 2:
            logger.warning("the processor's matrix unit failed its test, the vector kernels run bfloat16 instead")
    return library


def kernels_available() -> bool:
    """Whether the C++ kernels run in this process (builds them on the first call)."""
    return _kernels() is not None


# ---------------------------------------------------------------------------------------------------------------------
# Linear layers


@dataclass(frozen=True)
class PackedWeight:
    """A linear layer's weight [N, K] in the layout that ``linear`` reads.

    ``kind``: "panels" for the own kernel (``data`` is flat), "plain" for torch (``data`` is the [N, K] weight itself).
    """

    N: int
    K: int
    dtype: torch.dtype
    data: Tensor
    kind: str

    @functools.cached_property
    def address(self) -> int:
        return _at(self.data)


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


def advise_huge_pages(tensor: Tensor) -> Tensor:
    """Ask the system to back ``tensor``'s memory with huge pages; returns it.

    For what is read as a whole in every step (weights, the KV cache): saves a good part of the address look-ups.
    """
    page = 2 << 20
    begin = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.nbytes) // page * page
    if end > begin and hasattr(mmap, "MADV_HUGEPAGE"):
        # advice only: where the system has no huge pages the call fails and small ones serve
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_HUGEPAGE)
    return tensor


def huge_page_empty(size: int, dtype: torch.dtype) -> Tensor:
    """A flat tensor of ``size`` elements on huge pages where there are any, contents undefined."""
    return advise_huge_pages(torch.empty(size, dtype=dtype, device="cpu"))


def _packed_size(N: int, K: int, dtype: torch.dtype) -> int:
    width = _kernels().vc_panel_width(None)
    return -(-N // width) * width * (-(-K // 32) * 32 if dtype is torch.bfloat16 else K)


def _pack_into(weight_NK: Tensor, out: Tensor) -> None:
    N, K = weight_NK.shape
    assert weight_NK.stride(1) == 1 or K == 1, f"weight rows must be contiguous, stride is {weight_NK.stride(1)}"
    _kernels().vc_pack(_i7(_CODE[weight_NK.dtype], N, K, _at(weight_NK), weight_NK.stride(0), _at(out), _threads()))


def pack_linear_weight(weight_NK: Tensor, into: PackedWeight | None = None) -> PackedWeight:
    """Packs a weight [N, K] (float32, bfloat16, float16; rows contiguous). The original may be freed afterwards.

    ``into``: a packed weight of the same shape and dtype whose memory the new one takes.
    """
    N, K = weight_NK.shape
    dtype = weight_NK.dtype
    if into is not None and into.kind == "panels":
        assert (into.N, into.K, into.dtype) == (N, K, dtype), f"{into.N, into.K, into.dtype} is not {N, K, dtype}"
        _pack_into(weight_NK, into.data)
        return into
    if _kernels() is None:
        return PackedWeight(N, K, dtype, weight_NK, "plain")
    _CODE[dtype]
    data = _arena.take(_packed_size(N, K, dtype), dtype)
    _pack_into(weight_NK, data)
    return PackedWeight(N, K, dtype, data, "panels")


def unpack_linear_weight(packed: PackedWeight) -> Tensor:
    """The weight [N, K] that was packed, bit for bit."""
    if packed.kind == "plain":
        return packed.data
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


def linear_ref(x_TK: Tensor, packed: PackedWeight, bias_N: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Twin of ``linear`` for a "plain" weight."""
    y = F.linear(x_TK, packed.data, bias_N)
    return y if out is None else out.copy_(y)


def linear(x_TK: Tensor, packed: PackedWeight, bias_N: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` -> [T, N].

    Args:
        x_TK: [T, K] of the weight's dtype, T from 0; its rows may be further apart than K.
        bias_N: [N] of the weight's dtype.
        out: [T, N], rows contiguous, of the weight's dtype or float32 (then the sums are not rounded).
    """
    if packed.kind == "plain":
        return linear_ref(x_TK, packed, bias_N, out)
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
        _kernels().vc_linear(
            _i12(code, out_code, T, N, K, _at(x_TK), x0, packed.address, bias, _at(out), out0, _threads())
        )
    return out


def embedding_ref(ids_T: Tensor, packed: PackedWeight) -> Tensor:
    """Twin of ``embedding`` for a "plain" weight."""
    return F.embedding(ids_T, packed.data)


def embedding(ids_T: Tensor, packed: PackedWeight) -> Tensor:
    """Rows ``ids`` (int64 [T], each in [0, N)) of a packed weight -> [T, K]: tied embeddings need no second copy."""
    if packed.kind == "plain":
        return embedding_ref(ids_T, packed)
    assert ids_T.dtype is torch.int64 and ids_T.dim() == 1, f"ids are {ids_T.shape} {ids_T.dtype}, needed int64 [T]"
    ids_T = ids_T.contiguous()
    T = ids_T.shape[0]
    out = ids_T.new_empty((T, packed.K), dtype=packed.dtype)
    code = _CODE[packed.dtype]
    bad = _kernels().vc_embedding(_i8(code, T, packed.N, packed.K, _at(ids_T), packed.address, _at(out), _threads()))
    assert not bad, f"ids from {ids_T.min()} to {ids_T.max()} do not fit {packed.N} rows"
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Row-wise operations


def rms_norm_ref(x: Tensor, weight_D: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """Twin of ``rms_norm``."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = weight_D * y.to(x.dtype) if weight_D.dtype is x.dtype else (weight_D * y).to(x.dtype)
    return y if out is None else out.copy_(y)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, with the roundings of transformers.

    Args:
        x: [T, D], or [T, H, D] as a view into wider rows; the last dimension contiguous.
        weight_D: [D] of x's dtype: applied to the normalised value after that is rounded (Llama). float32 beside a
            narrower x: applied before the one rounding (the ``1 + weight`` of Gemma and Qwen3.5, folded by the caller).
        out: of x's shape and dtype, may be x itself.
    """
    kernels = _kernels()
    if kernels is None:
        return rms_norm_ref(x, weight_D, eps, out)
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


def fused_add_rms_norm_ref(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Twin of ``fused_add_rms_norm``."""
    residual_TD += x_TD
    return rms_norm_ref(residual_TD, weight_D, eps, out), residual_TD


def fused_add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``residual += x`` in place, rounded to its dtype; returns (rms_norm(residual), residual), both [T, D].

    ``out`` may be x itself.
    """
    kernels = _kernels()
    if kernels is None:
        return fused_add_rms_norm_ref(x_TD, residual_TD, weight_D, eps, out)
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


def silu_and_mul_ref(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Twin of ``silu_and_mul``."""
    gate, up = x.chunk(2, dim=-1)
    y = F.silu(gate) * up
    return y if out is None else out.copy_(y)


def silu_and_mul(x: Tensor, out: Tensor | None = None) -> Tensor:
    """[T, 2 * D] = [gate, up] -> ``silu(gate) * up`` [T, D]; rows may be strided."""
    kernels = _kernels()
    if kernels is None:
        return silu_and_mul_ref(x, out)
    T, width = x.shape
    D, dtype, (x0, x1) = width // 2, x.dtype, x.stride()
    assert width == 2 * D and x1 == 1, f"x is {x.shape} {x.stride()}, needed {(T, 2 * D)}, rows contiguous"
    if out is None:
        out = x.new_empty(T, D)
    o0, o1 = out.stride()
    assert out.shape == (T, D) and out.dtype is dtype and (o1 == 1 or D == 1), (
        f"out is {out.shape} {out.dtype}, needed {(T, D)} {dtype}"
    )
    kernels.vc_silu_and_mul(_i8(_CODE[dtype], T, D, _at(x), x0, _at(out), o0, _threads()))
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Attention


def rotary_embedding_ref(positions_T: Tensor, q_THD: Tensor, k_TJD: Tensor, cos_sin_cache: Tensor) -> None:
    """Twin of ``rotary_embedding``."""
    rot_dim = cos_sin_cache.shape[1]
    cos, sin = cos_sin_cache[positions_T].unsqueeze(1).chunk(2, dim=-1)
    for x in (q_THD, k_TJD):
        a, b = x[..., :rot_dim].to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
        x[..., :rot_dim] = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def rotary_embedding(positions_T: Tensor, q_THD: Tensor, k_TJD: Tensor, cos_sin_cache: Tensor) -> None:
    """Rotates q and k in place, NeoX halves, in float32 with one rounding.

    Args:
        positions_T: int64 [T], each in [0, P).
        q_THD, k_TJD: [T, H, D] and [T, J, D], may be views into a fused row; the last dimension contiguous.
        cos_sin_cache: float32 [P, rot_dim], cosines of the rot_dim / 2 angles, then sines. rot_dim <= D is even; the
            elements of a head past rot_dim stay as they are.
    """
    kernels = _kernels()
    if kernels is None:
        return rotary_embedding_ref(positions_T, q_THD, k_TJD, cos_sin_cache)
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
        _i15(
            _CODE[dtype], T, H, J, rot_dim, P, _at(positions_T), _at(q_THD), q0, q1, _at(k_TJD), k0,
            k1, _at(cos_sin_cache), _threads(),
        )
    )  # fmt: skip
    assert not bad, f"positions from {positions_T.min()} to {positions_T.max()} do not fit a cache of {P}"
    return None


def _caches(key_cache: Tensor, value_cache: Tensor, J: int, D: int, dtype: torch.dtype) -> tuple[int, ...]:
    """(num_blocks, block_size, then the strides of a block and of a head in both caches) of caches that fit."""
    blocks, _, block_size, _ = shape = key_cache.shape
    assert shape == value_cache.shape == (blocks, J, block_size, D), (
        f"caches are {shape}, {value_cache.shape}, needed {(blocks, J, block_size, D)}"
    )
    assert key_cache.dtype is dtype and value_cache.dtype is dtype, (
        f"caches are {key_cache.dtype}, {value_cache.dtype}, needed {dtype}"
    )
    (kc0, kc1, kc2, kc3), (vc0, vc1, vc2, vc3) = key_cache.stride(), value_cache.stride()
    assert kc3 == vc3 == 1 and kc2 == vc2 == D, (
        f"cache strides are {key_cache.stride()}, {value_cache.stride()}, a block's head must be contiguous"
    )
    return blocks, block_size, kc0, kc1, vc0, vc1


def reshape_and_cache_ref(
    k_TJD: Tensor, v_TJD: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping_T: Tensor
) -> None:
    """Twin of ``reshape_and_cache``."""
    block_size = key_cache.shape[2]
    real = slot_mapping_T >= 0
    slots = slot_mapping_T[real]
    block, offset = slots // block_size, slots % block_size
    key_cache[block, :, offset] = k_TJD[real]
    value_cache[block, :, offset] = v_TJD[real]


def reshape_and_cache(
    k_TJD: Tensor, v_TJD: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping_T: Tensor
) -> None:
    """Writes token t to slot ``slot_mapping[t]`` = block * block_size + offset; a token with slot -1 is skipped.

    Args:
        k_TJD, v_TJD: [T, J, D], may be views into a fused row; the last dimension contiguous.
        key_cache, value_cache: [num_blocks, J, block_size, D] of the same dtype, a block's head contiguous.
        slot_mapping_T: int64 [T].
    """
    kernels = _kernels()
    if kernels is None:
        return reshape_and_cache_ref(k_TJD, v_TJD, key_cache, value_cache, slot_mapping_T)
    T, J, D = shape = k_TJD.shape
    dtype = k_TJD.dtype
    assert v_TJD.shape == shape and v_TJD.dtype is dtype, f"k is {shape} {dtype}, v is {v_TJD.shape} {v_TJD.dtype}"
    blocks, block_size, kc0, kc1, vc0, vc1 = _caches(key_cache, value_cache, J, D, dtype)
    (k0, k1, k2), (v0, v1, v2) = k_TJD.stride(), v_TJD.stride()
    assert k2 == v2 == 1, f"last strides are {k2}, {v2}, needed 1"
    assert slot_mapping_T.shape == (T,) and slot_mapping_T.dtype is torch.int64 and slot_mapping_T.is_contiguous(), (
        f"slots are {slot_mapping_T.shape} {slot_mapping_T.dtype}, needed int64 {(T,)}"
    )
    n = dtype.itemsize
    bad = kernels.vc_reshape_and_cache(
        _i19(
            T, J, D * n, blocks, block_size, _at(k_TJD), k0 * n, k1 * n, _at(v_TJD), v0 * n, v1 * n,
            _at(key_cache), kc0 * n, kc1 * n, _at(value_cache), vc0 * n, vc1 * n,
            _at(slot_mapping_T), _threads(),
        )
    )  # fmt: skip
    assert not bad, (
        f"slots from {slot_mapping_T.min()} to {slot_mapping_T.max()} do not fit {blocks} blocks of {block_size}"
    )
    return None


def paged_attention_ref(
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
) -> None:
    """Twin of ``paged_attention``. A NaN among a chunk's own new keys or values may reach earlier rows of the chunk."""
    wide = torch.promote_types(q_THD.dtype, torch.float32)
    block_size = key_cache.shape[2]
    R = query_start_loc.shape[0] - 1 if num_reqs is None else num_reqs
    start, lens = query_start_loc.tolist(), seq_lens.tolist()
    for r in range(R):
        begin, end, length = start[r], start[r + 1], lens[r]
        if length == 0 or end == begin:
            continue
        position = torch.arange(length - (end - begin), length, device=q_THD.device)
        first_key = max(0, length - (end - begin) + 1 - sliding_window) if sliding_window else 0
        key = torch.arange(first_key, length, device=q_THD.device)
        block, offset = block_table[r, key // block_size].long(), key % block_size
        visible = key <= position[:, None]
        if sliding_window:
            visible &= key > position[:, None] - sliding_window
        y = F.scaled_dot_product_attention(
            q_THD[begin:end].transpose(0, 1).to(wide),
            key_cache[block, :, offset].transpose(0, 1).to(wide),
            value_cache[block, :, offset].transpose(0, 1).to(wide),
            attn_mask=visible,
            scale=scale,
            enable_gqa=True,
        )
        out_THD[begin:end] = y.transpose(0, 1).to(out_THD.dtype)
    out_THD[start[R] :] = 0


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
) -> None:
    """Causal grouped-query attention over the paged cache, prefill and decode mixed; the new keys are in the cache.

    Query i of request r has position ``seq_lens[r] - query_len + i`` and sees the keys at ``(position - sliding_window,
    position]``, or ``[0, position]`` when sliding_window is 0. A slot outside those keys is never part of a sum, so it
    may hold NaN. Rows [0, query_start_loc[R]) are written, except those of a request with seq_len 0; the rows from
    query_start_loc[R] on are set to 0.

    Args:
        q_THD, out_THD: [T, H, D], may be views into wider rows; the last dimension contiguous.
        key_cache, value_cache: [num_blocks, J, block_size, D], H a multiple of J, a block's head contiguous.
        block_table: int32 [>= R, max_blocks].
        query_start_loc: int32 [>= R + 1], rising from 0; seq_lens: int32 [>= R].
        num_reqs: R; by default ``query_start_loc.shape[0] - 1``.
    """
    kernels = _kernels()
    R = query_start_loc.shape[0] - 1 if num_reqs is None else num_reqs
    if kernels is None:
        return paged_attention_ref(
            q_THD, key_cache, value_cache, block_table, query_start_loc, seq_lens, scale, out_THD, sliding_window, R
        )
    T, H, D = shape = q_THD.shape
    J, dtype = key_cache.shape[1], q_THD.dtype
    table_rows, table_blocks = block_table.shape
    assert H % J == 0, f"{H} query heads are no multiple of {J} key-value heads"
    assert out_THD.shape == shape and out_THD.dtype is dtype, (
        f"out is {out_THD.shape} {out_THD.dtype}, q {shape} {dtype}"
    )
    blocks, block_size, kc0, kc1, vc0, vc1 = _caches(key_cache, value_cache, J, D, dtype)
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
    bad = kernels.vc_paged_attention(
        _i27_f(
            _CODE[dtype], _at(q_THD), q0, q1, _at(key_cache), kc0, kc1, _at(value_cache), vc0, vc1,
            _at(block_table), table0, _at(query_start_loc), _at(seq_lens), R, T, H, J, D, blocks,
            block_size, table_blocks, sliding_window, _at(out_THD), o0, o1, _threads(), scale,
        )
    )  # fmt: skip
    assert not bad, (
        f"{T} rows, {blocks} blocks of {block_size}, table of {block_table.shape[1]} do not fit query_start_loc "
        f"{query_start_loc[: R + 1].tolist()}, seq_lens {seq_lens[:R].tolist()}, block_table {block_table[:R].tolist()}"
    )
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Experts


@dataclass(frozen=True)
class PackedExperts:
    """Weights [E, N, K] of all experts in the layout that ``fused_experts`` reads; ``kind`` as in PackedWeight.

    ``gated``: N is [gate; up] stacked, and "panels" packs the two halves one after the other.
    """

    E: int
    N: int
    K: int
    dtype: torch.dtype
    data: Tensor
    kind: str
    gated: bool


def pack_expert_weights(weight_ENK: Tensor, gated: bool = False) -> PackedExperts:
    """Packs the experts' weights [E, N, K]; ``gated=True`` for w13, whose N = 2 * I is [gate; up].

    "plain", and not copied, for a weight on another device or where there are no kernels.
    """
    E, N, K = weight_ENK.shape
    dtype = weight_ENK.dtype
    if not weight_ENK.is_cpu or _kernels() is None:
        return PackedExperts(E, N, K, dtype, weight_ENK, "plain", gated)
    _CODE[dtype]
    parts = 2 if gated else 1
    assert N % parts == 0, f"a gated weight has an even number of rows, not {N}"
    size = _packed_size(N // parts, K, dtype)
    data = _arena.take(E * parts * size, dtype).view(E, parts, size)
    for e in range(E):
        for part, half in enumerate(weight_ENK[e].chunk(parts)):
            _pack_into(half, data[e, part])
    return PackedExperts(E, N, K, dtype, data, "panels", gated)


def repack_expert_weight(packed: PackedExperts, expert: int, weight_NK: Tensor, part: int = 0) -> None:
    """Put a new weight of one expert, of a gated one its gate (``part`` 0) or up (1) half, in place of the old."""
    if packed.kind == "plain":
        rows = weight_NK.shape[0]
        packed.data[expert, part * rows : (part + 1) * rows].copy_(weight_NK)
    else:
        _pack_into(weight_NK, packed.data[expert, part])


def fused_experts_ref(
    x_TD: Tensor,
    w13: PackedExperts,
    w2: PackedExperts,
    topk_ids_TS: Tensor,
    topk_weights_TS: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Twin of ``fused_experts`` for "plain" weights."""
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    y_TSD = x_TD.new_zeros((*topk_ids_TS.shape, x_TD.shape[1]), dtype=wide)
    for e in topk_ids_TS[topk_ids_TS >= 0].unique().tolist():
        token, slot = torch.where(topk_ids_TS == e)
        h = silu_and_mul_ref(F.linear(x_TD[token], w13.data[e]))
        y_TSD[token, slot] = F.linear(h, w2.data[e]).to(wide) * topk_weights_TS[token, slot, None]
    y = torch.zeros_like(x_TD, dtype=wide)
    for s in range(topk_ids_TS.shape[1]):
        y += y_TSD[:, s]
    return y.to(x_TD.dtype) if out is None else out.copy_(y)


def fused_experts(
    x_TD: Tensor,
    w13: PackedExperts,
    w2: PackedExperts,
    topk_ids_TS: Tensor,
    topk_weights_TS: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """SwiGLU experts: ``sum over s of weight[t, s] * w2[e] (silu(gate) * up)``, [gate; up] = w13[e] x[t], e = id[t, s].

    A slot with id -1 is skipped: its weight is not read and may be NaN; a row with no other slots is exactly 0, and
    nothing its x holds reaches another row. The sum over slots is in float32, in the order of the slots.

    Args:
        x_TD: [T, D] of the weights' dtype, rows contiguous.
        w13: ``pack_expert_weights(w [E, 2 * I, D], gated=True)``; w2: ``pack_expert_weights(w [E, D, I])``.
        topk_ids_TS: int32 or int64 [T, S], each in [-1, E); topk_weights_TS: float32 [T, S].
        out: [T, D] of x's dtype; may be x itself.
    """
    if w13.kind == "plain":
        return fused_experts_ref(x_TD, w13, w2, topk_ids_TS, topk_weights_TS, out)
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
    bad = _kernels().vc_fused_experts(
        _i16(
            _CODE[dtype], topk_ids_TS.dtype is torch.int64, T, S, E, I, D, _at(x_TD), x_TD.stride(0),
            _at(w13.data), _at(w2.data), _at(topk_ids_TS), _at(topk_weights_TS),
            _at(out), out.stride(0), _threads(),
        )
    )  # fmt: skip
    assert not bad, f"expert ids from {topk_ids_TS.min()} to {topk_ids_TS.max()} do not fit {E} experts"
    return out
