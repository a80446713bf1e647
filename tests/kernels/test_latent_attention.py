# SPDX-License-Identifier: Apache-2.0
"""Latent attention: the operators with one cached vector for key and value, and the layer against fp64 by hand.

Everything that no request wrote is NaN: slots, the null block, rows of padding, buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vllm.forward_context import set_forward_context
from vllm.kernels import ops, reference
from vllm.model_executor.layers.attention.mla import KVUpProjection, LatentAttention
from vllm.model_executor.layers.step_buffers import StepBuffers
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla import MLAMetadata

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAN = float("nan")


def metadata_of(lengths: list[int], rows: list[int], block_size: int, pads: int = 0, more_requests: int = 0) -> Any:
    """Requests with ``rows`` rows at the end of ``lengths`` tokens, each in blocks of its own; then rows of padding."""
    R, T = len(lengths) + more_requests, sum(rows)
    most = max([-(-n // block_size) for n in lengths], default=0) + 1
    table = torch.zeros(R, most, dtype=torch.int32)
    slots, at = [], 1
    for r, (length, n) in enumerate(zip(lengths, rows, strict=True)):
        blocks = -(-length // block_size)
        table[r, :blocks] = torch.arange(at, at + blocks).flip(0)
        positions = torch.arange(length - n, length)
        slots.append(table[r, positions // block_size].long() * block_size + positions % block_size)
        if length == 0:
            slots[-1] = torch.full((n,), -1)
        at += blocks
    starts = torch.tensor([0, *rows, *[0] * more_requests]).cumsum(0).int()
    lens = torch.tensor([*lengths, *[0] * more_requests], dtype=torch.int32)
    slot_mapping = torch.cat([*slots, torch.full((pads,), -1)]).long()
    common = CommonAttentionMetadata(
        starts, starts.clone(), lens, lens.clone(), table, slot_mapping, torch.zeros(R, dtype=torch.int32), R, T,
        T + pads, max(rows, default=0), max(lengths, default=0),
    )  # fmt: skip
    return MLAMetadata(**vars(common), block_size=block_size)


# ---------------------------------------------------------------------------------------------------------------------
# The operators


def attend(operator: Any, metadata: Any, q: Tensor, cache: Tensor, rank: int, scale: float) -> Tensor:
    out = torch.full((*q.shape[:2], rank), NAN, dtype=q.dtype)
    operator(
        q, cache, cache[..., :rank], metadata.block_table, metadata.query_start_loc, metadata.seq_lens, scale, out,
    )  # fmt: skip
    return out


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    dtype=st.sampled_from(DTYPES),
    heads=st.sampled_from([1, 5, 16, 128]),
    sizes=st.sampled_from([(576, 512), (40, 32), (41, 33), (24, 12)]),
    block_size=st.sampled_from([8, 16, 24]),
    requests=st.lists(
        st.tuples(st.sampled_from([0, 1, 15, 64, 130]), st.sampled_from([0, 1, 1, 2, 7])), min_size=1, max_size=4
    ),
    pads=st.sampled_from([0, 3]),
)
def test_the_value_is_a_part_of_the_key(dtype, heads, sizes, block_size, requests, pads) -> None:
    """Every implementation of the CPU against fp64 where key and value are one vector, for up to 128 heads."""
    width, rank = sizes
    lengths, rows = [context + n for context, n in requests], [n for _, n in requests]
    metadata = metadata_of(lengths, rows, block_size, pads)
    blocks = 2 + int(metadata.block_table.max())
    cache = torch.full((blocks, 1, block_size, width), NAN, dtype=dtype)
    g = torch.Generator().manual_seed(sum(lengths))
    kept = [torch.randn(n, 1, width, generator=g).to(dtype) for n in lengths]
    for r, n in enumerate(lengths):
        at = torch.arange(n)
        slots = metadata.block_table[r, at // block_size].long() * block_size + at % block_size
        ops.reshape_and_cache(kept[r], None, cache, None, slots)
        assert torch.equal(cache[slots // block_size, 0, slots % block_size], kept[r][:, 0])
    q = torch.randn(sum(rows) + pads, heads, width, generator=g).to(dtype)
    q[sum(rows) :] = NAN
    got = attend(ops.paged_attention, metadata, q, cache, rank, width**-0.5)
    plain = attend(reference.paged_attention, metadata, q, cache, rank, width**-0.5)
    at = 0
    for r, n in enumerate(rows):
        for i in range(n):
            keys = kept[r][: lengths[r] - n + i + 1, 0].double()
            weights = (q[at].double() @ keys.T * width**-0.5).softmax(-1)
            want, magnitude = weights @ keys[:, :rank], weights @ keys[:, :rank].abs()
            for out in (got, plain):
                bound = 1.6e-5 * magnitude + torch.finfo(dtype).eps * want.abs()
                assert ((out[at].double() - want).abs() <= bound).all()
            at += 1
    assert got[at:].eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_latents_is_bitwise_its_own(dtype) -> None:
    """Alone, in a batch, and whatever the chunk."""
    metadata = metadata_of([700, 90], [40, 1], 16)
    cache = torch.randn(int(metadata.block_table.max()) + 1, 1, 16, 40).to(dtype)
    q = torch.randn(41, 16, 40).to(dtype)
    got = attend(ops.paged_attention, metadata, q, cache, 32, 0.2)
    for row in (0, 3, 39):
        alone = metadata_of([660 + row + 1], [1], 16)
        alone.block_table[:] = metadata.block_table[:1, : alone.block_table.shape[1]]
        assert torch.equal(attend(ops.paged_attention, alone, q[row : row + 1], cache, 32, 0.2)[0], got[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_and_values_that_lie_token_after_token(dtype) -> None:
    """[tokens, J, D], as keys and values made from latents are, of sizes 24 and 20: a slot's heads are neighbours."""
    tokens, J, block_size = 96, 3, 24  # the kernel's tiles of 64 keys begin in the middle of a block
    wide = [torch.randn(tokens, J, D).to(dtype) for D in (24, 20)]
    wide[0][85:], wide[1][85:] = NAN, NAN
    caches = [x.unflatten(0, (-1, block_size)).transpose(1, 2) for x in wide]
    table = torch.arange(4, dtype=torch.int32)[None]
    q, out = torch.randn(5, 6, 24).to(dtype), torch.full((6, 6, 20), NAN, dtype=dtype)
    starts, lens = torch.tensor([0, 5], dtype=torch.int32), torch.tensor([85], dtype=torch.int32)
    ops.paged_attention(torch.cat((q, q[:1])), *caches, table, starts, lens, 0.3, out)
    for i in range(5):
        keys, values = (x[: 81 + i].double().repeat_interleave(2, 1) for x in wide)
        weights = (torch.einsum("hd,khd->hk", q[i].double(), keys) * 0.3).softmax(-1)
        want = torch.einsum("hk,khd->hd", weights, values)
        torch.testing.assert_close(out[i].double(), want, rtol=4e-5 + torch.finfo(dtype).eps, atol=1e-5)
    assert out[5].eq(0).all()
    written = [x.clone().fill_(NAN) for x in caches]
    slots = torch.tensor([40, -1, 3])
    k = torch.randn(3, J, 24).to(dtype)
    ops.reshape_and_cache(k, k.clone(), written[0], written[0].clone(), slots)
    assert torch.equal(written[0][1, :, 16], k[0])
    assert torch.equal(written[0][0, :, 3], k[2])
    assert written[0].isnan().all(-1).sum() == (tokens - 2) * J


