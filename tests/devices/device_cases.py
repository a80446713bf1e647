# SPDX-License-Identifier: Apache-2.0
"""Arguments of every operator at the sizes of real models: ragged, padded, with NaN wherever nothing may be read.

A case gives the same values on any device and in fp64, so that its exact result is the plain torch operator's on the
CPU in fp64.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from device_suite import Sizes
from padding_slots import slots
from torch import Tensor

from vllm.kernels import reference, reference_gdn, weights
from vllm.kernels.blocks import UNITS
from vllm.kernels.padding import NULL_BLOCK, PAD_EXPERT, PAD_SLOT, PAD_STATE_SLOT
from vllm.kernels.quantized import FORMATS, QuantizedWeight
from vllm.kernels.weights import GDNWeights, PackedExperts, PackedWeight

NAN = float("nan")
FP8 = torch.float8_e4m3fn


@functools.lru_cache(maxsize=4)
def _noise(shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, generator=generator, device="cpu")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where and how a case is built; ``packer`` is the module whose layout the weights take."""

    sizes: Sizes
    device: str
    dtype: torch.dtype
    packer: Any = weights

    def randn(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        return (_noise(shape) * scale).to(dtype or self.dtype).to(self.device)

    def ints(self, values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device="cpu").to(self.device)

    def full(self, *shape: int) -> Tensor:
        """Memory that nobody has written."""
        return torch.full(shape, NAN, dtype=self.dtype, device=self.device)

    def padded(self, x: Tensor) -> Tensor:
        x[self.sizes.rows - self.sizes.pads :] = NAN
        return x


Args = tuple[Any, ...]


def linear(p: Place) -> Args:
    s = p.sizes
    weight = p.packer.pack_linear_weight(p.randn(2 * s.hidden, s.hidden, scale=s.hidden**-0.5))
    wide = p.padded(p.randn(s.rows, 2 * s.hidden))  # rows further apart than they are long
    return wide[:, : s.hidden], weight, p.randn(2 * s.hidden), p.full(s.rows, 2 * s.hidden)


def quantized_weight(p: Place, format: str, *shape: int, **fields: Any) -> QuantizedWeight:
    """Groups of 128 columns, of mxfp4 32, or as many as there are; of fp8, blocks of as many rows have the same."""
    (*some, N, K), form = shape, FORMATS[format]
    group = min(32 if format == "mxfp4" else 128, N, K)
    generator = torch.Generator("cpu").manual_seed(sum(shape))
    codes = torch.randint(256, (*some, N, K // form.columns), generator=generator, device="cpu").to(torch.uint8)
    if format == "fp8":
        codes[(codes & 127) == 127] = 0  # NaN
    same = group if format == "fp8" else 1
    exponents = torch.randint(-1, 2, (*some, N // same, K // group), generator=generator, device="cpu")
    unit = {"int4": 2**-2, "int8": 2**-6, "fp8": 2**-6, "mxfp4": 2**-1}[format]
    scales = 2.0 ** exponents.repeat_interleave(same, -2).float() * unit * 2.0 ** round(math.log2(K) / -2)
    low = torch.randint(6, 11, scales.shape, generator=generator, device="cpu").to(p.device, torch.uint8)
    zeros = low if fields.pop("zeros", False) else None
    return QuantizedWeight(
        format, N, K, group, p.dtype, codes.to(p.device), scales.to(p.device, p.dtype), zeros, **fields
    )  # fmt: skip


def quantized_linear(format: str, **fields: Any) -> Callable[[Place], Args]:
    def case(p: Place) -> Args:
        s = p.sizes
        weight = quantized_weight(p, format, 2 * s.hidden, s.hidden, **fields)
        wide = p.padded(p.randn(s.rows, 2 * s.hidden))  # rows further apart than they are long
        return wide[:, : s.hidden], weight, p.randn(2 * s.hidden)

    return case


def quantized_embedding(p: Place) -> Args:
    s = p.sizes
    ids = torch.arange(s.rows) * 7919 % (2 * s.vocab)
    return ids.to(p.device), quantized_weight(p, "int4", s.vocab, s.hidden), (s.vocab // 2, s.vocab)


def quantized_experts(format: str, **fields: Any) -> Callable[[Place], Args]:
    """The rows of ``experts``."""

    def case(p: Place) -> Args:
        s = p.sizes
        x, _, _, *rest = experts(lambda s: s.rows // 4)(p)
        w13 = quantized_weight(p, format, s.experts, 2 * s.expert_inner, s.hidden, gated=True, **fields)
        return x, w13, quantized_weight(p, format, s.experts, s.hidden, s.expert_inner, **fields), *rest

    return case


def in_blocks(case: Callable[[Place], Args]) -> Callable[[Place], Args]:
    """With sizes that are whole blocks of 256 columns."""

    def wide(p: Place) -> Args:
        sizes = {name: -(-getattr(p.sizes, name) // 256) * 256 for name in ("hidden", "expert_inner")}
        return case(dataclasses.replace(p, sizes=dataclasses.replace(p.sizes, **sizes)))

    return wide


def weight_in_blocks(p: Place, format: str, *shape: int, gated: bool = False) -> QuantizedWeight:
    """As GGUF files have them: any bits as codes and factors, units of 2 ** -12 to 3 times that."""
    (*rows, K), form = shape, FORMATS[format]
    generator = torch.Generator("cpu").manual_seed(sum(shape))
    blocks = torch.randint(256, (*rows, K // form.columns, form.bytes), generator=generator, device="cpu")
    blocks = blocks.to(torch.uint8)
    for at in UNITS[format]:
        unit = (torch.rand(*blocks.shape[:-1], 1, generator=generator, device="cpu") * 2 + 1) * 2**-12
        blocks[..., at : at + 2] = unit.half().view(torch.uint8)
    return QuantizedWeight(
        format, shape[-2], K, form.columns, p.dtype, blocks.flatten(-2).to(p.device), gated=gated
    )  # fmt: skip


def linear_in_blocks(format: str) -> Callable[[Place], Args]:
    def case(p: Place) -> Args:
        s = p.sizes
        wide = p.padded(p.randn(s.rows, 2 * s.hidden))  # rows further apart than they are long
        return wide[:, : s.hidden], weight_in_blocks(p, format, 2 * s.hidden, s.hidden), p.randn(2 * s.hidden)

    return in_blocks(case)


def embedding_in_blocks(p: Place) -> Args:
    s = p.sizes
    ids = torch.arange(s.rows) * 7919 % s.vocab
    return ids.to(p.device), weight_in_blocks(p, "q6_k", s.vocab, s.hidden)


def experts_in_blocks(p: Place) -> Args:
    s = p.sizes
    x, _, _, *rest = experts(lambda s: s.rows // 4)(p)
    w13 = weight_in_blocks(p, "q4_k", s.experts, 2 * s.expert_inner, s.hidden, gated=True)
    return x, w13, weight_in_blocks(p, "q6_k", s.experts, s.hidden, s.expert_inner), *rest


def embedding(p: Place) -> Args:
    s = p.sizes
    ids = torch.arange(s.rows) * 7919 % s.vocab
    return ids.to(p.device), p.packer.pack_linear_weight(p.randn(s.vocab, s.hidden))


def rms_norm(p: Place) -> Args:
    s = p.sizes
    return p.padded(p.randn(s.rows, s.hidden)), p.randn(s.hidden), 1e-6, p.full(s.rows, s.hidden)


def rms_norm_of_heads(p: Place) -> Args:
    """Queries and keys as views into the fused row; fp32 weights, as Qwen3.5's folded ones."""
    s = p.sizes
    fused = p.padded(p.randn(s.rows, s.heads + 2 * s.kv_heads, s.head_dims[-1]))
    return fused[:, : s.heads], p.randn(s.head_dims[-1], dtype=torch.float32), 1e-6


def fused_add_rms_norm(p: Place) -> Args:
    s = p.sizes
    return p.padded(p.randn(s.rows, s.hidden)), p.randn(s.rows, s.hidden) + 1, p.randn(s.hidden), 1e-5


def silu_and_mul(p: Place) -> Args:
    s = p.sizes
    return p.padded(p.randn(s.rows, 3 * s.hidden))[:, : 2 * s.hidden], p.full(s.rows, s.hidden)


def rotary(share: float) -> Callable[[Place], Args]:
    def case(p: Place) -> Args:
        s, D = p.sizes, p.sizes.head_dims[-1]
        rotated = int(D * share)
        positions = torch.arange(s.rows) * 31 % 4096
        angles = torch.arange(4096)[:, None] * 10000.0 ** -(torch.arange(0, rotated, 2) / rotated)
        table = torch.cat((angles.cos(), angles.sin()), dim=1).float().to(p.device)
        fused = p.padded(p.randn(s.rows, s.heads + s.kv_heads, D))
        return positions.to(p.device), fused[:, : s.heads], fused[:, s.heads :], table

    return case


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows and blocks of a mixed batch: each request's new tokens end its context; the last request has none."""

    lengths: list[int]
    new: list[int]
    block_size: int

    @staticmethod
    def of(s: Sizes, block_size: int, only_decodes: bool = False) -> Batch:
        real, count = s.rows - s.pads, len(s.contexts)
        new = [1] * count
        for r in range(0 if not only_decodes else count, count):  # the first decodes, the others share what is left
            if r:
                new[r] = min(s.contexts[r], (real - sum(new[:r])) // (count - r))
        return Batch(list(s.contexts), new, block_size)

    @property
    def starts(self) -> list[int]:
        ends = [sum(self.new[: r + 1]) for r in range(len(self.new))]
        return [0, *ends, ends[-1]]

    @property
    def blocks(self) -> list[list[int]]:
        """Block ids by request, scattered over the cache; the request without rows has the null block."""
        counts = [-(-length // self.block_size) for length in self.lengths]
        total, width = sum(counts), max(counts)
        stride = next(n for n in range(7, 100) if math.gcd(n, total) == 1)
        ids = iter([i * stride % total + 1 for i in range(total)])
        return [[next(ids) for _ in range(n)] + [NULL_BLOCK] * (width - n) for n in counts] + [[NULL_BLOCK] * width]

    def slots(self, r: int, first: int, last: int) -> list[int]:
        row = self.blocks[r]
        return [row[i // self.block_size] * self.block_size + i % self.block_size for i in range(first, last)]


def reshape_and_cache(p: Place) -> Args:
    s, D = p.sizes, p.sizes.head_dims[-1]
    batch = Batch.of(s, 16)
    slots = [
        slot
        for r, n in enumerate(batch.new)
        for slot in batch.slots(r, batch.lengths[r] - n, batch.lengths[r])
    ]  # fmt: skip
    slots += [PAD_SLOT] * (s.rows - len(slots))
    total = 1 + sum(len([b for b in row if b]) for row in batch.blocks)
    caches = [p.full(total, s.kv_heads, 16, D) for _ in range(2)]
    fused = p.padded(p.randn(s.rows, 2 * s.kv_heads, D))
    return fused[:, : s.kv_heads], fused[:, s.kv_heads :], *caches, p.ints(slots, torch.int64)


def attention(head_dim: int, block_size: int, window: int = 0, only_decodes: bool = False) -> Callable[[Place], Args]:
    """A cache of NaN but for the requests' own keys and values; pad rows of queries NaN too."""

    def case(p: Place) -> Args:
        s = p.sizes
        batch = Batch.of(s, block_size, only_decodes)
        total = 1 + sum(len([b for b in row if b]) for row in batch.blocks)
        caches = [p.full(total, s.kv_heads, block_size, head_dim) for _ in range(2)]
        for r, length in enumerate(batch.lengths):
            slots = torch.tensor(batch.slots(r, 0, length), device=p.device)
            for scale, cache in zip((1.0, 0.5), caches, strict=True):
                written = p.randn(length, s.kv_heads, head_dim, scale=scale)
                cache[slots // block_size, :, slots % block_size] = written
        q = p.randn(s.rows, s.heads, head_dim)
        q[batch.starts[-1] :] = NAN
        out = p.full(s.rows, s.heads, head_dim)
        lengths = p.ints([*batch.lengths, 0])
        return (
            q, *caches, p.ints(batch.blocks), p.ints(batch.starts), lengths, head_dim**-0.5, out, window, None,
        )  # fmt: skip

    return case


def padding_rows(p: Place) -> Args:
    s = p.sizes
    return p.padded(p.randn(s.rows, s.hidden)), slots(s.rows - s.pads, s.rows, p.device)


def cached_as_codes(case: Callable[[Place], Args], *rest: Any) -> Callable[[Place], Args]:
    """With a float8 cache, and what the operator takes last: the scales of keys and values."""

    def coded(p: Place) -> Args:
        args = (x.to(FP8) if isinstance(x, Tensor) and x.dim() == 4 else x for x in case(p))
        return (*args, *rest)

    return coded


def router_logits(p: Place) -> Args:
    """No two are close, so that there is one right order."""
    s = p.sizes
    generator = torch.Generator("cpu").manual_seed(3)
    rows = [torch.randperm(s.experts, generator=generator) for _ in range(s.rows)]
    logits = torch.stack(rows).float() * 0.07 - 1
    return p.padded(logits.to(p.device)), s.top_k, True, slots(s.rows - s.pads, s.rows, p.device)


def experts(rows: Callable[[Sizes], int], of_one: bool = False) -> Callable[[Place], Args]:
    """The last tenth of the rows are pads, every fifth row's last expert lives on another rank; ``of_one``: all rows
    want the same experts."""

    def case(p: Place) -> Args:
        s, T = p.sizes, rows(p.sizes)
        w13 = p.packer.pack_expert_weights(p.randn(s.experts, 2 * s.expert_inner, s.hidden, scale=s.hidden**-0.5), True)
        w2 = p.packer.pack_expert_weights(p.randn(s.experts, s.hidden, s.expert_inner, scale=s.expert_inner**-0.5))
        generator = torch.Generator("cpu").manual_seed(5)
        ids = torch.stack([torch.randperm(s.experts, generator=generator)[: s.top_k] for _ in range(T)]).int()
        if of_one:
            ids[:] = ids[:1].clone()
        shares = torch.rand(T, s.top_k, generator=generator)
        ids[::5, -1] = PAD_EXPERT
        pads = T - max(T // 10, 1)
        ids[pads:] = PAD_EXPERT
        shares[ids < 0] = NAN
        x = p.randn(T, s.hidden)
        x[pads:] = NAN
        return x, w13, w2, ids.to(p.device), shares.to(p.device), p.full(T, s.hidden)

    return case


def delta_net(only_decodes: bool) -> Callable[[Place], Args]:
    def case(p: Place) -> Args:
        s = p.sizes
        G, H, D, K = s.gdn_k_heads, s.gdn_v_heads, s.gdn_dim, 4
        C = 2 * G * D + H * D
        small = torch.float32
        of = GDNWeights(
            p.randn(K, C, dtype=small, scale=0.5), p.randn(H, dtype=small, scale=0.5).exp(),
            p.randn(H + 1, dtype=small)[1:].contiguous(), p.randn(D, dtype=small) * 0.1 + 1, 1e-6, G, D,
        )  # fmt: skip
        batch = Batch.of(s, 16, only_decodes)
        requests = len(batch.new)
        slots = [requests - r for r in range(requests)] + [PAD_STATE_SLOT]
        conv, state = p.randn(requests + 2, K - 1, C), p.randn(requests + 2, H, D, D, dtype=small, scale=0.1)
        for unused in (PAD_STATE_SLOT, requests + 1):
            conv[unused], state[unused] = NAN, NAN
        x = p.randn(s.rows, C + H * D + 2 * H)
        x[batch.starts[-1] :] = NAN
        return x, of, conv, state, p.ints(batch.starts), p.ints(slots), torch.tensor(batch.starts, dtype=torch.int32)

    return case


def logits(p: Place, scale: float = 6.0) -> Tensor:
    """Few tokens of each row have nearly all of its mass; six are ahead of all others and apart."""
    x = p.randn(p.sizes.decode_requests, p.sizes.model_vocab, scale=scale)
    ahead = p.ints([1, 2, 3, 5, 8, 13], torch.int64)
    x[:, (ahead * 11) % x.shape[1]] = (5 * scale + ahead / 2).to(x.dtype)
    return x


def sampled(limited: bool) -> Callable[[Place], Args]:
    """Every fourth row is greedy, one is NaN, each limit is off in some."""

    def case(p: Place) -> Args:
        x = logits(p, 3.0)
        R, V = x.shape
        x[R // 2] = NAN
        largest, likeliest = reference.row_max(x)
        row = torch.arange(R, device=p.device)
        temperature = torch.where(row % 4 == 0, 0.0, 0.6 + row / R)
        args = largest, likeliest.masked_fill_(largest.isnan(), 0), temperature, row * 2**55 - 2**60, 5 * row
        if not limited:
            return (x, *args)
        top_p, log_min_p = torch.where(row % 5 == 0, 1.0, 0.9), torch.where(row % 3 == 0, -torch.inf, -4.0)
        return (x, *args, torch.where(row % 2 == 0, V, 20), top_p, log_min_p)

    return case


def penalised(p: Place) -> Args:
    """Row r has seen r * 8 of the tokens, the last one all of a long context."""
    x = logits(p).float()
    R, V = x.shape
    seen = [min(8 * r, V - 1) for r in range(R)]
    tokens = torch.cat([torch.arange(n) * next(s for s in (7919, 1) if math.gcd(s, V) == 1) % V for n in seen])
    rates = [p.randn(R, dtype=torch.float32, scale=scale) for scale in (0.1, 0.5, 0.5)]
    starts = torch.tensor([0, *seen]).cumsum(0)
    counts = (torch.arange(len(tokens)) % 3).float().to(p.device)
    return x, p.ints(starts.tolist()), tokens.to(p.device), counts, rates[0] + 1, *rates[1:]


def scored(p: Place) -> Args:
    x = logits(p)
    return x, 5, torch.arange(len(x), device=p.device) * 7919 % x.shape[1]


SCALES = None, 0.0, None, None, 0.7, 0.3  # of ``paged_attention``, after what nobody gives
CASES: dict[str, tuple[str, Callable[[Place], Args]]] = {
    "linear": ("linear", linear),
    "quantized linear, int4 with zeros": ("quantized_linear", quantized_linear("int4", zeros=True)),
    "quantized linear, fp8 in blocks": ("quantized_linear", quantized_linear("fp8")),
    "quantized linear, fp8 by fp8": ("quantized_linear", quantized_linear("fp8", activations="fp8")),
    "quantized linear, int8 by int8": ("quantized_linear", quantized_linear("int8", activations="int8")),
    "quantized experts, int4": ("quantized_experts", quantized_experts("int4")),
    "quantized experts, mxfp4": ("quantized_experts", quantized_experts("mxfp4")),
    "quantized experts, fp8 in blocks": ("quantized_experts", quantized_experts("fp8")),
    "quantized embedding, int4": ("quantized_embedding", quantized_embedding),
    "quantized linear, q4_k": ("quantized_linear", linear_in_blocks("q4_k")),
    "quantized linear, q5_k": ("quantized_linear", linear_in_blocks("q5_k")),
    "quantized linear, q6_k": ("quantized_linear", linear_in_blocks("q6_k")),
    "quantized linear, q5_0": ("quantized_linear", linear_in_blocks("q5_0")),
    "quantized experts, q4_k and q6_k": ("quantized_experts", in_blocks(experts_in_blocks)),
    "quantized embedding, q6_k": ("quantized_embedding", in_blocks(embedding_in_blocks)),
    "embedding": ("embedding", embedding),
    "rms_norm": ("rms_norm", rms_norm),
    "rms_norm of heads": ("rms_norm", rms_norm_of_heads),
    "fused_add_rms_norm": ("fused_add_rms_norm", fused_add_rms_norm),
    "silu_and_mul": ("silu_and_mul", silu_and_mul),
    "gelu_tanh_and_mul": ("gelu_tanh_and_mul", silu_and_mul),
    "rotary whole heads": ("rotary_embedding", rotary(1)),
    "rotary quarter of heads": ("rotary_embedding", rotary(0.25)),
    "reshape_and_cache": ("reshape_and_cache", reshape_and_cache),
    # Divisors that are powers of two, so that there is one nearest code; large keys are cut off.
    "reshape_and_cache, fp8 cache": ("reshape_and_cache", cached_as_codes(reshape_and_cache, 2**-7, 2.0)),
    "attention mixed, head 64": ("paged_attention", attention(64, 16)),
    "attention mixed, head 128": ("paged_attention", attention(128, 16)),
    "attention mixed, head 128, pages of 64": ("paged_attention", attention(128, 64)),
    "attention mixed, head 256, pages of 64": ("paged_attention", attention(256, 64)),
    "attention decode, head 128": ("paged_attention", attention(128, 16, only_decodes=True)),
    "attention window 100": ("paged_attention", attention(128, 16, window=100)),
    "zero_padding_rows": ("zero_padding_rows", padding_rows),
    "attention mixed, head 128, fp8 cache": ("paged_attention", cached_as_codes(attention(128, 16), *SCALES)),
    "attention decode, head 128, fp8 cache": (
        "paged_attention",
        cached_as_codes(attention(128, 64, only_decodes=True), *SCALES),
    ),
    "topk_softmax": ("topk_softmax", router_logits),
    "experts 26 of 30 rows": ("fused_experts", experts(lambda s: 30)),
    "experts one row": ("fused_experts", experts(lambda s: 2)),
    "experts many rows": ("fused_experts", experts(lambda s: s.rows)),
    "experts all rows to the same": ("fused_experts", experts(lambda s: s.rows // 2, of_one=True)),
    "delta net mixed": ("gated_delta_net", delta_net(False)),
    "delta net decode": ("gated_delta_net", delta_net(True)),
    "likeliest tokens": ("row_max", lambda p: (logits(p),)),
    "tokens of all limits": ("sample", sampled(True)),
    "tokens without limits": ("sample", sampled(False)),
    "penalties": ("apply_penalties", penalised),
    "log-probabilities": ("log_probabilities", scored),
}


def widened(args: Args) -> Args:
    """In fp64, tensors and packed weights alike."""

    def wide(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.double() if x.is_floating_point() and x.dtype is not FP8 else x
        if isinstance(x, (PackedWeight, PackedExperts)):
            return dataclasses.replace(x, data=x.data.double(), dtype=torch.float64)
        if isinstance(x, QuantizedWeight):
            return dataclasses.replace(x, dtype=torch.float64)
        return x

    return tuple(wide(x) for x in args)


def results(out: Any, args: Args) -> list[Tensor]:
    """All that an operator can have written, its result and its arguments, on the host, numbers in fp64."""
    outs = out if isinstance(out, tuple) else (out,)
    found = (x.cpu() for x in (*outs, *args) if isinstance(x, Tensor))
    return [x.double() if x.is_floating_point() else x for x in found]


@functools.lru_cache(maxsize=2)
def exact(name: str, sizes: Sizes, dtype: torch.dtype) -> list[Tensor]:
    """The case's right results, from its values as they are in ``dtype``."""
    operator, build = CASES[name]
    args = widened(build(Place(sizes, "cpu", dtype)))
    if operator == "gated_delta_net":
        out = reference_gdn.gated_delta_net_ref(*args[:6], torch.float64, reference_gdn.delta_rule_chunked)
    else:
        out = getattr(reference, operator)(*args)
    return results(out, args)
