# SPDX-License-Identifier: Apache-2.0
"""Thin wrappers over the kernels of vllm-xpu-kernels, by the contracts of ``kernels.ops``. Each keeps law 2 around its
kernel: inputs narrowed to real rows and requests, and every row past them written here.

The kernels are called by the schemas recorded in ``xpu_schemas.json``; where the installed package has others, or a
shape that was not compiled is asked for, the next implementation runs. There is no ``rotary_embedding``: the kernel
rotates in q's own type, with several roundings, and takes the distance between q's heads for k's as well.

Nothing in this file has run on an XPU; its tests put stand-ins made from the schemas, with the kernels' documented
habits, in their place.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.kernels import memory, reference
from vllm.kernels.packages import kernel_package
from vllm.kernels.padding import PAD_EXPERT, PAD_STATE_SLOT, with_rows
from vllm.kernels.quantized import FORMATS, QuantizedWeight, grids
from vllm.kernels.reference import swigluoai_and_mul
from vllm.kernels.reference_gdn import rms_norm_gated_ref
from vllm.kernels.weights import GDNWeights, PackedExperts
from vllm.logger import init_logger

logger = init_logger(__name__)

_HALF = (torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn
_TOP_K = (1, 2, 4, 6, 8, 10)  # those that the experts' gather and scatter were compiled for
_KERNELS = {
    "rms_norm": ("_C.rms_norm",),
    "fused_add_rms_norm": ("_C.fused_add_rms_norm",),
    "silu_and_mul": ("_C.silu_and_mul",),
    "gelu_tanh_and_mul": ("_C.gelu_tanh_and_mul",),
    "reshape_and_cache": ("_C_cache_ops.reshape_and_cache_flash",),
    "paged_attention": ("_vllm_fa2_C.varlen_fwd",),
    "topk_softmax": ("_moe_C.topk_softmax",),
    "grouped_topk": ("_moe_C.grouped_topk",),
    "fused_experts": (
        "_moe_C.remap_hidden_states",
        "_xpu_C.cutlass_grouped_gemm_interface",
        "_C.silu_and_mul",
        "_moe_C.moe_gather",
    ),
    "gated_delta_net": ("_xpu_C.gdn_attention",),
    "quantized_linear": ("_xpu_C.int4_gemm_w4a16", "_xpu_C.fp8_gemm_w8a16", "_xpu_C.fp8_gemm"),
    "quantized_experts": (
        "_moe_C.remap_hidden_states",
        "_xpu_C.cutlass_grouped_gemm_interface",
        "_C.silu_and_mul",
        "_moe_C.moe_gather",
    ),
}


@functools.cache
def recorded() -> dict[str, Any]:
    """The release that the wrappers were written for: its schemas by kernel, and the paged-decode shapes in it."""
    return json.loads(Path(__file__).with_name("xpu_schemas.json").read_text())


# As in kernels.reference.
ASKS_THE_HOST = ("paged_attention", "gated_delta_net")


def why_not(operator: str) -> str | None:
    """None where the installed kernels have ``operator`` with the recorded arguments."""
    for kernel in _KERNELS[operator]:
        namespace, name = kernel.split(".")
        # The cache's kernels come with the package's first library.
        if kernel_package(f"vllm_xpu_kernels.{namespace.removesuffix('_cache_ops')}") is None:
            return f"vllm_xpu_kernels.{namespace} cannot be loaded"
        found = getattr(getattr(torch.ops, namespace), name, None)
        if found is None:
            return f"this vllm-xpu-kernels has no kernel {kernel}"
        installed, known = found.default._schema, torch._C.parse_schema(name + recorded()["schemas"][kernel])
        if _arguments(installed) != _arguments(known):
            return f"this vllm-xpu-kernels takes other arguments than {recorded()['version']}: {installed}"
    return None


def _arguments(schema: Any) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in schema.arguments]


# ---------------------------------------------------------------------------------------------------------------------
# Row-wise operations


def _of_one_dtype(operator: str, x: Tensor, weight_D: Tensor) -> None:
    if weight_D.dtype is not x.dtype:
        raise NotImplementedError(
            f"{operator} of {x.dtype} with a weight of {weight_D.dtype}: the kernel takes one type"
        )


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    _of_one_dtype("rms_norm", x, weight_D)
    # The kernel writes rows that lie side by side, whatever the result's strides are, and assumes that none is x's.
    direct = out is not None and out.is_contiguous() and out.data_ptr() != x.data_ptr()
    y = out if out is not None and direct else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        torch.ops._C.rms_norm(y, x, weight_D, eps)
    return y if out is None or out is y else out.copy_(y)


def fused_add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    _of_one_dtype("fused_add_rms_norm", x_TD, weight_D)
    if not residual_TD.is_contiguous():
        raise NotImplementedError(f"fused_add_rms_norm with a residual of strides {residual_TD.stride()}")
    if out is None:
        out = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    if out.data_ptr() != x_TD.data_ptr() or out.stride() != x_TD.stride():
        out.copy_(x_TD)
    if out.numel():
        torch.ops._C.fused_add_rms_norm(out, residual_TD, weight_D, eps)
    return out, residual_TD


def silu_and_mul(x: Tensor, out: Tensor | None = None) -> Tensor:
    return _gated(torch.ops._C.silu_and_mul, x, out)


def gelu_tanh_and_mul(x: Tensor, out: Tensor | None = None) -> Tensor:
    return _gated(torch.ops._C.gelu_tanh_and_mul, x, out)


def _gated(kernel: Any, x: Tensor, out: Tensor | None) -> Tensor:
    """The kernels know no strides: a result that has some, such as x's own first half, costs a copy."""
    y = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype, device=x.device)
    if x.numel():
        kernel(y, x.contiguous())
    return y if out is None else out.copy_(y)


