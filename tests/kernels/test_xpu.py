# SPDX-License-Identifier: Apache-2.0
"""The wrappers over vllm-xpu-kernels, around stand-ins of its kernels, against the twins; pads are NaN."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xpu_stand_ins
from gdn_cases import check, make_case
from padding_slots import slots

from vllm.kernels import checks, ops, reference, table, weights, xpu

NAN = float("nan")
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(xpu, "kernel_package", lambda module: object())
    with xpu_stand_ins.installed():
        yield


def randn(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(actual: torch.Tensor, right: torch.Tensor) -> None:
    assert actual.dtype is right.dtype
    torch.testing.assert_close(actual, right, rtol=ROUNDING[actual.dtype], atol=ROUNDING[actual.dtype])


# --- which kernels are taken ------------------------------------------------------------------------------------------


def test_every_wrapper_stands_in_the_table_with_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    preferred = {name for name, row in table.TABLE.items() if "xpu" in row[table.DEVICES.index("xpu")].split()}
    assert preferred - {"rotary_embedding"} == set(xpu._KERNELS)
    assert {kernel for kernels in xpu._KERNELS.values() for kernel in kernels} == set(xpu.recorded()["schemas"])
    assert not hasattr(xpu, "rotary_embedding")
    for operator in xpu._KERNELS:
        assert xpu.why_not(operator) is None
        assert callable(getattr(xpu, operator))


@pytest.mark.parametrize("operator", xpu._KERNELS)
def test_wrappers_pass_the_tables_check(operator: str) -> None:
    assert checks.failure(operator, getattr(xpu, operator), "cpu", xpu) is None


def test_the_engines_memory_is_in_the_kernels_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers allocate through ``ops``, which asks the chosen implementation."""
    assert ops.zeroed_cache((3, 2, 16, 8), torch.bfloat16).is_contiguous()
    assert ops.zeroed_state((3, 2, 8, 6), torch.float32).is_contiguous()
    monkeypatch.setattr(ops, "choose", lambda device: dict.fromkeys(table.TABLE, SimpleNamespace(module=xpu)))
    cache, state = ops.zeroed_cache((3, 2, 16, 8), torch.bfloat16), ops.zeroed_state((3, 2, 8, 6), torch.float32)
    assert (cache.shape, state.shape) == ((3, 2, 16, 8), (3, 2, 8, 6))
    assert cache.transpose(1, 2).is_contiguous()
    assert state.transpose(2, 3).is_contiguous()
    assert not cache.any()
    assert not state.any()
    packed = ops.pack_expert_weights(randn(3, 8, 4))
    assert packed.data.transpose(1, 2).is_contiguous()
    assert ops.pack_linear_weight(randn(8, 4)).kind == "plain"


def test_a_kernel_with_other_arguments_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    schemas = xpu.recorded()["schemas"]
    before = schemas["_moe_C.moe_gather"].replace(", int num_experts", "")
    monkeypatch.setattr(
        xpu, "recorded", lambda: {"version": "0.1.1", "schemas": {**schemas, "_moe_C.moe_gather": before}}
    )
    reason = xpu.why_not("fused_experts")
    assert reason is not None
    assert "other arguments than 0.1.1: _moe_C::moe_gather" in reason
    assert "int num_experts" in reason
    assert xpu.why_not("rms_norm") is None


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(xpu.torch.ops._moe_C.__dict__, "moe_gather", raising=False)
    monkeypatch.setattr(xpu, "kernel_package", lambda module: None if module.endswith("_vllm_fa2_C") else object())
    assert xpu.why_not("paged_attention") == "vllm_xpu_kernels._vllm_fa2_C cannot be loaded"
    monkeypatch.setitem(xpu._KERNELS, "rms_norm", ("_C.not_there",))
    assert xpu.why_not("rms_norm") == "this vllm-xpu-kernels has no kernel _C.not_there"


