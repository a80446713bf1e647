# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: PT018
"""Stand-ins for the kernels of vllm-xpu-kernels: operators of the recorded schemas, computed on the CPU with what is
documented of the kernels, unkind habits too: strides that they do not look at, rows that they leave unwritten, indices
that they follow out of bounds. On meta tensors they do nothing, so whatever reads a value raises."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from padding_slots import slots
from torch import Tensor

from vllm.kernels import reference, reference_gdn, xpu
from vllm.kernels.weights import GDNWeights

HALF = (torch.float16, torch.bfloat16)


def rms_norm(result: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    assert result.is_contiguous() and result.data_ptr() != x.data_ptr()
    assert x.stride(-1) == 1 and weight.is_contiguous()
    assert result.dtype is x.dtype is weight.dtype, "the kernel reads all three as one type"
    reference.rms_norm(x, weight, eps, result)


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    assert residual.is_contiguous() and x.stride(-1) == 1, "rows of the residual lie side by side"
    assert x.dtype is residual.dtype is weight.dtype, "the kernel reads all three as one type"
    reference.fused_add_rms_norm(x, residual, weight, eps, x)


def silu_and_mul(result: Tensor, x: Tensor) -> None:
    assert result.is_contiguous() and x.is_contiguous(), "the kernel knows no strides"
    reference.silu_and_mul(x, result)


def gelu_tanh_and_mul(result: Tensor, x: Tensor) -> None:
    assert result.is_contiguous() and x.is_contiguous(), "the kernel knows no strides"
    reference.gelu_tanh_and_mul(x, result)


def reshape_and_cache_flash(
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    kind: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """What the kernel makes of numbers beyond e4m3's is not known: NaN here."""
    assert kind in ("auto", "fp8") and k_scale.dtype is v_scale.dtype is torch.float32 and slots.dtype is torch.int64
    assert key_cache.dtype is (torch.uint8 if kind == "fp8" else k.dtype)
    assert k[0].is_contiguous() and v[0].is_contiguous(), "heads of a row lie side by side"
    assert key_cache.is_contiguous() and key_cache.shape[2:] == k.shape[1:]
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            for x, cache, scale in ((k, key_cache, k_scale), (v, value_cache, v_scale)):
                row = x[t]
                if kind == "fp8":
                    row = row.float() / scale
                    row = row.where(row.abs() <= 464, torch.nan).to(torch.float8_e4m3fn).view(torch.uint8)
                cache.view(-1, *k.shape[1:])[slot] = row