# ---------------------------------------------------------------------------------------------------------------------
# The layer


@dataclass
class Sizes:
    heads: int = 4
    nope: int = 16
    rope: int = 8
    v: int = 12
    rank: int = 32
    longest: int = 400
    max_rows: int = 300


def make_layer(sizes: Sizes, dtype: torch.dtype = torch.float32, seed: int = 0) -> LatentAttention:
    up = KVUpProjection.__new__(KVUpProjection)
    torch.nn.Module.__init__(up)
    up.shards, up.nope, up.v, up.input_size_per_partition = [], sizes.nope, sizes.v, sizes.rank
    g = torch.Generator().manual_seed(seed)
    up.weight = torch.randn(sizes.heads * (sizes.nope + sizes.v), sizes.rank, generator=g).to(dtype) / sizes.rank**0.5
    return LatentAttention(
        up, sizes.heads, sizes.rope, 0.2, dtype, "model.layers.0.self_attn.attn", sizes.longest, sizes.max_rows, 16
    )


def run_layer(
    layer: LatentAttention, sizes: Sizes, metadata: Any, seed: int = 0, buffers: StepBuffers | None = None
) -> tuple[Tensor, Tensor]:
    """(output, what fp64 has by hand); what is cached of earlier steps is random, all else NaN."""
    dtype = layer.dtype
    layer.bind_kv_cache(SimpleNamespace(num_blocks=int(metadata.block_table.max()) + 2, block_size=16))
    cache = layer.kv_cache[0].fill_(NAN)
    g = torch.Generator().manual_seed(seed)
    T, real = metadata.num_padded_tokens, metadata.num_actual_tokens
    q = torch.randn(T, sizes.heads, sizes.nope + sizes.rope, generator=g).to(dtype)
    latents = torch.randn(T, sizes.rank + sizes.rope, generator=g).to(dtype)
    q[real:], latents[real:] = NAN, NAN
    want = torch.zeros(T, sizes.heads, sizes.v, dtype=torch.float64)
    w_uk, w_uv = (w.double() for w in layer.up.split())
    for r, length in enumerate(metadata.seq_lens.tolist()):
        first, last = metadata.query_start_loc[r : r + 2].tolist()
        if length == 0:
            q[first:last], latents[first:last] = NAN, NAN
            continue
        at = torch.arange(length)
        block, offset = metadata.block_table[r, at // 16].long(), at % 16
        old = torch.randn(length - (last - first), sizes.rank + sizes.rope, generator=g).to(dtype)
        cache[block[: len(old)], 0, offset[: len(old)]] = old
        context = torch.cat((old, latents[first:last])).double()
        keys = torch.cat(
            (
                torch.einsum("tr,hnr->thn", context[:, : sizes.rank], w_uk),
                context[:, None, sizes.rank :].expand(-1, sizes.heads, -1),
            ),
            -1,
        )
        values = torch.einsum("tr,hvr->thv", context[:, : sizes.rank], w_uv)
        for row in range(first, last):
            seen = length - (last - row) + 1
            scores = torch.einsum("hd,thd->ht", q[row].double(), keys[:seen]) * layer.scale
            want[row] = torch.einsum("ht,thv->hv", scores.softmax(-1), values[:seen])
    with set_forward_context({layer.layer_name: metadata}, step_buffers=buffers):
        output = layer(q, latents)
    return output, want.flatten(1)


@pytest.mark.parametrize("expand_from", [2, 1000])
@pytest.mark.parametrize(
    ("lengths", "rows", "pads", "more"),
    [
        ([1], [1], 0, 0),
        ([40, 200, 7], [40, 60, 7], 0, 0),
        ([130, 33, 300, 1, 90], [1, 33, 41, 1, 2], 5, 3),
        ([130, 16, 33], [1, 1, 1], 2, 1),
        ([], [], 4, 4),
    ],
)
def test_both_forms_are_the_one_sum(expand_from, lengths, rows, pads, more, nan_poison) -> None:
    """Prompts, chunks after a cached context, decodes, and mixtures of them, absorbed and expanded, against fp64."""
    sizes = Sizes()
    layer = make_layer(sizes)
    layer.expand_from = expand_from
    output, want = run_layer(layer, sizes, metadata_of(lengths, rows, 16, pads, more))
    torch.testing.assert_close(output.double(), want, rtol=1e-4, atol=2e-5)
    assert output[sum(rows) :].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, nan_poison) -> None:
    sizes = Sizes()
    layer = make_layer(sizes, dtype)
    output, want = run_layer(layer, sizes, metadata_of([90, 200, 3], [1, 120, 3], 16, 2))
    assert (output.double() - want).abs().max() < 12 * torch.finfo(dtype).eps