# --- row-wise ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.usefixtures("nan_poison")
def test_row_wise_operators(dtype: torch.dtype) -> None:
    rows, weight = randn(5, 48, dtype=dtype), randn(16, dtype=dtype, seed=1)
    for T in (0, 5):
        strided = rows[:T, :32].unflatten(1, (2, 16))  # heads in a wider row
        for out in (None, strided.clone(), rows.clone()[:T, :32].unflatten(1, (2, 16))):
            close(xpu.rms_norm(strided, weight, 1e-6, out), reference.rms_norm(strided, weight, 1e-6))
        inside = rows.clone()[:T, :16]
        assert xpu.rms_norm(inside, weight, 1e-6, inside) is inside
        close(inside, reference.rms_norm(rows[:T, :16], weight, 1e-6))
        for own in (True, False):
            x, residual = rows.clone()[:T, :16], randn(5, 16, dtype=dtype, seed=2)[:T]
            right, total = reference.fused_add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
            before = x.clone()
            y, same = xpu.fused_add_rms_norm(x, residual, weight, 1e-6, x if own else None)
            assert same is residual
            assert (y is x) == own
            assert own or torch.equal(x, before)
            close(y, right)
            close(residual, total)
        for name in ("silu_and_mul", "gelu_tanh_and_mul"):
            ours, right = getattr(xpu, name), getattr(reference, name)(rows[:T])
            for out in (None, rows.clone()[:T, :24]):
                close(ours(rows[:T], out), right)
            both = rows.clone()[:T]
            assert ours(both, both[:, :24]).data_ptr() == both.data_ptr()
            close(both[:, :24], right)


def test_norms_of_two_types_are_refused_before_anything_is_written() -> None:
    x, residual, weight = randn(2, 8, dtype=torch.bfloat16), randn(2, 8, dtype=torch.bfloat16), randn(8)
    before = x.clone(), residual.clone()
    with pytest.raises(NotImplementedError, match=r"bfloat16 with a weight of torch\.float32"):
        xpu.rms_norm(x, weight, 1e-6, x)
    with pytest.raises(NotImplementedError, match=r"bfloat16 with a weight of torch\.float32"):
        xpu.fused_add_rms_norm(x, residual, weight, 1e-6, x)
    with pytest.raises(NotImplementedError, match="strides"):
        xpu.fused_add_rms_norm(x, residual.expand(2, 2, 8)[:, 0], weight.bfloat16(), 1e-6, x)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


# --- attention --------------------------------------------------------------------------------------------------------


