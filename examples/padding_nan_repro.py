# SPDX-License-Identifier: Apache-2.0
"""How padding rows turn real tokens into NaN: each fault put back, beside the code as shipped.

    python examples/padding_nan_repro.py

Takes seconds on a CPU, one process, no weights. Uninitialised memory is NaN throughout, as it often is on the devices
where the faults were met. The batch is that of the Arc B60 case: prompts of 5, 5, 8 and 8 tokens on a DP rank that runs
30 rows because the other rank has 30 tokens. Exits 0 if every line is as expected: BUG with the fault, OK as shipped.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from vllm.forward_context import set_forward_context
from vllm.kernels import ops, reference, reference_gdn, xpu
from vllm.kernels.activation_scales import activation_scale, amax_of_real_rows
from vllm.kernels.weights import GDNWeights
from vllm.model_executor.layers.attention import Attention, LatentAttention, attention, mla
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla import MLAMetadata

NAN = float("nan")
LENGTHS, ROWS = (5, 5, 8, 8), 30
REAL = sum(LENGTHS)
BLOCK = 16
Result = tuple[bool, str]  # whether real tokens and pad rows are as they must be, and what was seen


@contextmanager
def poisoned_memory() -> Iterator[None]:
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def nan_rows(x: Tensor) -> list[int]:
    return x.flatten(1).isnan().any(1).nonzero().flatten().tolist()


def same(x: Tensor, exact: Tensor) -> bool:
    return torch.allclose(x.double(), exact.double(), rtol=1e-4, atol=1e-5)


# --- attention -------------------------------------------------------------------------------------------------------


def attend(lengths: tuple[int, ...], rows: int, num_reqs: int = 0, cached: int = 0) -> tuple[Tensor, Tensor]:
    """One step of an attention layer, 4 heads over 2 of 16: (output [rows, 64], exact real rows in fp64)."""
    heads, kv_heads, size, real = 4, 2, 16, sum(lengths)
    num_reqs = num_reqs or len(lengths)
    starts = torch.tensor([0, *lengths] + [0] * (num_reqs - len(lengths))).cumsum(0).to(torch.int32)
    seq_lens = torch.zeros(num_reqs, dtype=torch.int32)
    seq_lens[: len(lengths)] = torch.tensor(lengths) + cached
    positions = [cached + i for n in lengths for i in range(n)]
    owner = [r for r, n in enumerate(lengths) for _ in range(n)]
    slots = torch.full((rows,), -1)
    slots[:real] = torch.tensor([(1 + r) * BLOCK + p for r, p in zip(owner, positions, strict=True)])
    table = torch.zeros(num_reqs, 1, dtype=torch.int32)
    table[: len(lengths), 0] = 1 + torch.arange(len(lengths))
    metadata = CommonAttentionMetadata(
        starts, starts, seq_lens, seq_lens, table, slots, torch.zeros(num_reqs, dtype=torch.int32),
        num_reqs, real, rows, max(lengths), max(lengths) + cached,
    )  # fmt: skip
    layer = Attention(heads, size, size**-0.5, kv_heads, torch.float32, "layers.0.attn")
    layer.bind_kv_cache(SimpleNamespace(num_blocks=1 + len(lengths), block_size=BLOCK))  # type: ignore[arg-type]
    assert layer.kv_cache is not None
    for i, cache in enumerate(layer.kv_cache):
        cache[:, :, :cached] = random(1 + len(lengths), kv_heads, cached, size, seed=5 + i)
    q, k, v = random(rows, 64), random(rows, 32, seed=1), random(rows, 32, seed=2)
    with set_forward_context({layer.layer_name: metadata}):
        output = layer(q, k, v)
    exact = torch.empty(real, heads, size, dtype=torch.float64)
    for row, (r, p) in enumerate(zip(owner, positions, strict=True)):
        keys, values = (cache[1 + r, :, : p + 1].double().repeat_interleave(2, 0) for cache in layer.kv_cache)
        weights = (keys @ q[row].double().view(heads, size, 1)).squeeze(-1).mul(size**-0.5).softmax(-1)
        exact[row] = (weights[:, None] @ values).squeeze(1)
    return output, exact.flatten(1)


def unwritten_tail() -> Any:
    """The fault: nobody writes the rows that belong to no request, neither the operator, as device kernels, nor the
    layer."""
    honest = ops.paged_attention

    def of_real_rows(
        q: Tensor, keys: Tensor, values: Tensor, table: Tensor, starts: Tensor, *rest: Any, **host: Any
    ) -> None:
        lengths, scale, out, window = rest
        real = int(starts[-1])
        honest(q[:real], keys, values, table, starts, lengths, scale, out[:real], window, **host)

    stack = ExitStack()
    stack.enter_context(mock.patch.object(attention, "zero_padding_rows"))
    stack.enter_context(mock.patch.object(ops, "paged_attention", of_real_rows))
    return stack


def judge_rows(output: Tensor, exact: Tensor) -> Result:
    real = len(exact)
    good = same(output[:real], exact) and bool((output[real:] == 0).all())
    tail = f"rows {real}..{len(output) - 1}" if real < len(output) else "no pad rows"
    state = f"NaN in rows {nan_rows(output)}" if nan_rows(output) else f"real rows exact, {tail}: 0"
    return good, state if real < len(output) else f"{real} real rows exact, no pad rows"


def attention_fault() -> Result:
    with unwritten_tail():
        return judge_rows(*attend(LENGTHS, ROWS))


def attention_shipped() -> Result:
    return judge_rows(*attend(LENGTHS, ROWS))


def split_of_nan_rows(num_actual_tokens: int) -> tuple[int, int]:
    with unwritten_tail():
        bad = nan_rows(attend(LENGTHS, ROWS)[0])
    return sum(row < num_actual_tokens for row in bad), sum(row >= num_actual_tokens for row in bad)


def count_fault() -> Result:
    actual, padding = split_of_nan_rows(ROWS)
    return actual == 0, f"num_actual_tokens={ROWS} actual_nan_rows={actual} padding_nan_rows={padding}"


def count_shipped() -> Result:
    starts = torch.tensor([0, 5, 10, 18, 26], dtype=torch.int32)
    try:
        CommonAttentionMetadata(starts, starts, *(starts,) * 5, 4, ROWS, ROWS, 8, 8)
    except AssertionError:
        actual, padding = split_of_nan_rows(REAL)
        return actual == 0, f"count {ROWS} refused; at {REAL}: actual_nan_rows={actual} padding_nan_rows={padding}"
    return False, f"count {ROWS} accepted for {REAL} tokens"


def one_group_fault() -> Result:
    with unwritten_tail():
        return judge_rows(*attend((*LENGTHS, 7, 5, 11, 7), 56))


def one_group_shipped() -> Result:
    return judge_rows(*attend((*LENGTHS, 7, 5, 11, 7), 56))


# --- gated delta net -------------------------------------------------------------------------------------------------

G, H, D, K = 2, 4, 16, 4
WEIGHTS = GDNWeights(random(K, 2 * G * D + H * D) / 2, random(H).exp(), random(H, seed=1), random(D), 1e-6, G, D)
COLUMNS = WEIGHTS.conv_dim + H * D + 2 * H
SLOTS = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
STARTS = torch.tensor([0, 5, 10, 18, 26], dtype=torch.int32)


def prefill_and_decode(pad_value: float, last_start: int, exact: bool = False) -> tuple[Tensor, list[int]]:
    """The case's prefill, then one clean token for each request: (decode rows [4, 64], slots with NaN)."""
    x, token = random(ROWS, COLUMNS, seed=3), random(4, COLUMNS, seed=4)
    x[REAL:] = pad_value
    conv = torch.zeros(5, K - 1, WEIGHTS.conv_dim)
    state = torch.zeros(5, H, D, D, dtype=torch.float64 if exact else torch.float32)
    run: Callable[..., Tensor] = reference_gdn.gated_delta_net_ref if exact else ops.gated_delta_net
    starts = STARTS.clone()
    starts[-1] = last_start
    run(x, WEIGHTS, conv, state, starts, SLOTS)
    out = run(token, WEIGHTS, conv, state, torch.arange(5, dtype=torch.int32), SLOTS)
    return out, sorted(set(nan_rows(conv)) | set(nan_rows(state)))