def test_the_form_is_the_one_that_costs_less() -> None:
    layer = make_layer(Sizes(nope=128, rope=64, v=128, rank=512))
    assert layer.expand_from == 171
    cost_absorbed = [rows * (2 * 512 + 64) for rows in (170, 171)]
    cost_expanded = [rows * (128 + 64 + 128) + 512 * 256 for rows in (170, 171)]
    assert cost_absorbed[0] < cost_expanded[0]
    assert cost_absorbed[1] >= cost_expanded[1]
    parts = metadata_of([500, 170, 171, 1, 1, 300], [171, 170, 171, 1, 1, 200], 16, 0, 2).parts(171)
    assert [(p.first, p.last, p.expanded) for p in parts] == [
        (0, 171, True), (171, 341, False), (341, 512, True), (512, 514, False), (514, 714, True)
    ]  # fmt: skip


@pytest.mark.parametrize(("heads_at_once", "max_rows"), [(3, 300), (16, 40), (1, 300)])
def test_a_context_of_any_length_fits_the_shared_memory(heads_at_once, max_rows, nan_poison) -> None:
    """Some heads after the others where the memory does not hold all; it always holds one of the longest context."""
    sizes = Sizes(max_rows=max_rows)
    layer = make_layer(sizes)
    layer.expand_from, layer.heads_at_once = 2, min(heads_at_once, sizes.heads)
    buffers = StepBuffers(max_rows)
    for length, rows in ((sizes.longest, min(max_rows, 100)), (17, 17)):
        output, want = run_layer(layer, sizes, metadata_of([length], [rows], 16), buffers=buffers)
        torch.testing.assert_close(output.double(), want, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("lengths", "rows", "pads", "more"),
    [
        ([13], [1], 127, 127),  # pad requests have no rows
        ([13, 5, 9], [1, 1, 1], 1, 1),
        ([], [], 128, 128),
        ([13, *[0] * 127], [1] * 128, 0, 0),  # pad requests have a row each, as in decode graphs
        ([13, 0, 5, 9], [1] * 4, 0, 0),
        ([0, 13, 0, 0, 40, 0], [1, 1, 1, 1, 40, 1], 3, 2),
        ([0] * 4, [1] * 4, 0, 0),
    ],
)
def test_decode_with_seq_lens_0(lengths, rows, pads, more, nan_poison) -> None:
    """Real rows exact, pad rows exactly 0, wherever they are: a per-tensor scale over all is that of the real rows."""
    sizes = Sizes()
    layer = make_layer(sizes)
    output, want = run_layer(layer, sizes, metadata_of(lengths, rows, 16, pads, more))
    real = torch.zeros(len(output), dtype=torch.bool)
    at = 0
    for length, n in zip(lengths, rows, strict=True):
        real[at : at + n] = length > 0
        at += n
    torch.testing.assert_close(output[real].double(), want[real], rtol=1e-4, atol=2e-5)
    assert output[~real].eq(0).all()
    amax = output.abs().max()
    assert amax.isfinite()
    assert amax == (output[real].abs().max() if real.any() else 0)
    scale = (amax / torch.finfo(torch.float8_e4m3fn).max).clamp(min=1e-12)
    back = (output / scale).to(torch.float8_e4m3fn).float() * scale
    assert ((back - output).abs() <= output.abs() / 16 + amax * 2**-9).all()