def varlen_fwd(*args: Any) -> list[Tensor]:
    (q, k, v, out, starts, cu_k, contexts, leftpad, table, alibi, max_q, max_k, dropout, *scales, scale, sink, _) = (
        args[:19]
    )
    causal, left, right, softcap, lse, _gen, _splits, mix_batch, per_seq, work = args[19:]
    coded = k.dtype is torch.float8_e4m3fn
    assert q.dtype in HALF and q.dtype is out.dtype and q.stride(-1) == 1
    assert k.dtype is v.dtype and (coded or k.dtype is q.dtype)
    assert starts.dtype is cu_k.dtype is contexts.dtype is table.dtype is torch.int32 and out.is_contiguous()
    assert len(starts) == len(cu_k) == len(contexts) + 1 and len(table) == len(contexts)
    assert causal and mix_batch and not lse and not softcap and not dropout and scales[0] is None
    assert [x is not None and x.shape == (len(contexts), k.shape[2]) for x in scales[1:]] == [coded] * 2
    assert leftpad is alibi is sink is per_seq is work is None
    H, D, (_, block_size, J, _) = q.shape[1], q.shape[2], k.shape
    if D == 576:
        assert H // J <= 8, f"{H} heads to one key head: not compiled"
        assert block_size % 64 == 0
        assert v.data_ptr() == k.data_ptr()
    if D == 112:
        raise RuntimeError("Paged decode kernel not compiled for this configuration.")
    if D == 120:
        raise RuntimeError("UR_RESULT_ERROR_DEVICE_LOST")
    for r, (first, end) in enumerate(itertools.pairwise(starts.tolist())):
        if end - first <= 1:  # taken for a decode, whether or not it has a row
            end = first + 1
        assert end <= len(out), f"row {first} of request {r} lies past the {len(out)} rows of the result"
        end = min(end, first + max_q)
        length = min(int(contexts[r]), max_k)
        position = torch.arange(length - (end - first), length)[:, None]
        at = torch.arange(length)
        seen = at <= position
        if left >= 0:
            assert right == 0
            seen &= at >= position - left
        keys, values = (c[table[r, at // block_size].long(), at % block_size].float() for c in (k, v))
        if coded:
            keys, values = (x * s[r][:, None] for x, s in zip((keys, values), scales[1:], strict=True))
        keys, values = (x.where(seen.any(0)[:, None, None], 0).transpose(0, 1) for x in (keys, values))
        keys, values = (x.repeat_interleave(H // J, 0) for x in (keys, values))
        o = F.scaled_dot_product_attention(q[first:end].transpose(0, 1).float(), keys, values, seen, scale=scale)
        out[first:end] = o.transpose(0, 1).to(out.dtype)
    return [out]


def topk_softmax(
    weights: Tensor, ids: Tensor, rows: Tensor, logits: Tensor, renormalize: bool, bias: Any, is_padding: Any
) -> None:
    assert logits.is_contiguous() and weights.is_contiguous() and ids.is_contiguous() and rows.is_contiguous()
    assert bias is is_padding is None and ids.dtype is rows.dtype is torch.int32 and weights.dtype is torch.float32
    assert not logits.isnan().any(), "a NaN makes one expert the choice many times"
    new_weights, new_ids = reference.topk_softmax(
        logits, weights.shape[1], renormalize, slots(len(logits), len(logits))
    )
    weights.copy_(new_weights)
    ids.copy_(new_ids)


def grouped_topk(
    scores: Tensor, groups: int, kept: int, top_k: int, renormalize: bool, scale: float, bias: Tensor, scoring: int
) -> tuple[Tensor, Tensor]:
    assert scores.is_contiguous() and bias.is_contiguous() and scoring == 1 and max(groups, top_k) <= 32
    assert not scores.isnan().any(), "a NaN makes one expert the choice many times"
    weights, ids = reference.grouped_topk(
        scores, top_k, renormalize, slots(len(scores), len(scores)), groups, kept, 2, True, bias
    )
    return weights * scale, ids


def remap_hidden_states(
    x: Tensor, scales: Any, rows: Tensor, row_scales: Any, table: Tensor | None, counts: Tensor, place: Tensor,
    ids: Tensor, total: int, local: int,
) -> None:  # fmt: skip
    assert scales is row_scales is None and x.is_contiguous() and ids.is_contiguous() and counts.dtype is torch.int32
    assert rows.shape == (ids.numel(), x.shape[1]) and len(counts) == local and not counts.any()
    if table is not None:
        assert table.dtype is torch.int32 and len(table) == total
        if int(ids.min()) < 0 or int(ids.max()) >= total:
            raise IndexError(f"ids {ids.min()} to {ids.max()} are read out of a table of {total}")
    experts = table[ids.long()] if table is not None else ids.clamp(min=0)  # without a table -1 is expert 0
    at = 0
    place.fill_(-1)
    for e in range(local):
        for t, s in (experts == e).nonzero().tolist():
            rows[at], place[t, s] = x[t], at
            counts[e] += 1
            at += 1


def cutlass_grouped_gemm_interface(
    A: Tensor, a_scale: Any, B: Tensor, b_scale: Any, bias: Any, out: Tensor, counts: Tensor, N: int, K: int, E: int
) -> Tensor:
    assert a_scale is None and A.dtype in HALF and A.dtype is out.dtype and N % 8 == 0
    assert B.is_contiguous() and A.is_contiguous() and out.is_contiguous() and A.shape[1] == K and out.shape[1] == N
    assert bias is None or (bias.shape == (E, N) and bias.is_contiguous() and bias.dtype is A.dtype)
    if b_scale is None:
        assert B.shape == (E, K, N) and A.dtype is B.dtype
    else:
        B = dequantised(B, b_scale, A.dtype, N, K, E)
    at = 0
    for e, count in enumerate(counts.tolist()):
        y = A[at : at + count].float() @ B[e].float()
        out[at : at + count] = (y if bias is None else y + bias[e].float()).to(out.dtype)
        at += count
    return out


def dequantised(B: Tensor, scale: Tensor, dtype: torch.dtype, N: int, K: int, E: int) -> Tensor:
    """[E, K, N] float32, scales read as they ought to lie in memory."""
    assert scale.is_contiguous()
    if B.dtype is torch.float8_e4m3fn:
        assert B.shape == (E, K, N) and scale.dtype is torch.float32
        if scale.dim() == 1:
            return B.float() * scale.view(E, 1, 1)
        assert scale.shape == (E, K // 128, N // 128) and K % 128 == N % 128 == 0
        return B.float() * scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
    assert B.shape == (E, N, K // 2) and scale.shape[:2] == (E, N)
    group = K // scale.shape[2]
    assert group * scale.shape[2] == K and group in (32, 64, 128, 256)
    codes = B.view(torch.uint8).long()
    codes = torch.stack((codes & 15, codes >> 4), -1).flatten(2)
    if B.dtype is torch.int8:  # two's complement of four bits
        assert scale.dtype is dtype, "the kernel reads scales of the rows' type"
        values, scales = torch.where(codes > 7, codes - 16, codes).float(), scale.float()
    else:
        assert B.dtype is torch.float4_e2m1fn_x2 and scale.dtype is torch.uint8
        values = torch.where(codes > 7, -1.0, 1.0) * torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7]
        scales = (scale.int() << 7).to(torch.uint16).view(torch.bfloat16).float()
    return (values * scales.repeat_interleave(group, 2)).transpose(1, 2)


def int4_gemm_w4a16(
    A: Tensor, B: Tensor, bias: Tensor | None, scale: Tensor, zeros: Tensor, group: int, g_idx: Tensor | None
) -> Tensor:
    """Eight zeros of four bits, of neighbouring columns of the result, in a number."""
    K, N = A.shape[1], B.shape[1]
    assert A.dtype in HALF and A.is_contiguous() and B.dtype is torch.int32
    A = A if g_idx is None else A.index_select(1, g_idx)
    assert B.shape == (K // 8, N) and B.stride() == (1, K // 8) and K % group == 0
    assert scale.shape == (K // group, N) and scale.is_contiguous() and scale.dtype in HALF
    assert bias is None or (bias.dtype is A.dtype and bias.shape == (N,))
    shifts = torch.arange(0, 32, 4)
    codes = ((B.t()[:, :, None] >> shifts) & 15).flatten(1).float()
    if zeros.dim() == 1:
        assert zeros.dtype is torch.int8 and zeros.tolist() == [8]
        of_groups = torch.full((K // group, N), 8.0)
    else:
        assert zeros.dtype is torch.int32 and zeros.shape == (K // group, N // 8) and zeros.is_contiguous()
        of_groups = ((zeros[:, :, None] >> shifts) & 15).flatten(1).float()
    w = (codes - of_groups.T.repeat_interleave(group, 1)) * scale.float().T.repeat_interleave(group, 1)
    return _rounded(A.float() @ w.T, bias, A.dtype)


def _rounded(y: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (y if bias is None else y + bias.float()).to(dtype)


def _fp8_weight(B: Tensor, scale: Tensor) -> Tensor:
    assert B.dtype is torch.float8_e4m3fn and B.stride() == (1, B.shape[0])
    assert scale.dtype is torch.float32 and scale.is_contiguous()
    if scale.dim() == 2 and scale.shape[0] > 1:
        block = B.shape[0] // scale.shape[0]
        assert (block * scale.shape[0], block * scale.shape[1]) == B.shape, "blocks are as wide as they are high"
        return B.float() * scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
    assert scale.numel() in (1, B.shape[1])
    return B.float() * scale.view(1, -1)


def fp8_gemm_w8a16(A: Tensor, B: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    assert A.dtype in HALF and A.is_contiguous()
    return _rounded(A.float() @ _fp8_weight(B, scale), bias, A.dtype)


def fp8_gemm(A: Tensor, B: Tensor, dtype: torch.dtype, a_scale: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """A weight's scales are those of blocks only where the rows have one for each block, too."""
    assert A.dtype is torch.float8_e4m3fn and A.is_contiguous() and dtype in HALF
    assert a_scale.dtype is torch.float32 and a_scale.is_contiguous()
    if a_scale.dim() == 2 and a_scale.shape[1] > 1:
        assert a_scale.shape == (len(A), scale.shape[0])
        x = A.float() * a_scale.repeat_interleave(A.shape[1] // scale.shape[0], 1)
    else:
        assert a_scale.numel() in (1, len(A)) and scale.numel() in (1, B.shape[1])
        x = A.float() * a_scale.view(-1, 1)
    return _rounded(x @ _fp8_weight(B, scale), bias, dtype)


def moe_gather(out: Tensor, rows: Tensor, weights: Tensor, place: Tensor, num_experts: int) -> None:
    assert out.is_contiguous() and weights.is_contiguous() and weights.dtype is torch.float32
    for t in range(len(out)):
        used = [(rows[at].float() * weights[t, s]) for s, at in enumerate(place[t].tolist()) if at != -1]
        out[t] = sum(used, start=torch.zeros(out.shape[1])).to(out.dtype)


def gdn_attention(*args: Any) -> None:
    """Rows that query_start_loc does not cover but num_actual_tokens counts are taken for the last request's; z is
    garbage past the covered rows, core is left as it was. States are [H, E, D]; slot -1 is skipped."""
    core, z, qkvz, ba, G, H, D, E, conv_state, state, taps, bias, act, A_log, dt_bias, prefills, decodes, spec = args[
        :18
    ]
    initial, starts, _, slots, _, _, _, _, rows, tp_size, reorder = args[18:]
    assert qkvz.is_contiguous() and ba.is_contiguous() and taps.is_contiguous() and slots.is_contiguous()
    assert bias is None and act == "silu" and spec == 0 and tp_size == 1 and reorder
    assert state.shape[1:] == (H, E, D), f"states are {state.shape}, the kernel keeps [{H}, {E}, {D}]"
    assert prefills + decodes == len(slots) == len(starts) - 1 == len(initial) and bool(initial.all())
    assert core.shape[0] == rows, f"core has {core.shape[0]} rows, num_actual_tokens={rows}"
    starts = starts.clone()
    covered = int(starts[-1])
    starts[-1] = rows
    w = GDNWeights(taps.T.float().contiguous(), A_log.exp(), dt_bias, torch.ones(E), 1e-6, G, D)
    mixed, gate, b, a = w.split(torch.cat([qkvz, ba], dim=1)[:rows])
    # The twin skips slot 0, the kernel -1: by one more slot in front, its 0 is as good as any.
    slots, (conv, own) = slots + 1, (torch.cat([pool[:1], pool]) for pool in (conv_state, state.transpose(2, 3)))
    y = reference_gdn.causal_conv1d_ref(mixed, w.conv_weight_KC, conv, starts, slots)
    q, k, v = y.split([G * D, G * D, w.value_dim], dim=-1)
    g = -w.decay_rate_H * F.softplus(a.float() + w.dt_bias_H)
    heads = (q.unflatten(-1, (G, D)), k.unflatten(-1, (G, D)), v.unflatten(-1, (H, -1)))
    out = reference_gdn.gated_delta_rule_ref(*heads, g, b.float().sigmoid(), own, starts, slots)
    conv_state.copy_(conv[1:])
    state.transpose(2, 3).copy_(own[1:])
    written = torch.repeat_interleave(slots != 0, starts.diff())
    written[covered:] = False
    core[written] = out[written].to(core.dtype)
    z[:] = float("nan")
    z[:covered] = gate[:covered]


_MADE: tuple[Callable[..., Any], ...] = (
    rms_norm, fused_add_rms_norm, silu_and_mul, gelu_tanh_and_mul, reshape_and_cache_flash, varlen_fwd, topk_softmax,
    grouped_topk, remap_hidden_states, cutlass_grouped_gemm_interface, int4_gemm_w4a16, fp8_gemm_w8a16,
    fp8_gemm, moe_gather, gdn_attention,
)  # fmt: skip


_OF_META: dict[str, Callable[..., Any]] = {
    "varlen_fwd": lambda *args: [args[3]],
    "cutlass_grouped_gemm_interface": lambda *args: args[5],
    "grouped_topk": lambda x, _, __, k, *___: (x.new_empty(len(x), k).float(), x.new_empty(len(x), k).int()),
    "int4_gemm_w4a16": lambda A, B, *_: A.new_empty(len(A), B.shape[1]),
    "fp8_gemm_w8a16": lambda A, B, *_: A.new_empty(len(A), B.shape[1]),
    "fp8_gemm": lambda A, B, dtype, *_: A.new_empty(len(A), B.shape[1], dtype=dtype),
}


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """``torch.ops`` has the stand-ins."""
    made = {function.__name__: function for function in _MADE}
    with contextlib.ExitStack() as stack:
        libraries: dict[str, Any] = {}
        for kernel, schema in xpu.recorded()["schemas"].items():
            namespace, name = kernel.split(".")
            if namespace not in libraries:
                libraries[namespace] = stack.enter_context(torch.library._scoped_library(namespace, "FRAGMENT"))
            library = libraries[namespace]
            library.define(name + schema)
            library.impl(name, made[name], "CPU")
            library.impl(name, _OF_META.get(name, lambda *args: None), "Meta")
        yield