def judge_decode(out: Tensor, nan_slots: list[int]) -> Result:
    exact, _ = prefill_and_decode(0.0, REAL, exact=True)
    wrong = [r for r in range(4) if not same(out[r], exact[r])]
    kind = "NaN" if nan_rows(out) else "wrong"
    slots = f", NaN in state slot {nan_slots}" if nan_slots else ""
    return not wrong, f"decode of clean input {kind} for request {wrong}{slots}" if wrong else "decode of all 4 exact"


def state_fault() -> Result:
    return judge_decode(*prefill_and_decode(NAN, ROWS))


def state_shipped() -> Result:
    return judge_decode(*prefill_and_decode(NAN, REAL))


def zeroed_fault() -> Result:
    return judge_decode(*prefill_and_decode(0.0, ROWS))


def xpu_kernel(core: Tensor, z: Tensor, qkvz: Tensor, *_: Any, **kwargs: Any) -> None:
    """Stand-in for the XPU kernel, as its source reads: z is garbage past the rows that requests cover."""
    covered = int(kwargs["non_spec_query_start_loc"][-1])
    core[:covered] = random(covered, H, D, seed=6)
    z[covered:] = NAN
    z[:covered] = qkvz[:covered, -H * D :].unflatten(-1, (H, D))


def gate_rows(rows_given: int) -> Tensor:
    """core and z as the kernel leaves them in zeroed and in uninitialised memory, through the gated norm: [30, 64]."""
    core, z = torch.zeros(ROWS, H, D), torch.empty(ROWS, H, D)
    xpu_kernel(core[:rows_given], z[:rows_given], random(ROWS, COLUMNS)[:, : -2 * H], non_spec_query_start_loc=STARTS)
    return reference_gdn.rms_norm_gated_ref(core, z, WEIGHTS.norm_weight_E, WEIGHTS.eps).flatten(1)