# ---------------------------------------------------------------------------------------------------------------------
# Attention


def zeroed_cache(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """[num_blocks, J, block_size, D] over memory in the kernels' order [num_blocks, block_size, J, D]."""
    blocks, J, block_size, D = shape
    return memory.zeroed_cache((blocks, block_size, J, D), dtype).transpose(1, 2)


def _in_kernels_order(key_cache: Tensor, value_cache: Tensor) -> tuple[Tensor, Tensor]:
    caches = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    part_of_keys = value_cache.data_ptr() == key_cache.data_ptr() and value_cache.stride() == key_cache.stride()
    if not caches[0].is_contiguous() or not (part_of_keys or caches[1].is_contiguous()):
        raise NotImplementedError(
            f"caches of shape {tuple(key_cache.shape)} with strides {key_cache.stride()} and {value_cache.stride()}: "
            "the kernels read [num_blocks, block_size, heads, head_size], as kernels.xpu.zeroed_cache makes them"
        )
    return caches


@functools.cache
def _scale_of(value: float, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=device)


def reshape_and_cache(
    k_TJD: Tensor,
    v_TJD: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor | None,
    slot_mapping_T: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Without values the keys are written twice, to one place: the kernel writes both."""
    v_TJD, value_cache = (k_TJD, key_cache) if v_TJD is None or value_cache is None else (v_TJD, value_cache)
    caches = _in_kernels_order(key_cache, value_cache)
    if k_TJD.shape[0]:
        k_TJD, v_TJD = (x if x[0].is_contiguous() else x.contiguous() for x in (k_TJD, v_TJD))
        kind, scales = "auto", (k_scale, k_scale if v_TJD is k_TJD else v_scale)
        if key_cache.dtype is FP8:  # what the kernel makes of numbers beyond e4m3's is not known
            kind, caches = "fp8", (caches[0].view(torch.uint8), caches[1].view(torch.uint8))
            k_TJD, v_TJD = (x.clamp(-448 * s, 448 * s) for x, s in zip((k_TJD, v_TJD), scales, strict=True))
        torch.ops._C_cache_ops.reshape_and_cache_flash(
            k_TJD, v_TJD, *caches, slot_mapping_T, kind, *(_scale_of(s, k_TJD.device) for s in scales)
        )


def preferred_block_size(head_size: int, default: int) -> int:
    """``default`` where a kernel of that page was compiled for this head size, else the smallest page that was."""
    pages = recorded()["paged_decode"]["full"]["8"].get(str(head_size), [])
    return default if default in pages or not pages else min(pages)


def _check_compiled(H: int, J: int, D: int, block_size: int, window: bool, dtype: torch.dtype) -> None:
    """
    Raises:
        NotImplementedError: no paged-decode kernel was compiled for this shape; the package would take plain torch.
    """
    tile = 8 if H // J <= 8 else 16
    page = 64 if block_size % 64 == 0 else 32 if block_size == 32 else 16
    compiled = recorded()["paged_decode"]["window" if window else "full"][str(tile)]
    pages = compiled.get(str(D), [])
    if dtype in _HALF and block_size % 16 == 0 and page in pages:
        return
    raise NotImplementedError(
        f"attention of {dtype} with head size {D}, {H // J} query heads to a key head, blocks of {block_size}"
        f"{' and a sliding window' if window else ''}: vllm-xpu-kernels has it in bfloat16 and float16 with blocks of "
        f"{' or '.join(map(str, pages)) or 'no size'} for this head size; set block_size to one of these"
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
    """The last two are the host's copies: without them each call waits for the device, because the kernel takes the
    longest query and the longest context as numbers of the host.

    A request without rows would be taken for a decode, whose row is that of the next request or lies past the end: the
    kernel sees the requests that have rows, and no row past theirs.
    """
    if sinks is not None or soft_cap:
        raise NotImplementedError(f"attention with sinks or soft_cap={soft_cap} is not bound to vllm-xpu-kernels")
    H, D = q_THD.shape[1:]
    (J, block_size), DV = key_cache.shape[1:3], value_cache.shape[3]
    # Latent attention was compiled for up to 8 query heads to its one key head: they come in groups of so many.
    latent = (D, DV, J) == (576, 512, 1)
    together = 8 if latent else H
    if D != DV and not latent:
        raise NotImplementedError(f"heads of {D} with values of {DV}: vllm-xpu-kernels has only 576 with 512")
    _check_compiled(min(H, together), J, D, block_size, sliding_window > 0, q_THD.dtype)
    keys, values = _in_kernels_order(key_cache, value_cache)
    R = query_start_loc.shape[0] - 1 if num_reqs is None else num_reqs
    starts = (query_start_loc.cpu() if query_start_loc_cpu is None else query_start_loc_cpu)[: R + 1]
    lengths = starts.diff()
    real = int(starts[-1])
    if real:
        contexts = (seq_lens.cpu() if seq_lens_cpu is None else seq_lens_cpu)[:R]
        if bool((contexts < lengths).any()):
            raise NotImplementedError(f"requests of {lengths.tolist()} rows and {contexts.tolist()} tokens in all")
        cu_seqlens, used, blocks = with_rows(starts, query_start_loc, seq_lens, block_table)
        window = (sliding_window - 1, 0) if sliding_window else (-1, -1)
        scales: list[Tensor | None] = [None, None]
        if key_cache.dtype is FP8:
            scales = [_scale_of(s, q_THD.device).expand(len(used), J) for s in (k_scale, v_scale)]
        for first in range(0, H, together):
            some = slice(first, first + together)
            wanted = out_THD[:real, some]
            out = wanted if wanted.is_contiguous() else wanted.new_empty(wanted.shape)
            try:
                torch.ops._vllm_fa2_C.varlen_fwd(
                    q_THD[:real, some],
                    keys,
                    values,
                    out,
                    cu_seqlens_q=cu_seqlens,
                    cu_seqlens_k=torch.zeros_like(cu_seqlens),
                    seqused_k=used,
                    leftpad_k=None,
                    block_table=blocks,
                    alibi_slopes=None,
                    max_seqlen_q=int(lengths.max()),
                    max_seqlen_k=int(contexts.max()),
                    p_dropout=0.0,
                    q_scale=None,
                    k_scale=scales[0],
                    v_scale=scales[1],
                    softmax_scale=scale,
                    softmax_sink=None,
                    zero_tensors=False,
                    is_causal=True,
                    window_size_left=window[0],
                    window_size_right=window[1],
                    softcap=0.0,
                    return_softmax=False,
                    gen=None,
                    num_splits=None,
                    mix_batch=True,
                    splits_per_seq=None,
                    work_list=None,
                )
            except RuntimeError as error:
                if "not compiled" not in str(error):
                    raise
                raise NotImplementedError(f"head size {D}, blocks of {block_size}: {error}") from error
            if out is not wanted:
                wanted.copy_(out)
    out_THD[real:] = 0


# ---------------------------------------------------------------------------------------------------------------------
# Experts


def topk_softmax(
    router_logits_TE: Tensor, top_k: int, renormalize: bool, slot_mapping_T: Tensor, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    T, device, padding = router_logits_TE.shape[0], router_logits_TE.device, slot_mapping_T[:, None] < 0
    weights = torch.empty(T, top_k, dtype=torch.float32, device=device)
    ids, unused = (torch.empty(T, top_k, dtype=torch.int32, device=device) for _ in range(2))
    if T:
        logits = router_logits_TE.masked_fill(padding, 0)
        torch.ops._moe_C.topk_softmax(weights, ids, unused, logits, renormalize, None, None)
    if scale != 1.0:
        weights *= scale
    return weights.masked_fill_(padding, 0), ids.masked_fill_(padding, PAD_EXPERT)


def grouped_topk(
    router_logits_TE: Tensor,
    top_k: int,
    renormalize: bool,
    slot_mapping_T: Tensor,
    num_groups: int,
    topk_groups: int,
    group_top: int,
    sigmoid: bool,
    bias_E: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    (T, E), device = router_logits_TE.shape, router_logits_TE.device
    if not sigmoid or group_top != 2 or max(num_groups, top_k) > 32:
        raise NotImplementedError(
            f"{top_k} experts of the best of {num_groups} groups, judged by their best {group_top}, sigmoid={sigmoid}: "
            "vllm-xpu-kernels takes up to 32 of each, judged by the best two sigmoids"
        )
    if not T:
        return torch.empty(0, top_k, device=device), torch.empty(0, top_k, dtype=torch.int32, device=device)
    bias = torch.zeros(E, dtype=torch.float32, device=device) if bias_E is None else bias_E
    padding = slot_mapping_T[:, None] < 0
    weights, ids = torch.ops._moe_C.grouped_topk(
        router_logits_TE.masked_fill(padding, 0), num_groups, topk_groups, top_k, renormalize, scale, bias, 1
    )
    return weights.masked_fill(padding, 0), ids.int().masked_fill(padding, PAD_EXPERT)


def empty_experts(E: int, N: int, K: int, dtype: torch.dtype, gated: bool = False) -> PackedExperts:
    """A "plain" weight [E, N, K] over memory in the order [E, K, N], which the kernel reads."""
    return PackedExperts(E, N, K, dtype, torch.empty(E, K, N, dtype=dtype).transpose(1, 2), "plain", gated)


def pack_expert_weights(weight_ENK: Tensor, gated: bool = False) -> PackedExperts:
    """As ``empty_experts``, filled."""
    E, N, K = weight_ENK.shape
    with weight_ENK.device:
        packed = empty_experts(E, N, K, weight_ENK.dtype, gated)
    packed.data.copy_(weight_ENK)
    return packed


@functools.cache
def _expert_map(E: int, device: torch.device) -> Tensor:
    """Each expert's own number, and -1 for one more, which skipped slots are sent to."""
    table = torch.arange(E + 1, dtype=torch.int32, device=device)
    table[E] = -1
    return table


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
    """Id -1 never reaches the kernels, which would index a table with it or take it for expert 0: a skipped slot has id
    E of a table of E + 1 experts, which sends it nowhere."""
    D, E, I, S, dtype = x_TD.shape[1], w13.E, w2.K, topk_ids_TS.shape[1], x_TD.dtype
    weights = [packed.data.transpose(1, 2) for packed in (w13, w2)]
    if dtype not in _HALF or S not in _TOP_K or D % 8 or I % 4 or not all(w.is_contiguous() for w in weights):
        raise NotImplementedError(
            f"experts of {dtype}, sizes {D} and {I}, {S} to a token, weights of strides {w13.data.stride()}: "
            f"vllm-xpu-kernels takes bfloat16 and float16, multiples of 8 and 4, {_TOP_K} to a token, and weights as "
            "kernels.xpu.pack_expert_weights makes them"
        )
    gemm = torch.ops._xpu_C.cutlass_grouped_gemm_interface

    def product(second: bool, rows: Tensor, result: Tensor, rows_per_expert: Tensor, bias: Tensor | None) -> None:
        gemm(rows, None, weights[second], None, bias, result, rows_per_expert, result.shape[1], rows.shape[1], E)

    return _through_experts(x_TD, E, I, product, topk_ids_TS, topk_weights_TS, out, b13, b2, activation)


def _through_experts(
    x_TD: Tensor,
    E: int,
    I: int,
    product: Callable[[bool, Tensor, Tensor, Tensor, Tensor | None], None],
    topk_ids_TS: Tensor,
    topk_weights_TS: Tensor,
    out: Tensor | None,
    b13: Tensor | None,
    b2: Tensor | None,
    activation: str,
) -> Tensor:
    """``product(second, rows, result, rows_per_expert, bias)`` multiplies rows, sorted by expert, with w13 or w2."""
    (T, D), S, dtype, device = x_TD.shape, topk_ids_TS.shape[1], x_TD.dtype, x_TD.device
    y = out if out is not None and out.is_contiguous() else torch.empty(T, D, dtype=dtype, device=device)
    if T:
        x_TD, topk_weights_TS = x_TD.contiguous(), topk_weights_TS.contiguous()
        topk_ids_TS = topk_ids_TS.masked_fill(topk_ids_TS < 0, E)
        rows = torch.empty(T * S, D, dtype=dtype, device=device)
        rows_per_expert = torch.zeros(E, dtype=torch.int32, device=device)
        place_TS = torch.empty(T, S, dtype=torch.int32, device=device)
        table = _expert_map(E, device)
        torch.ops._moe_C.remap_hidden_states(
            x_TD, None, rows, None, table, rows_per_expert, place_TS, topk_ids_TS, E + 1, E
        )
        gate_up, h = (torch.empty(T * S, width, dtype=dtype, device=device) for width in (2 * I, I))
        product(False, rows, gate_up, rows_per_expert, None if b13 is None else b13.to(dtype))
        # Of the rows past the last expert's as well, which nothing reads.
        if activation == "silu":
            torch.ops._C.silu_and_mul(h, gate_up)
        else:  # the kernel wants gate and up in turns
            h.copy_(swigluoai_and_mul(gate_up))
        product(True, h, rows, rows_per_expert, None if b2 is None else b2.to(dtype))
        torch.ops._moe_C.moe_gather(y, rows, topk_weights_TS, place_TS, E)
    return y if out is None or out is y else out.copy_(y)


# ---------------------------------------------------------------------------------------------------------------------
# Quantised weights

_FP8_BLOCK = 128
_INT4_GROUPS = (32, 64, 128, 256)  # those that the grouped kernel was compiled for
_trials: dict[tuple[object, ...], bool] = {}


def pack_quantized_weight(weight: QuantizedWeight, exact: bool = False) -> QuantizedWeight:
    """As the kernels read it, its kind "xpu"; the same object where they have nothing for it, or where what they have
    fails with the first weight of its form: other kernels read plain ones. It waits for the device."""
    if weight.kind != "plain" or weight.dtype not in _HALF:
        return weight
    packed = _packed_linear(weight) if weight.codes.dim() == 2 else _packed_experts(weight)
    return weight if packed is None or not _passes(packed, weight) else packed


def unpack_quantized_weight(weight: QuantizedWeight) -> QuantizedWeight:
    """The plain weight again, its int4 scales rounded to its dtype; a plain one as it is."""
    if weight.kind == "plain":
        return weight
    codes, scales, zeros = weight.codes, weight.scales, weight.zeros
    assert scales is not None
    if weight.format == "fp8":
        codes = codes.contiguous()
        if scales.dim() == 1:
            scales = scales[:, None, None].expand(-1, weight.N, 1)
        elif codes.dim() == 3 or weight.group_size < weight.K:
            scales = scales.transpose(-1, -2).repeat_interleave(_FP8_BLOCK, dim=-2)
    elif weight.format == "mxfp4":
        scales = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)
    elif codes.dim() == 3:
        codes = codes ^ 0x88
    elif zeros is not None:
        zeros = ((zeros[:, :, None] >> _nibbles(zeros.device)) & 15).to(torch.uint8).flatten(1).t()
    return dataclasses.replace(weight, codes=codes, scales=scales, zeros=zeros, kind="plain")


def _nibbles(device: torch.device) -> Tensor:
    return torch.arange(0, 32, 4, dtype=torch.int32, device=device)


def _scales_of_int4(weight: QuantizedWeight) -> Tensor | None:
    """In the weight's dtype, which the kernels read: bfloat16 may round them, float16 must hold them."""
    assert weight.scales is not None
    scales = weight.scales.to(weight.dtype)
    exact = weight.dtype is torch.bfloat16 or torch.equal(scales.float(), weight.scales.float())
    return scales if exact else None


def _same(scales: Tensor) -> Tensor | None:
    """[..., rows, groups] -> [..., groups] where all rows have the same."""
    return scales[..., 0, :] if torch.equal(scales, scales[..., :1, :].expand_as(scales)) else None


def _scales_of_blocks(weight: QuantizedWeight) -> Tensor | None:
    """float32 [(E,) K / 128, N / 128] where the rows of a block have the same."""
    assert weight.scales is not None
    if min(weight.group_size, weight.K) != _FP8_BLOCK or weight.K % _FP8_BLOCK or weight.N % _FP8_BLOCK:
        return None
    scales = _same(weight.scales.float().unflatten(-2, (-1, _FP8_BLOCK)))
    return None if scales is None else scales.transpose(-1, -2).contiguous()


def _packed_linear(weight: QuantizedWeight) -> QuantizedWeight | None:
    N, K, zeros = weight.N, weight.K, weight.zeros
    codes, scales = weight.codes.contiguous(), None
    if weight.format == "int4" and weight.activations is None and not (N % 8 or K % 8 or K % min(weight.group_size, K)):
        scales = _scales_of_int4(weight)
        if zeros is not None:
            if bool(((zeros < 0) | (zeros > 15)).any()):
                return None
            eight = (
                zeros.t().int().unflatten(1, (-1, 8))
            )  # the kernel reads them as eight neighbouring rows' of a group
            zeros = (eight << _nibbles(zeros.device)).sum(-1, dtype=torch.int32)
        scales = None if scales is None else scales.t().contiguous().t()
    elif weight.format == "fp8" and weight.activations in (None, "fp8"):
        assert weight.scales is not None
        of_rows = weight.group_size >= K
        scales = weight.scales.float().contiguous() if of_rows else _scales_of_blocks(weight)
    if scales is None:
        return None
    return dataclasses.replace(weight, codes=codes, scales=scales, zeros=zeros, kind="xpu")


def _packed_experts(weight: QuantizedWeight) -> QuantizedWeight | None:
    N, K, group, codes, scales = weight.N, weight.K, min(weight.group_size, weight.K), weight.codes, weight.scales
    middle = FORMATS[weight.format].zero
    moved = weight.zeros is not None and bool((weight.zeros != middle).any())
    if weight.activations is not None or moved or weight.input_order is not None or N % 8 or not weight.E:
        return None
    assert scales is not None
    if weight.format == "int4" and group in _INT4_GROUPS and K % group == 0:
        codes, scales = codes ^ 0x88, _scales_of_int4(weight)  # two's complement, whose zero is 0
    elif weight.format == "mxfp4" and group == 32 and K % 32 == 0:
        mantissa, exponent = torch.frexp(scales.float())
        code = exponent + 126
        if not bool(((mantissa == 0.5) & (code > 0) & (code < 255)).all()):
            return None
        scales = code.to(torch.uint8)
    elif weight.format == "fp8":
        codes = codes.transpose(1, 2).contiguous().transpose(1, 2)
        of_experts = _same(scales.float()) if weight.group_size >= K else None
        scales = _scales_of_blocks(weight) if of_experts is None else of_experts[:, 0]
    else:
        return None
    if scales is None:
        return None
    codes = codes if weight.format == "fp8" else codes.contiguous()
    return dataclasses.replace(weight, codes=codes, scales=scales.contiguous(), zeros=None, kind="xpu")


def _passes(packed: QuantizedWeight, plain: QuantizedWeight) -> bool:
    """Whether the kernel for this form multiplies as plain torch does: asked of the first weight of each, because a
    kernel that takes other scales than it was written for, or does not exist on this card, shows in nothing else."""
    device, experts = plain.codes.device, plain.codes.dim() == 3
    assert packed.scales is not None
    form = (
        experts, plain.format, plain.group_size >= plain.K, plain.group_size, plain.dtype, plain.activations,
        plain.zeros is None, packed.scales.dim(), device,
    )  # fmt: skip
    if form in _trials:
        return _trials[form]
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(2, plain.K, generator=generator, device="cpu").to(device, plain.dtype)
    try:
        if experts:
            ends = [0, plain.E - 1]
            counts = torch.zeros(plain.E, dtype=torch.int32, device=device)
            for e in ends:
                counts[e] += 1
            got = torch.empty(2, plain.N, dtype=plain.dtype, device=device)
            _grouped(packed, x, got, counts)
            right = torch.cat([reference.quantized_linear(x[i : i + 1], plain.rows(e)) for i, e in enumerate(ends)])
        else:
            some = torch.arange(plain.N, device=device)[:: max(plain.N // 512, 1)]
            got = quantized_linear(x, packed)[:, some]
            right = reference.quantized_linear(x, plain.rows(some))
        off = float((got.double() - right.double()).abs().max()) / max(float(right.abs().max()), 1e-30)
        wrong = None if off <= 2**-6 else f"it is off by {off:.2g} of the largest"
    except RuntimeError as error:
        wrong = str(error)
    if wrong is not None:
        what = "experts" if experts else "a linear layer"
        logger.warning(
            "vllm-xpu-kernels' product of %s in %s, groups of %d, fails its trial: %s; weights of this form stay plain",
            what, plain.format, plain.group_size, wrong,
        )  # fmt: skip
    _trials[form] = wrong is None
    return wrong is None


def _fp8_codes(weight: QuantizedWeight) -> Tensor:
    return weight.codes.view(torch.float8_e4m3fn).transpose(-1, -2)


@functools.cache
def _middle(device: torch.device) -> Tensor:
    return torch.full((1,), 8, dtype=torch.int8, device=device)


def quantized_linear(
    x_TK: Tensor, weight: QuantizedWeight, bias_N: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    if weight.kind != "xpu":
        raise NotImplementedError(f"{weight.format} of kind {weight.kind}, groups of {weight.group_size}")
    dtype, K, scales = x_TK.dtype, weight.K, weight.scales
    if out is not None and out.dtype is not dtype:
        raise NotImplementedError(f"sums in {out.dtype} of inputs in {dtype}: the kernels round them")
    assert scales is not None
    if not x_TK.shape[0]:
        return x_TK.new_empty(0, weight.N) if out is None else out
    x_TK = x_TK.contiguous()  # the kernels make their result's strides from x's
    if weight.format == "int4":
        codes, zeros = (
            weight.codes.view(torch.int32).t(),
            _middle(x_TK.device) if weight.zeros is None else weight.zeros,
        )
        group = min(weight.group_size, K)
        order = weight.input_order
        y = torch.ops._xpu_C.int4_gemm_w4a16(x_TK, codes, bias_N, scales.t(), zeros, group, order)
    else:
        if weight.input_order is not None:
            x_TK = x_TK.index_select(1, weight.input_order)
        blocks = weight.group_size < K
        of_rows = scales if blocks else scales.flatten()
        if weight.activations is None:
            y = torch.ops._xpu_C.fp8_gemm_w8a16(x_TK, _fp8_codes(weight), of_rows, bias_N)
        else:
            on_grid, grid = grids(x_TK, weight.activations)
            if blocks:  # a row's scale once for each of its blocks
                grid = grid.expand(-1, scales.shape[0]).contiguous()
            on_grid = on_grid.to(torch.float8_e4m3fn)
            y = torch.ops._xpu_C.fp8_gemm(on_grid, _fp8_codes(weight), dtype, grid, of_rows, bias_N)
    return y if out is None else out.copy_(y)


def _grouped(
    weight: QuantizedWeight, rows: Tensor, result: Tensor, rows_per_expert: Tensor, bias: Tensor | None = None
) -> None:
    E, N, K, codes = weight.E, weight.N, weight.K, weight.codes
    if weight.format == "fp8":
        codes = _fp8_codes(weight)
    else:
        codes = codes.view(torch.int8 if weight.format == "int4" else torch.float4_e2m1fn_x2)
    gemm = torch.ops._xpu_C.cutlass_grouped_gemm_interface
    gemm(rows, None, codes, weight.scales, bias, result, rows_per_expert, N, K, E)


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
    """As ``fused_experts``; a number of experts to a token that has no kernel is filled up with skipped ones."""
    S = topk_ids_TS.shape[1]
    filled = min((n for n in _TOP_K if n >= S), default=None)
    if w13.kind != "xpu" or w2.kind != "xpu" or filled is None:
        raise NotImplementedError(f"experts in {w13.format} of kinds {w13.kind} and {w2.kind}, {S} to a token")
    if filled > S:
        topk_ids_TS = F.pad(topk_ids_TS, (0, filled - S), value=PAD_EXPERT)
        topk_weights_TS = F.pad(topk_weights_TS, (0, filled - S))

    def product(second: bool, rows: Tensor, result: Tensor, rows_per_expert: Tensor, bias: Tensor | None) -> None:
        _grouped(w2 if second else w13, rows, result, rows_per_expert, bias)

    return _through_experts(x_TD, w13.E, w2.K, product, topk_ids_TS, topk_weights_TS, out, b13, b2, activation)


# ---------------------------------------------------------------------------------------------------------------------
# Gated delta net


def zeroed_state(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """[S, H, D, E] over memory in the kernel's order [S, H, E, D]."""
    S, H, D, E = shape
    return torch.zeros(S, H, E, D, dtype=dtype).transpose(2, 3)


def gdn_attention(
    x_TN: Tensor,
    weights: GDNWeights,
    conv_state: Tensor,
    recurrent_state: Tensor,
    query_start_loc: Tensor,
    state_indices: Tensor,
    query_start_loc_cpu: Tensor,
) -> tuple[Tensor, Tensor]:
    """Convolution and delta rule: (core [T, H, E], z [T, H, E]), rows past the real ones exactly 0 in both.

    The kernel leaves rows that belong to no request as they were in core and writes garbage to them in z; given more
    rows than query_start_loc covers it counts them to the last request, whose convolution state it then overwrites.
    So it is given views that end with the last real row and the last request that has rows. Up to version 0.1.8 it
    asserts ``core.size(0) == num_actual_tokens``, which holds for these views. Its pad slot is -1.

    States were cleared when their requests began, so every request continues one (``has_initial_state`` all True).
    """
    starts, slots = with_rows(query_start_loc_cpu, query_start_loc, state_indices)
    num_reqs, real = slots.shape[0], int(query_start_loc_cpu[-1])
    _, H, D, E = recurrent_state.shape
    own_state = recurrent_state.transpose(2, 3)
    if not own_state.is_contiguous():
        raise NotImplementedError(
            f"recurrent states of shape {tuple(recurrent_state.shape)} with strides {recurrent_state.stride()}: the "
            "kernel keeps a head's state as [value size, key size], as kernels.xpu.zeroed_state makes the pool"
        )
    core, z = (torch.empty(x_TN.shape[0], H, E, dtype=x_TN.dtype, device=x_TN.device) for _ in range(2))
    if num_reqs:
        only_decodes = real == num_reqs
        qkvz, ba = x_TN[:real].split([x_TN.shape[1] - 2 * H, 2 * H], dim=-1)
        torch.ops._xpu_C.gdn_attention(
            core[:real],
            z[:real],
            qkvz.contiguous(),
            ba.contiguous(),
            weights.num_k_heads,
            H,
            D,
            E,
            conv_state=conv_state,
            ssm_state=own_state,
            conv_weights=weights.conv_weight_CK.to(x_TN.dtype),
            conv_bias=None,
            activation="silu",
            A_log=weights.log_decay_rate_H,
            dt_bias=weights.dt_bias_H,
            num_prefills=0 if only_decodes else num_reqs,
            num_decodes=num_reqs if only_decodes else 0,
            num_spec_decodes=0,
            has_initial_state=torch.ones(num_reqs, dtype=torch.bool, device=x_TN.device),
            non_spec_query_start_loc=starts,
            non_spec_token_indx=None,
            non_spec_state_indices_tensor=slots.masked_fill(slots == PAD_STATE_SLOT, -1),
            spec_query_start_loc=None,
            spec_token_indx=None,
            spec_state_indices_tensor=None,
            num_accepted_tokens=None,
            num_actual_tokens=real,
            tp_size=1,
            reorder_input=True,
        )
        pad = (slots == PAD_STATE_SLOT).repeat_interleave(starts.diff(), output_size=real)
        for rows in (core[:real], z[:real]):
            rows.masked_fill_(pad[:, None, None], 0)
    core[real:] = 0
    z[real:] = 0
    return core, z


def gated_delta_net(
    x_TN: Tensor,
    weights: GDNWeights,
    conv_state: Tensor,
    recurrent_state: Tensor,
    query_start_loc: Tensor,
    state_indices: Tensor,
    query_start_loc_cpu: Tensor | None = None,
) -> Tensor:
    host = query_start_loc.cpu() if query_start_loc_cpu is None else query_start_loc_cpu
    core, z = gdn_attention(x_TN, weights, conv_state, recurrent_state, query_start_loc, state_indices, host)
    out = rms_norm_gated_ref(core.float(), z, weights.norm_weight_E, weights.eps)
    return out.to(x_TN.dtype).flatten(1)