class Allocations(TorchDispatchMode):
    """Bytes of new memory of at least ``least`` bytes, by operation, and of memory that is filled with zeros."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.made, self.zeroed = least, [], 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in (*args, *(kwargs or {}).values()) if isinstance(x, Tensor)}
        if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in given:
            if out.untyped_storage().nbytes() >= self.least:
                self.made.append((str(func), tuple(out.shape)))
            if "zeros" in str(func):
                self.zeroed += out.nbytes
        if str(func).startswith("aten.zero_"):
            self.zeroed += args[0].nbytes
        return out


@pytest.mark.parametrize("layers", [1, 61])
def test_all_layers_share_one_output_and_none_is_made_in_service(layers) -> None:
    """What cost upstream's servers 15 GiB: a zeroed output in each of 61 layers, made after memory was measured. Here
    profiling makes one for all, later steps make none, and of it only rows of padding are zeroed."""
    sizes, rows = Sizes(), 128
    all_layers = [make_layer(sizes, seed=i) for i in range(layers)]
    for i, layer in enumerate(all_layers):
        other = LatentAttention(
            layer.up, sizes.heads, sizes.rope, 0.2, layer.dtype, f"model.layers.{i}.self_attn.attn", 400, 300, 16
        )
        all_layers[i] = other
        other.bind_kv_cache(SimpleNamespace(num_blocks=8, block_size=16))
    buffers = StepBuffers(300)
    q = torch.randn(rows, sizes.heads, sizes.nope + sizes.rope)
    latents = torch.randn(rows, sizes.rank + sizes.rope)
    with set_forward_context(None, step_buffers=buffers):
        all_layers[0](q, latents)
    output_bytes = 300 * sizes.heads * sizes.v * 4
    profiled = buffers.nbytes
    assert len(buffers._buffers) == 4
    metadata = metadata_of([13], [1], 16, 127, 127)
    with (
        set_forward_context({layer.layer_name: metadata for layer in all_layers}, step_buffers=buffers),
        Allocations(rows * sizes.heads * sizes.v * 4) as seen,
    ):
        outputs = [layer(q, latents) for layer in all_layers]
    assert seen.made == []
    assert seen.zeroed <= layers * 127 * sizes.heads * sizes.v * 4
    assert len({output.data_ptr() for output in outputs}) == 1
    assert buffers.nbytes == profiled
    assert sum(b.nbytes for key, b in buffers._buffers.items() if key == all_layers[0].output_key) == output_bytes
