# SPDX-License-Identifier: Apache-2.0
"""A quick check of each operator: one small case on the device against plain torch, before the table takes a kernel.

A kernel that does not compile on this card, or whose package has other habits than it was written for, then shows at
the start and not in an answer. The cases have pad rows, a request without rows and unwritten cache slots, all NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vllm.kernels import reference, weights
from vllm.kernels.padding import NULL_BLOCK, PAD_EXPERT, PAD_SLOT, PAD_STATE_SLOT
from vllm.kernels.quantized import QuantizedWeight
from vllm.kernels.weights import GDNWeights, PackedExperts

NAN = float("nan")
DTYPE = torch.bfloat16
TOLERANCE = 3e-2  # a few roundings of bfloat16 at magnitudes about 1
ROWS, REAL = 9, 7


def failure(
    operator: str, function: Callable[..., Any], device_type: str, module: Any = None, fp8_cache: bool = False
) -> str | None:
    """What ``function`` of ``module`` does wrong as ``operator`` on a device of this type, None where nothing is.
    ``fp8_cache``: in its case of a float8 cache."""
    case = (_FP8_CACHE if fp8_cache else _CASES)[operator]
    with torch.device(device_type):
        given, right = in_order_of(module, case(device_type)), case(device_type)
    expected = _results(getattr(reference, operator)(*right), right)
    try:
        got = _results(function(*given), given)
    except Exception as error:  # a kernel that cannot run may raise anything, and the next in the table is taken
        return f"{type(error).__name__}: {error}"
    for number, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        bound = TOLERANCE * (1 + theirs.abs()) if theirs.is_floating_point() else 0
        off = (ours - theirs).abs() > bound
        off |= (ours.isnan() != theirs.isnan()) | (ours.isinf() != theirs.isinf())
        if off.any():
            return f"tensor {number} of its result is wrong in {int(off.sum())} of {off.numel()} elements"
    return None


def in_order_of(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """``args``, those with an order of memory that an implementation may choose in that of ``module``."""

    def ordered(x: Any) -> Any:
        if isinstance(x, PackedExperts) and hasattr(module, "pack_expert_weights") and x.kind == "plain":
            return module.pack_expert_weights(x.data, x.gated)
        if isinstance(x, QuantizedWeight) and hasattr(module, "pack_quantized_weight"):
            return module.pack_quantized_weight(x)
        if isinstance(x, Tensor) and x.dim() == 4:
            make = getattr(module, "zeroed_state" if x.dtype is torch.float32 else "zeroed_cache", None)
            return x if make is None else make(tuple(x.shape), x.dtype).copy_(x)
        return x

    return tuple(ordered(x) for x in args)


def _results(out: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """All that an operator can have written, its result and its arguments, on the host, numbers in fp64."""
    outs = out if isinstance(out, tuple) else (out,)
    found = (x.cpu() for x in (*outs, *args) if isinstance(x, Tensor))
    return [x.double() if x.is_floating_point() else x for x in found]


def _randn(device: str, *shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device="cpu").to(device, dtype)


def _ints(device: str, values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def _pads(x: Tensor) -> Tensor:
    x[REAL:] = NAN
    return x


def _paged(device: str) -> tuple[Any, ...]:
    """Requests of 4, 0 and 3 rows over 20, 0 and 3 tokens in blocks of 16."""
    J, D, block_size = 2, 64, 16
    keys, values = (_randn(device, 5, J, block_size, D) for _ in range(2))
    for cache in (keys, values):
        cache[NULL_BLOCK] = NAN
        cache[2, :, 4:], cache[3, :, 3:], cache[4] = NAN, NAN, NAN
    out = torch.full((ROWS, 4, D), NAN, dtype=DTYPE, device=device)
    return (
        _pads(_randn(device, ROWS, 4, D)), keys, values, _ints(device, [[1, 2], [NULL_BLOCK, NULL_BLOCK], [3, 0]]),
        _ints(device, [0, 4, 4, 7]), _ints(device, [20, 0, 3]), 0.125, out,
    )  # fmt: skip


def _cached(device: str) -> tuple[Any, ...]:
    keys, values = (torch.full((4, 2, 16, 64), NAN, dtype=DTYPE, device=device) for _ in range(2))
    slots = _ints(device, [16, 17, 40, 63, 62, 20, 33, PAD_SLOT, PAD_SLOT], torch.int64)
    return _pads(_randn(device, ROWS, 2, 64)), _pads(_randn(device, ROWS, 2, 64)), keys, values, slots


def _with_codes(case: Callable[[str], tuple[Any, ...]], rest: tuple[Any, ...]) -> Callable[[str], tuple[Any, ...]]:
    """The same with float8 caches and, at the end, scales: small enough for values that are cut off."""

    def coded(device: str) -> tuple[Any, ...]:
        args = (x.to(torch.float8_e4m3fn) if isinstance(x, Tensor) and x.dim() == 4 else x for x in case(device))
        return (*args, *rest)

    return coded


def _experts(device: str) -> tuple[Any, ...]:
    E, D, inner = 4, 64, 32
    w13 = weights.pack_expert_weights(_randn(device, E, 2 * inner, D) / 8, gated=True)
    w2 = weights.pack_expert_weights(_randn(device, E, D, inner) / 8)
    b13, b2 = _randn(device, E, 2 * inner).float() / 4, _randn(device, E, D).float() / 4
    return (*_chosen(device, w13, w2, D), None, b13, b2, "swigluoai")


def _chosen(device: str, w13: Any, w2: Any, D: int) -> tuple[Any, ...]:
    """Rows of D columns that chose two of four experts, or one, or none."""
    ids = _ints(device, [[0, 2], [PAD_EXPERT, 1], [2, 0], [2, 3], [0, PAD_EXPERT], [3, 2], [2, 0]])
    ids = torch.cat([ids, torch.full_like(ids[:2], PAD_EXPERT)])
    shares = _randn(device, ROWS, 2, dtype=torch.float32).abs()
    shares[ids < 0] = NAN
    return _pads(_randn(device, ROWS, D)), w13, w2, ids, shares


def _delta_net(device: str) -> tuple[Any, ...]:
    G, H, D, E, K = 2, 4, 64, 64, 4
    C, slots = 2 * G * D + H * E, 4

    def small(*shape: int) -> Tensor:
        return _randn(device, *shape, dtype=torch.float32) / 4

    of = GDNWeights(small(K, C), small(H).exp(), small(H + 1)[1:].contiguous(), small(E), 1e-6, G, D)
    conv, state = _randn(device, slots, K - 1, C), small(slots, H, D, E)
    conv[PAD_STATE_SLOT], state[PAD_STATE_SLOT], conv[3], state[3] = NAN, NAN, NAN, NAN
    x = _pads(_randn(device, ROWS, C + H * E + 2 * H))
    starts = _ints(device, [0, 4, 7, 7])
    return x, of, conv, state, starts, _ints(device, [2, 1, PAD_STATE_SLOT]), starts.cpu()


def _rotated(device: str) -> tuple[Any, ...]:
    positions = _ints(device, [5, 6, 7, 8, 0, 1, 2, 0, 0], torch.int64)
    angles = torch.arange(16, device="cpu")[:, None] * torch.tensor([1.0] * 8 + [0.1] * 8, device="cpu")
    table = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
    return positions, _randn(device, ROWS, 4, 64), _randn(device, ROWS, 2, 64), table


def _slots(device: str) -> Tensor:
    return _ints(device, [*range(20, 20 + REAL), *[PAD_SLOT] * (ROWS - REAL)], torch.int64)


def _routed(device: str) -> tuple[Any, ...]:
    return _pads(_randn(device, ROWS, 16, dtype=torch.float32) * 3), 4, True, _slots(device)


def _linear(device: str) -> tuple[Any, ...]:
    return _randn(device, ROWS, 64) / 8, weights.pack_linear_weight(_randn(device, 32, 64))


def _int4(device: str, *shape: int, group_size: int, zeros: bool, gated: bool = False) -> QuantizedWeight:
    """Codes of all values; each group has a scale, and a zero, of its own."""
    *experts, N, K = shape
    generator = torch.Generator("cpu").manual_seed(sum(shape))
    of_groups = (*experts, N, K // group_size)
    codes = torch.randint(256, (*experts, N, K // 2), generator=generator, device="cpu").to(device, torch.uint8)
    scales = (_randn(device, *of_groups).abs() + 0.5) * (K**-0.5 / 4)
    low = torch.randint(5, 12, of_groups, generator=generator, device="cpu").to(device, torch.uint8)
    return QuantizedWeight(
        "int4", N, K, group_size, DTYPE, codes, scales, low if zeros else None, gated=gated
    )  # fmt: skip


def _quantized_linear(device: str) -> tuple[Any, ...]:
    x = _randn(device, ROWS, 64)
    x[1] = NAN  # which is nobody else's
    return x, _int4(device, 32, 64, group_size=32, zeros=True), _randn(device, 32)


def _quantized_experts(device: str) -> tuple[Any, ...]:
    E, D, inner = 4, 128, 128
    w13 = _int4(device, E, 2 * inner, D, group_size=128, zeros=False, gated=True)
    return _chosen(device, w13, _int4(device, E, D, inner, group_size=128, zeros=False), D)


def _logits(device: str) -> Tensor:
    return _randn(device, ROWS, 300, dtype=torch.float32) * 2


def _penalised(device: str) -> tuple[Any, ...]:
    """The first and the third row have seen tokens."""
    starts, tokens = [0, 3, 3] + [8] * (ROWS - 2), [299, 0, 7, 1, 2, 3, 4, 298]
    counts, rates = _ints(device, [0, 1, 2, 3, 0, 1, 0, 1], torch.float32), torch.linspace(0.5, 2, ROWS, device=device)
    return _logits(device), _ints(device, starts), _ints(device, tokens, torch.int64), counts, rates, rates - 1, rates


def _sampled(device: str) -> tuple[Any, ...]:
    """Greedy rows, rows of all limits and of none, a NaN row."""
    logits = _logits(device)
    logits[5] = NAN
    rows = _ints(device, range(ROWS), torch.int64)
    top_k, by_row = torch.where(rows % 3 == 0, 300, 40 + rows), rows.float()
    limits = top_k, torch.where(rows % 4 == 0, 1.0, 0.8), torch.where(rows % 2 == 0, -torch.inf, -3.0)
    return logits, *reference.row_max(logits), (by_row / 3).floor() / 2, 7 * rows - 9, rows + 3, *limits


_CASES: dict[str, Callable[[str], tuple[Any, ...]]] = {
    "linear": _linear,
    "embedding": lambda d: (_ints(d, [8, 5, 36, 4, 37], torch.int64), _linear(d)[1], (5, 37)),
    "quantized_linear": _quantized_linear,
    "quantized_experts": _quantized_experts,
    "quantized_embedding": lambda d: (_ints(d, [8, 5, 36, 4, 37], torch.int64), _quantized_linear(d)[1], (5, 37)),
    "rms_norm": lambda d: (_randn(d, ROWS, 3, 64), _randn(d, 64), 1e-6),
    "fused_add_rms_norm": lambda d: (_randn(d, ROWS, 64), _randn(d, ROWS, 64) + 1, _randn(d, 64), 1e-6),
    "silu_and_mul": lambda d: (_randn(d, ROWS, 128),),
    "gelu_tanh_and_mul": lambda d: (_randn(d, ROWS, 128),),
    "sigmoid_gate": lambda d: (_randn(d, ROWS, 3, 64), _randn(d, ROWS, 3, 64)),
    "rotary_embedding": _rotated,
    "reshape_and_cache": _cached,
    "paged_attention": _paged,
    "zero_padding_rows": lambda d: (_pads(_randn(d, ROWS, 3, 100)), _slots(d)),
    "topk_softmax": _routed,
    "topk_sigmoid": lambda d: (*_routed(d), _randn(d, 16, dtype=torch.float32) / 4),
    "grouped_topk": lambda d: (*_routed(d), 4, 2, 2, True, _randn(d, 16, dtype=torch.float32) / 4),
    "fused_experts": _experts,
    "gated_delta_net": _delta_net,
    "row_max": lambda d: (_logits(d),),
    "apply_penalties": _penalised,
    "sample": _sampled,
    "log_probabilities": lambda d: (_logits(d), 4, _ints(d, range(ROWS), torch.int64)),
}
_FP8_CACHE = {
    "reshape_and_cache": _with_codes(_cached, (0.5, 0.004)),
    "paged_attention": _with_codes(_paged, (0, None, None, 0.0, None, None, 0.5, 2.0)),
}