def gate_fault() -> Result:
    out = gate_rows(ROWS)
    return not nan_rows(out), f"0 x norm x silu(NaN): NaN in rows {nan_rows(out)}, next layer's input"


def gate_shipped() -> Result:
    pools = torch.zeros(5, K - 1, WEIGHTS.conv_dim), xpu.zeroed_state((5, H, D, D), torch.float32)
    with mock.patch.object(torch.ops, "_xpu_C", SimpleNamespace(gdn_attention=xpu_kernel), create=True):
        out = xpu.gated_delta_net(random(ROWS, COLUMNS), WEIGHTS, *pools, STARTS, SLOTS, STARTS)
    good = same(out[:REAL], gate_rows(ROWS)[:REAL]) and bool((out[REAL:] == 0).all())
    return good, f"rows {REAL}..{ROWS - 1} of core and gate: 0"


# --- MoE routing -----------------------------------------------------------------------------------------------------

EXPERTS, TOP_K, HIDDEN = 8, 2, 32
W13, W2 = random(EXPERTS, 2 * HIDDEN, HIDDEN) / 8, random(EXPERTS, HIDDEN, HIDDEN, seed=1) / 8


def scanning_top_k(logits: Tensor) -> Tensor:
    """Stand-in for a fused kernel: K scans for the largest unused logit. No NaN is larger than anything, so a row of
    NaN yields the first expert K times."""
    rows = []
    for row in logits.tolist():
        ids: list[int] = []
        for _ in range(TOP_K):
            best, at = -math.inf, 0
            for expert, value in enumerate(row):
                if expert not in ids and value > best:
                    best, at = value, expert
            ids.append(at)
        rows.append(ids)
    return torch.tensor(rows, dtype=torch.int32)