def attention_case(
    lengths: list[int], contexts: list[int], heads: tuple[int, int, int], block_size: int, num_pads: int
) -> dict[str, Any]:
    """Requests in blocks in descending order; everything that no request wrote is NaN."""
    (H, J, D), dtype, most = heads, torch.bfloat16, max(-(-length // block_size) for length in [1, *contexts])
    T, R = sum(lengths) + num_pads, len(lengths)
    caches = [xpu.zeroed_cache((R * most + 1, J, block_size, D), dtype).fill_(NAN) for _ in range(2)]
    block_table = torch.zeros(R, most, dtype=torch.int32)
    free = iter(range(R * most, 0, -1))
    for r, length in enumerate(contexts):
        for i in range(-(-length // block_size)):
            block_table[r, i] = next(free)
        for t in range(length):
            for seed, cache in enumerate(caches):
                cache[block_table[r, t // block_size], :, t % block_size] = randn(J, D, seed=100 * r + 2 * t + seed)
    q = randn(T, H, 2 * D, dtype=dtype)[:, :, :D]
    q[T - num_pads :] = NAN
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return {
        "q_THD": q,
        "key_cache": caches[0],
        "value_cache": caches[1],
        "block_table": block_table,
        "query_start_loc": starts,
        "seq_lens": torch.tensor(contexts, dtype=torch.int32),
        "scale": D**-0.5,
    }


@pytest.mark.parametrize(
    ("lengths", "contexts", "num_pads"),
    [
        ([1, 1, 1, 0, 0], [17, 1, 64, 0, 0], 0),  # a decode kernel given the last two would write past the end
        ([1, 1, 0], [5, 33, 0], 3),
        ([7, 1, 5, 0], [7, 20, 36, 0], 2),
        ([0, 2, 0, 1], [9, 2, 0, 20], 1),
        ([4, 4], [4, 20], 0),
        ([0, 0], [0, 0], 4),
        ([], [], 2),
    ],
)
@pytest.mark.parametrize(
    ("heads", "block_size", "window"),
    [((4, 2, 64), 16, 0), ((2, 1, 128), 32, 0), ((9, 1, 128), 16, 6), ((2, 2, 96), 64, 3)],
)
@pytest.mark.usefixtures("nan_poison")
def test_attention_over_the_cache(
    lengths: list[int], contexts: list[int], num_pads: int, heads: tuple[int, int, int], block_size: int, window: int
) -> None:
    case = attention_case(lengths, contexts, heads, block_size, num_pads)
    right = torch.full_like(case["q_THD"], 7.0)
    reference.paged_attention(**case, out_THD=right, sliding_window=window)
    host = {"query_start_loc_cpu": case["query_start_loc"], "seq_lens_cpu": case["seq_lens"]}
    wide = torch.empty(*right.shape[:2], 2 * right.shape[2], dtype=right.dtype)[:, :, : right.shape[2]]
    for out, known in ((torch.empty(right.shape, dtype=right.dtype), host), (wide, {})):
        xpu.paged_attention(**case, out_THD=out, sliding_window=window, **known)
        close(out, right)
    assert right[sum(lengths) :].count_nonzero() == 0


def test_requests_beyond_num_reqs_are_not_read() -> None:
    case = attention_case([2, 1, 1], [2, 5, 3], (2, 1, 64), 16, 1)
    right, out = (torch.full_like(case["q_THD"], 7.0) for _ in range(2))
    reference.paged_attention(**case, out_THD=right, num_reqs=2)
    xpu.paged_attention(**case, out_THD=out, num_reqs=2)
    close(out, right)
    assert out[3:].count_nonzero() == 0


@pytest.mark.parametrize("heads", [3, 8, 20])
def test_latent_attention_in_groups_of_eight_heads(heads: int) -> None:
    """Keys of 576 whose first 512 channels are the values: written once, and attended by eight heads at a time."""
    case = attention_case([1, 7, 0], [70, 7, 0], (heads, 1, 576), 64, 3)
    cache = xpu.zeroed_cache(tuple(case["key_cache"].shape), torch.bfloat16).fill_(NAN)
    for r, length in enumerate([70, 7]):
        at = torch.arange(length)
        slots = case["block_table"][r, at // 64].long() * 64 + at % 64
        k = case["key_cache"][slots // 64, :, slots % 64]
        xpu.reshape_and_cache(k, None, cache, None, torch.where(at == 3, -1, slots))
        assert torch.equal(cache[slots // 64, :, slots % 64][at != 3], k[at != 3])
        xpu.reshape_and_cache(k[3:4], None, cache, None, slots[3:4])
    case |= {"key_cache": cache, "value_cache": cache[..., :512]}
    outs = [torch.full((11, heads, 512), NAN, dtype=torch.bfloat16) for _ in range(2)]
    for out, attend in zip(outs, (xpu.paged_attention, reference.paged_attention), strict=True):
        attend(**case, out_THD=out)
    close(outs[0], outs[1])
    assert outs[0][8:].count_nonzero() == 0
    other = {**case, "value_cache": cache[..., :500]}
    with pytest.raises(NotImplementedError, match=r"576 with values of 500: .*only 576 with 512"):
        xpu.paged_attention(**other, out_THD=outs[0][..., :500])


@pytest.mark.parametrize(("head_size", "block_size"), [(64, 16), (128, 16), (256, 64), (576, 64), (48, 16)])
def test_the_block_size_is_one_that_kernels_were_compiled_for(head_size: int, block_size: int) -> None:
    """Head size 256 has pages of 64 alone; what has none at all keeps the default."""
    assert xpu.preferred_block_size(head_size, 16) == block_size
    assert ops.preferred_block_size("cpu", head_size, 16) == 16


@pytest.mark.parametrize(
    ("heads", "block_size", "window", "message"),
    [
        ((2, 1, 256), 16, 0, "blocks of 64"),
        ((2, 1, 256), 32, 0, "blocks of 64"),
        ((9, 1, 128), 32, 0, "blocks of 16 or 64"),
        ((2, 1, 128), 32, 5, "and a sliding window: .* blocks of 16 or 64"),
        ((2, 1, 80), 64, 0, "blocks of no size"),
        ((2, 1, 64), 24, 0, "blocks of 16 or 64"),
    ],
)
def test_shapes_that_were_not_compiled_are_refused(
    heads: tuple[int, int, int], block_size: int, window: int, message: str
) -> None:
    case = attention_case([1], [3], heads, block_size, 0)
    with pytest.raises(NotImplementedError, match=f"head size {heads[2]}, .*blocks of {block_size}.*{message}"):
        xpu.paged_attention(**case, out_THD=torch.empty_like(case["q_THD"]), sliding_window=window)


def test_attention_refuses_other_types_orders_and_lengths() -> None:
    case = attention_case([1], [3], (2, 1, 64), 16, 0)
    out = torch.empty_like(case["q_THD"])
    with pytest.raises(NotImplementedError, match=r"torch\.float32"):
        xpu.paged_attention(**{**case, "q_THD": case["q_THD"].float()}, out_THD=out)
    case = attention_case([1], [3], (2, 2, 64), 16, 0)
    dense = {name: case[name].contiguous() for name in ("key_cache", "value_cache")}
    with pytest.raises(NotImplementedError, match="zeroed_cache"):
        xpu.paged_attention(**{**case, **dense}, out_THD=out)
    row = randn(1, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="zeroed_cache"):
        xpu.reshape_and_cache(row, row, dense["key_cache"], dense["value_cache"], torch.tensor([0]))
    with pytest.raises(NotImplementedError, match=r"of \[1\] rows and \[0\] tokens"):
        xpu.paged_attention(**{**case, "seq_lens": torch.zeros(1, dtype=torch.int32)}, out_THD=out)


@pytest.mark.parametrize(("D", "error"), [(112, NotImplementedError), (120, RuntimeError)])
def test_a_kernel_that_says_not_compiled_is_a_refusal_and_no_other_error_is(
    D: int, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {**xpu.recorded(), "paged_decode": {"full": {"8": {str(D): [16]}}, "window": {"8": {}}}}
    monkeypatch.setattr(xpu, "recorded", lambda: known)
    case = attention_case([1], [3], (2, 1, D), 16, 0)
    with pytest.raises(error, match="not compiled" if D == 112 else "DEVICE_LOST") as raised:
        xpu.paged_attention(**case, out_THD=torch.empty_like(case["q_THD"]))
    assert raised.type is error


@pytest.mark.parametrize("J", [1, 3])
def test_cache_writes_skip_slot_minus_one(J: int) -> None:
    k, v = (randn(4, 2 * J, 8, dtype=torch.bfloat16, seed=s)[:, :J] for s in (1, 2))
    slots = torch.tensor([17, -1, 3, 0])
    ours = [xpu.zeroed_cache((2, J, 16, 8), torch.bfloat16).fill_(NAN) for _ in range(2)]
    right = [torch.full((2, J, 16, 8), NAN, dtype=torch.bfloat16) for _ in range(2)]
    for flip in (False, True):  # heads side by side, and not
        rows = [x.transpose(1, 2).contiguous().transpose(1, 2) if flip else x for x in (k, v)]
        xpu.reshape_and_cache(*rows, *ours, slots)
    reference.reshape_and_cache(k, v, *right, slots)
    xpu.reshape_and_cache(k[:0], v[:0], *ours, slots[:0])
    for a, b in zip(ours, right, strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


# --- experts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.usefixtures("nan_poison")
def test_routing_leaves_pad_rows_to_nobody(renormalize: bool) -> None:
    logits = randn(6, 40, dtype=torch.bfloat16)[:, :32]
    logits[4:] = NAN
    for real in (4, 0):
        values, ids = xpu.topk_softmax(logits, 4, renormalize, slots(real, 6))
        right_values, right_ids = reference.topk_softmax(logits, 4, renormalize, slots(real, 6))
        close(values, right_values)
        assert torch.equal(ids, right_ids)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.usefixtures("nan_poison")
def test_routing_by_groups_leaves_pad_rows_to_nobody(bias: bool) -> None:
    logits, biases = randn(6, 40)[:, :32], randn(32, seed=1) - 1 if bias else None
    logits[4:] = NAN
    for real in (4, 0):
        values, ids = xpu.grouped_topk(logits, 4, True, slots(real, 6), 8, 3, 2, True, biases)
        right_values, right_ids = reference.grouped_topk(logits, 4, True, slots(real, 6), 8, 3, 2, True, biases)
        close(values, right_values)
        assert torch.equal(ids, right_ids)
    for group_top, sigmoid, groups in ((1, True, 8), (2, False, 8), (2, True, 64)):
        with pytest.raises(NotImplementedError, match=f"of {groups} groups, judged by their best {group_top}"):
            xpu.grouped_topk(randn(2, 128), 4, True, slots(2, 2), groups, 3, group_top, sigmoid)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.usefixtures("nan_poison")
def test_experts_skip_minus_one(dtype: torch.dtype, own: bool) -> None:
    E, D, I, T, S = 5, 16, 12, 7, 4
    w13, w2 = randn(E, 2 * I, D, dtype=dtype, seed=1) / 4, randn(E, D, I, dtype=dtype, seed=2) / 4
    packed = xpu.pack_expert_weights(w13, gated=True), xpu.pack_expert_weights(w2)
    plain = weights.pack_expert_weights(w13, gated=True), weights.pack_expert_weights(w2)
    x = randn(T, 2 * D, dtype=dtype)[:, :D]
    x[5:] = NAN
    ids = torch.tensor([[0, 1, 2, 3], [4, -1, 0, -1], [-1, -1, -1, 2], [3, 3, 3, 3], [1, 0, 4, 2], *[[-1] * 4] * 2])
    route = randn(T, S, seed=3)
    route[ids < 0] = NAN
    for kind in (torch.int32, torch.int64):
        right = reference.fused_experts(x, *plain, ids.to(kind), route)
        mine = x.clone() if own else x
        y = xpu.fused_experts(mine, *packed, ids.to(kind), route, mine if own else None)
        assert (y is mine) == own
        close(y, right)
        assert y[5:].count_nonzero() == 0
    assert xpu.fused_experts(x[:0], *packed, ids[:0], route[:0]).shape == (0, D)
    for wrong in ((x.float(), *packed, ids, route), (x, *plain, ids, route), (x, *packed, ids[:, :3], route[:, :3])):
        with pytest.raises(NotImplementedError, match="vllm-xpu-kernels takes bfloat16 and float16"):
            xpu.fused_experts(*wrong)


@pytest.mark.usefixtures("nan_poison")
def test_experts_with_biases() -> None:
    E, D, I, T, S = 5, 16, 12, 7, 4
    w13, w2 = randn(E, 2 * I, D, dtype=torch.bfloat16, seed=1) / 4, randn(E, D, I, dtype=torch.bfloat16, seed=2) / 4
    b13, b2 = (randn(E, n, dtype=torch.bfloat16, seed=n).float() for n in (2 * I, D))
    x, ids, route = randn(T, D, dtype=torch.bfloat16), torch.randint(-1, E, (T, S)), randn(T, S, seed=3) / 4
    plain = weights.pack_expert_weights(w13, gated=True), weights.pack_expert_weights(w2)
    packed = xpu.pack_expert_weights(w13, gated=True), xpu.pack_expert_weights(w2)
    for activation in ("silu", "swigluoai"):
        right = reference.fused_experts(x, *plain, ids, route, None, b13, b2, activation)
        close(xpu.fused_experts(x, *packed, ids, route, None, b13, b2, activation), right)


def test_packed_experts_are_plain_to_all_others() -> None:
    w = randn(3, 8, 4)
    packed = xpu.pack_expert_weights(w)
    assert packed.kind == "plain"
    assert torch.equal(packed.data, w)
    ops.repack_expert_weight(packed, 1, w[2, :4], part=1)
    assert torch.equal(packed.data[1, 4:], w[2, :4])
    assert packed.data.transpose(1, 2).is_contiguous()


# --- gated delta net --------------------------------------------------------------------------------------------------


def gated_delta_net(x: Any, w: Any, conv_state: Any, state: Any, *tables: Any) -> torch.Tensor:
    own = xpu.zeroed_state(state.shape, state.dtype).copy_(state)
    out = xpu.gated_delta_net(x, w, conv_state, own, *tables)
    state.copy_(own)
    return out


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(
    ("lengths", "slots"),
    [
        ([1, 1, 1, 0], [4, 1, 3, 0]),
        ([5, 1, 7, 0, 0], [4, 1, 3, 0, 0]),
        ([3, 2, 4], [2, 0, 3]),
        ([0, 2, 0, 1], [1, 2, 0, 4]),
        ([0, 0], [0, 0]),
    ],
)
@pytest.mark.usefixtures("nan_poison")
def test_gated_delta_net(lengths: list[int], slots: list[int], dtype: torch.dtype) -> None:
    check(make_case((1, 2, 8, 6, 4), dtype, lengths, slots, num_pads=4), gated_delta_net, roundings=4)


@pytest.mark.usefixtures("nan_poison")
def test_a_gated_delta_net_kernel_given_more_rows_than_requests_cover() -> None:
    """What the wrapper prevents: 30 rows counted for 26 overwrite the last request's states, and z is NaN."""
    case = make_case((2, 4, 16, 16, 4), torch.float32, [5, 5, 8, 8], [2, 3, 4, 5], num_pads=4)
    case.x[26:] = 1.0
    right, (x, w, conv_state, state, starts, slots) = (
        (*args[:3], args[3].transpose(2, 3).contiguous().transpose(2, 3), *args[4:])
        for args in (case.fresh(), case.fresh())
    )
    core, z = xpu.gdn_attention(*right, starts)
    assert core[26:].count_nonzero() == z[26:].count_nonzero() == 0

    core, z = torch.empty(30, 4, 16), torch.empty(30, 4, 16)
    qkvz, ba = (part.contiguous() for part in x.split([x.shape[1] - 8, 8], dim=-1))
    kernel = torch.ops._xpu_C.gdn_attention
    arguments: dict[str, Any] = dict.fromkeys(
        (argument.name for argument in kernel.default._schema.arguments[4:]), None
    )
    arguments |= {"num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 16, "head_v_dim": 16, "activation": "silu"}
    arguments |= {
        "conv_state": conv_state,
        "ssm_state": state.transpose(2, 3),
        "conv_weights": w.conv_weight_CK,
        "tp_size": 1,
    }
    arguments |= {"A_log": w.log_decay_rate_H, "dt_bias": w.dt_bias_H, "num_prefills": 4, "num_decodes": 0}
    arguments |= {"num_spec_decodes": 0, "has_initial_state": torch.ones(4, dtype=torch.bool), "reorder_input": True}
    arguments |= {"non_spec_query_start_loc": starts, "non_spec_state_indices_tensor": slots, "num_actual_tokens": 30}
    kernel(core, z, qkvz, ba, **arguments)
    assert z[26:].isnan().all()
    for pool, good in ((conv_state, right[2]), (state, right[3])):
        assert [slot for slot in (2, 3, 4, 5) if not torch.equal(pool[slot], good[slot])] == [5], "the last request's"


def test_the_gated_delta_nets_weights_are_prepared_once() -> None:
    w = make_case((1, 2, 8, 8, 4), torch.float32, [1], [1], 0).weights
    assert w.conv_weight_CK is w.conv_weight_CK
    assert w.log_decay_rate_H is w.log_decay_rate_H
    assert torch.equal(replace(w, decay_rate_H=w.decay_rate_H * 2).log_decay_rate_H, (w.decay_rate_H * 2).log())


# --- the host ---------------------------------------------------------------------------------------------------------


def test_the_host_asks_the_device_for_nothing() -> None:
    """Tensors without values: whatever reads one raises."""
    with torch.device("meta"):
        x, weight = torch.empty(5, 16, dtype=torch.bfloat16), torch.empty(16, dtype=torch.bfloat16)
        xpu.rms_norm(x, weight, 1e-6)
        xpu.fused_add_rms_norm(x, torch.empty_like(x), weight, 1e-6, x)
        xpu.silu_and_mul(x, x[:, :8])
        of_rows = torch.empty(5, dtype=torch.int64)
        xpu.topk_softmax(x, 4, True, of_rows)
        xpu.grouped_topk(x, 4, True, of_rows, 4, 2, 2, True)
        w13, w2 = (torch.empty(3, *size, dtype=torch.bfloat16) for size in ((16, 16), (16, 8)))
        ids, route = torch.empty(5, 4, dtype=torch.int32), torch.empty(5, 4)
        xpu.fused_experts(x, xpu.pack_expert_weights(w13, True), xpu.pack_expert_weights(w2), ids, route)
        starts, lens = torch.empty(4, dtype=torch.int32), torch.empty(3, dtype=torch.int32)
        caches = [torch.empty(4, 16, 1, 64, dtype=torch.bfloat16).transpose(1, 2) for _ in range(2)]
        q = torch.empty(5, 2, 64, dtype=torch.bfloat16)
        xpu.reshape_and_cache(q[:, :1], q[:, 1:], *caches, torch.empty(5, dtype=torch.int64))
    host = torch.tensor([0, 3, 4, 4], dtype=torch.int32), torch.tensor([3, 9, 0], dtype=torch.int32)
    block_table = torch.empty(3, 1, dtype=torch.int32, device="meta")
    xpu.paged_attention(q, *caches, block_table, starts, lens, 0.1, torch.empty_like(q), 0, None, None, 0.0, *host)
    case = make_case((1, 2, 4, 4, 4), torch.bfloat16, [3, 1, 0], [2, 1, 0], num_pads=1)
    x, of, conv_state, state, *tables = case.fresh("meta")
    own = state.transpose(2, 3).contiguous().transpose(2, 3)
    assert xpu.gated_delta_net(x, of, conv_state, own, *tables, case.query_start_loc).shape == (5, 8)
    with pytest.raises(NotImplementedError, match="zeroed_state"):
        xpu.gated_delta_net(x, of, conv_state, state, *tables, case.query_start_loc)


# --- the released wheel -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_release_has_what_is_recorded(tmp_path: Path) -> None:
    """Schemas are strings in its libraries, compiled attention shapes are names of functions. Downloads 150 MB."""
    known = xpu.recorded()
    wanted = f"{known['package']}=={known['version']}"
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-q", "-d", str(tmp_path)]
    platform = ["--platform", "manylinux_2_28_x86_64", "--python-version", "3.12"]
    done = subprocess.run([*pip, *platform, wanted], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{wanted} cannot be downloaded, so nothing was compared: {done.stderr}"
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        for kernel, schema in known["schemas"].items():
            namespace, name = kernel.split(".")
            library = files.read(f"vllm_xpu_kernels/{namespace.removesuffix('_cache_ops')}.abi3.so")
            found = {text.decode() for text in re.findall(rb"\0(%s\([^\0]+\) -> [^\0]+)\0" % name.encode(), library)}
            assert len(found) == 1, f"{kernel}: {found}"
            released, own = (torch._C.parse_schema(text) for text in (found.pop(), name + schema))
            assert str(released) == str(own), kernel
        attention = files.read("vllm_xpu_kernels/libattn_kernels_xe_2.so")
    wheel.unlink()
    compiled: dict[str, dict[str, dict[str, set[int]]]] = {"full": {}, "window": {}}
    numbers = rb"IN4cute1CILi(\d+)EEENS\d?_ILi(\d+)EEE(?:NS\d?_ILi(\d+)EEE|(S\d_))E"
    policy = rb"decode_policy_qpacked_head" + numbers + rb"Lb0ELb([01])ELb0E"
    for heads, size, page, again, window in re.findall(policy, attention):
        shapes = compiled["window" if window == b"1" else "full"].setdefault(heads.decode(), {})
        # A number that stood before is not spelled out again: the first is S6_, the second S7_.
        page = page or {b"S6_": heads, b"S7_": size}[again]
        shapes.setdefault(size.decode(), set()).add(int(page))
    own_shapes = {
        kind: {heads: {size: set(pages) for size, pages in by.items()} for heads, by in shapes.items()}
        for kind, shapes in known["paged_decode"].items()
    }
    assert compiled == own_shapes