def experts_by_group(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Stand-in for a grouped GEMM: rows lie one expert after the other, in regions sized by the rows that chose the
    expert. A row that chose it twice needs a place more than there is and takes the next expert's."""
    chosen = torch.zeros(len(x), EXPERTS, dtype=torch.bool)
    for t, row in enumerate(ids.tolist()):
        chosen[t, [e for e in row if e >= 0]] = True
    next_place = (chosen.sum(0).cumsum(0) - chosen.sum(0)).tolist()
    ends = chosen.sum(0).cumsum(0)
    places = torch.zeros(len(x) * TOP_K + 1, HIDDEN)
    pairs = []
    for t, row in enumerate(ids.tolist()):
        for slot, expert in enumerate(row):
            if expert >= 0:
                places[next_place[expert]] = x[t]
                pairs.append((t, slot, next_place[expert]))
                next_place[expert] += 1
    y = torch.zeros_like(x)
    for t, slot, place in pairs:
        expert = min(int(torch.searchsorted(ends, place, right=True)), EXPERTS - 1)
        y[t] += weights[t, slot] * (reference.silu_and_mul(places[place] @ W13[expert].T) @ W2[expert].T)
    return y


def route(count: int) -> Result:
    x, logits = random(ROWS, HIDDEN, seed=7), random(ROWS, EXPERTS, seed=8)
    x[REAL:], logits[REAL:] = NAN, NAN
    rows = torch.arange(ROWS)
    weights, ids = ops.topk_softmax(logits, TOP_K, True, rows.where(rows < count, -1))
    if count == ROWS:
        ids = scanning_top_k(logits)
    exact_weights, exact_ids = logits[:REAL].double().softmax(-1).topk(TOP_K)
    exact_weights /= exact_weights.sum(-1, keepdim=True)
    exact = torch.zeros(ROWS, HIDDEN, dtype=torch.float64)
    for t in range(REAL):
        for weight, e in zip(exact_weights[t], exact_ids[t].tolist(), strict=True):
            hidden = reference.silu_and_mul(x[t].double() @ W13[e].double().T)
            exact[t] += weight * (hidden @ W2[e].double().T)
    outputs = [experts_by_group(x, ids, weights)]
    if count == REAL:
        packed = ops.pack_expert_weights(W13, gated=True), ops.pack_expert_weights(W2)
        outputs.append(ops.fused_experts(x, *packed, ids, weights))
    wrong = sorted({t for y in outputs for t in range(REAL) if not same(y[t], exact[t])})
    good = not wrong and all(bool((y[REAL:] == 0).all()) for y in outputs)
    lost = f"real rows {wrong} NaN" if wrong else "real rows exact"
    return good, f"pad rows choose experts {ids[-1].tolist()}, {lost}"


# --- FP8 amax --------------------------------------------------------------------------------------------------------


def fp8_round_trip(x: Tensor, num_real: int) -> tuple[float, Tensor]:
    """Per-tensor E4M3 quantisation with the amax of the first ``num_real`` rows: (amax, what comes back)."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    amax, scale = float(amax_of_real_rows(x, num_real)), activation_scale(x, largest, num_real, per_token=False)
    return amax, (x / scale).to(torch.float8_e4m3fn).float() * scale


def amax_of(num_real: int) -> Result:
    output, exact = attend((1,), 128, num_reqs=128, cached=12)
    amax, back = fp8_round_trip(output, num_real)
    # E4M3 has 3 bits of mantissa: half a step is 1/16 of the value; below 2^-6 of the largest, of that.
    good = bool(((back[:1] - exact).abs() <= exact.abs() / 16 + amax * 2**-9).all())
    return good, f"amax={amax:.4f} padding_nan={bool(output[1:].isnan().any())} real row {'kept' if good else 'lost'}"


def amax_fault() -> Result:
    with unwritten_tail():
        return amax_of(128)


def amax_shipped() -> Result:
    over_all, over_real = amax_of(128), amax_of(1)
    return over_all == over_real and over_all[0], over_real[1]


# --- latent attention (MLA) ------------------------------------------------------------------------------------------

LATENT, ROTATED, HEADS, SIZE = 32, 8, 4, 16
UP = random(HEADS, 2 * SIZE, LATENT, seed=9) / LATENT**0.5
DECODES = {  # tokens of each slot of a decode graph's batch; 0: a slot of padding, which has a row and no length
    "1 real + 127 pad rows": (13, *[0] * 127),
    "3 real + 1 pad row": (13, 5, 0, 9),
    "all idle": (0,) * 128,
}


def decode_latents(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """A decode step over latents: (output [rows, 64], exact rows in fp64, 0 for padding)."""
    rows, real = len(lengths), torch.tensor(lengths) > 0
    starts, seq_lens = torch.arange(rows + 1, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
    table = torch.where(real, 1 + torch.arange(rows), 0).to(torch.int32)[:, None]
    slots = torch.where(real, table[:, 0].long() * BLOCK + seq_lens - 1, -1)
    metadata = MLAMetadata(
        starts, starts, seq_lens, seq_lens, table, slots, torch.zeros(rows, dtype=torch.int32),
        rows, rows, rows, 1, max(lengths), block_size=BLOCK,
    )  # fmt: skip
    up: Any = SimpleNamespace(input_size_per_partition=LATENT, nope=SIZE, v=SIZE, split=lambda: UP.split(SIZE, dim=1))
    layer = LatentAttention(up, HEADS, ROTATED, 0.2, torch.float32, "layers.0.attn", 2 * BLOCK, rows, BLOCK)
    layer.bind_kv_cache(SimpleNamespace(num_blocks=1 + rows, block_size=BLOCK))  # type: ignore[arg-type]
    assert layer.kv_cache is not None
    cache = layer.kv_cache[0].fill_(NAN)
    q, latents = random(rows, HEADS, SIZE + ROTATED), random(rows, LATENT + ROTATED, seed=1)
    q[~real], latents[~real] = NAN, NAN
    exact = torch.zeros(rows, HEADS, SIZE, dtype=torch.float64)
    w_uk, w_uv = UP.double().split(SIZE, dim=1)
    for row, length in enumerate(lengths):
        if length:
            context = torch.cat((random(length - 1, LATENT + ROTATED, seed=20 + row), latents[row : row + 1]))
            cache[1 + row, 0, : length - 1] = context[:-1]
            c, k_pe = context.double().split((LATENT, ROTATED), dim=1)
            q_row = q[row].double()
            scores = torch.einsum("hn,hnr,tr->ht", q_row[:, :SIZE], w_uk, c) + q_row[:, SIZE:] @ k_pe.T
            exact[row] = torch.einsum("ht,tr,hvr->hv", (scores * 0.2).softmax(-1), c, w_uv)
    with set_forward_context({layer.layer_name: metadata}):
        return layer(q, latents), exact.flatten(1)


def latent_case(lengths: tuple[int, ...]) -> bool:
    """Prints the case with the fault, rows of padding that nobody writes, and as shipped; whether both are as
    expected."""
    with mock.patch.object(mla, "zero_padding_rows"):
        faulty, _ = decode_latents(lengths)
    shipped, exact = decode_latents(lengths)
    real = exact.abs().sum(1) > 0
    for fix, output in (("OFF", faulty), ("ON", shipped)):
        amax, padding_nan = float(output.abs().max()), bool(output[~real].isnan().any())
        print(f"fix {fix} amax={amax:.4f} padding_nan={padding_nan}")
    good = same(shipped, exact) and bool((shipped[~real] == 0).all())
    kept = fp8_round_trip(shipped, len(shipped))[1]
    of_real = float(amax_of_real_rows(shipped[torch.argsort(~real, stable=True)], int(real.sum())))
    good &= float(shipped.abs().max()) == of_real and not bool(kept.isnan().any())
    return good and math.isnan(float(faulty.abs().max()))


def tiles_of_128(zeroed_pages: bool) -> Result:
    """Stand-in for a kernel that reads 128 tokens at a time: what lies past the one token of the context gets weight 0,
    and 0 x NaN is NaN."""
    page = random(128, LATENT + ROTATED, seed=3)
    page[1:] = 0.0 if zeroed_pages else NAN
    seen = torch.arange(128) < 1
    weights = (page @ random(LATENT + ROTATED)).masked_fill(~seen, -math.inf).softmax(-1)
    out = weights @ page[:, :LATENT]
    good = same(out, page[0, :LATENT])
    return good, f"seq_len 1, {int(out.isnan().sum())} of {LATENT} channels NaN"


def tiles_shipped() -> Result:
    output, exact = decode_latents((1,))
    zeroed, _ = tiles_of_128(zeroed_pages=True)
    good = same(output, exact) and zeroed
    return good, "seq_len 1, slots past it NaN and never part of a sum; pages begin as 0 besides"


# --- the table -------------------------------------------------------------------------------------------------------

# part, case, fault put back, whether that is a BUG, as shipped
TABLE: list[tuple[str, str, Callable[[], Result], bool, Callable[[], Result]]] = [
    ("attention", "26 tokens on 30 rows, output not zeroed", attention_fault, True, attention_shipped),
    ("attention", "NaN rows counted at num_actual_tokens", count_fault, True, count_shipped),
    ("attention", "TP=4/DP=1: the same fault, nothing to pad", one_group_fault, False, one_group_shipped),
    ("GDN", "kernel walks to row 30, pad rows NaN", state_fault, True, state_shipped),
    ("GDN", "kernel walks to row 30, all buffers zeroed", zeroed_fault, True, state_shipped),
    ("GDN", "output zeroed, gate not (XPU stand-in)", gate_fault, True, gate_shipped),
    ("MoE routing", "pad rows routed (stand-in kernels)", lambda: route(ROWS), True, lambda: route(REAL)),
    ("FP8 amax", "1 real + 127 pad rows, amax over all", amax_fault, True, amax_shipped),
    ("MLA", "tiles of 128 tokens over unwritten KV (stand-in)", lambda: tiles_of_128(False), True, tiles_shipped),
]


def main() -> int:
    as_expected = True
    with poisoned_memory(), torch.inference_mode():
        for part, case, fault, is_bug, shipped in TABLE:
            (fault_good, fault_text), (good, text) = fault(), shipped()
            as_expected &= good and fault_good is not is_bug
            print(f"{part}: {case}")
            print(f"    fault put back: {fault_text} {'OK' if fault_good else 'BUG'}")
            print(f"    as shipped:     {text} {'OK' if good else 'BUG'}", flush=True)
        for case, lengths in DECODES.items():
            print(f"MLA decode, seq_lens 0: {case}")
            as_expected &= latent_case(lengths)
    print(
        "FP8: the engine gives each row a scale of its own; the rows here quantise attention's output in this script.\n"
        "MoE, GDN gate: the device kernels are stand-ins written after what is known of them; the rest is the engine.\n"
        f"{'every line as expected' if as_expected else 'NOT AS EXPECTED'}"
    )
    return 0 if as_expected else 1


if __name__ == "__main__":
    sys.exit(main())
