# SPDX-License-Identifier: Apache-2.0
"""A recorded pass, made again on other values, computes what the pass itself does; what it cannot keep it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.compilation.recording import CaptureError, MemoryPool, NotCapturable, Recorder, outside, without_garbage
from vllm.kernels import ops
from vllm.kernels.cpu import records
from vllm.kernels.cpu.ops import kernels_available

needs_kernels = pytest.mark.skipif(not kernels_available(), reason="the C++ kernels cannot be built here")


def record(function: Callable[[], Any], pool: MemoryPool | None = None) -> tuple[Recorder, Any]:
    recorder = Recorder(pool or MemoryPool(), lambda: "layer", lambda name: None)
    with torch.inference_mode(), without_garbage(), recorder.recording():
        result = function()
    return recorder, recorder.pool.alias(result)


def replay(recorder: Recorder) -> None:
    with torch.inference_mode():
        for call in recorder.calls:
            if call.replay is not None:
                call.replay()
            elif call.kernel is not None:
                assert call.kernel(call.given) == 0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1 << 15), st.integers(0, 9)), max_size=40))
def test_memory_of_live_tensors_never_overlaps(steps: list[tuple[int, int]]) -> None:
    pool, live = MemoryPool(), list[torch.Tensor]()
    for size, drop in steps:
        tensor = pool.empty((size,), (1,), torch.uint8)
        begin = tensor.data_ptr()
        assert begin % 64 == 0 or not size
        for other in live:
            assert begin + size <= other.data_ptr() or other.data_ptr() + other.numel() <= begin or not other.numel()
        live.append(tensor)
        del tensor
        if live and drop < 5:
            live.pop(drop % len(live))
    other = None
    live.clear()
    assert pool.is_free


def test_views_keep_their_memory() -> None:
    pool = MemoryPool()
    view = pool.empty((8, 8), (8, 1), torch.float32)[2:4].t()
    assert not pool.is_free
    alias = pool.alias(view)
    assert (alias.data_ptr(), alias.shape, alias.stride()) == (view.data_ptr(), view.shape, view.stride())
    del view
    assert pool.is_free, "an alias holds memory"


FACTORS = torch.tensor([1.0, 2.0, 3.0, 4.0] * 2)


# Every kind of operation: new results, several at once, views and parts, in place, given an output, from constants.
def everything(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    y = torch.cat([x, x * 2.5]).softmax(-1)
    top = y.topk(2)
    y[1:3] = top.values[:2].repeat(1, 4)
    out = torch.empty_like(y)
    torch.mul(y, FACTORS, out=out)
    mask = torch.arange(len(out))[:, None] < counts
    out.masked_fill_(~mask, 0.5)
    parts = out.split([3, len(out) - 3])
    parts[0].add_(top.indices.float().sum())
    out.view(-1)[::3].neg_()
    return torch.where(mask, out, -1.0).to(torch.bfloat16).reshape(-1, 4).contiguous()


def test_torch_operations_are_made_again_on_other_values() -> None:
    x, counts = torch.randn(5, 8), torch.tensor([4])
    recorder, result = record(lambda: everything(x, counts))
    assert recorder.pool.is_free
    for seed in range(3):
        torch.manual_seed(seed)
        x.normal_()
        counts.fill_(seed)
        recorder.pool.poison()
        replay(recorder)
        assert torch.equal(result, everything(x, counts))


def test_two_recordings_are_equal_and_show_what_is_the_hosts() -> None:
    pool, x = MemoryPool(), torch.randn(5, 8)
    counts = torch.tensor([4])
    one, two = (record(lambda: everything(x, counts), pool)[0].calls for _ in range(2))
    assert [call.given for call in one] == [call.given for call in two]
    factors, lengths = iter((2.0, 3.0)), iter((2, 3))
    by_number = [record(lambda: x * next(factors), pool)[0].calls[0] for _ in range(2)]
    assert "2.0 and 3.0" in records.difference(*by_number)
    by_shape = [record(lambda: x[: next(lengths)] + 1, pool)[0].calls[0] for _ in range(2)]
    assert "2 and 3" in records.difference(*by_shape)
    by_value = [record(lambda value=value: x + torch.tensor([value]), pool)[0].calls[0] for value in (1.0, 7.0)]
    assert "'[1.0]' and '[7.0]'" in records.difference(*by_value), "a tensor of the host's values"


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x * x.max().item(),
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x[x > 0],
        lambda x: x[x.nonzero()[:, 0]],
        lambda x: x * int(x.argmax()),
    ],
    ids=["item", "branch", "mask", "nonzero", "int"],
)
def test_what_asks_the_host_is_refused(ask: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(NotCapturable, match=r"aten\..* brings a value of the step to the host in layer"):
        record(lambda: ask(torch.randn(4)))


def test_a_refused_pass_goes_on_to_its_end() -> None:
    """Other ranks wait in the collectives that follow."""
    calls = []

    @outside
    def exchange(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.clone())
        return x * 2

    x = torch.randn(4)

    def step() -> torch.Tensor:
        y = exchange(x + 1)
        return exchange(y[y > 0].sum() + y)

    recorder = Recorder(MemoryPool(), lambda: "layer", lambda name: None)
    with torch.inference_mode(), without_garbage(), pytest.raises(NotCapturable), recorder.recording():
        found = step()
    assert torch.equal(found, step())
    assert [torch.equal(a, b) for a, b in zip(calls[:2], calls[2:], strict=True)] == [True, True]
    del found
    assert recorder.pool.is_free


def small_pool(monkeypatch: pytest.MonkeyPatch, pieces: int) -> MemoryPool:
    """It has no room for more than ``pieces``, whatever their size."""
    pool = MemoryPool()
    pool.empty((1,), (1,), torch.float32)  # memory is there now, which is no piece
    take, left = pool._take, iter(range(pieces))

    def short(size: int) -> tuple[int, int]:
        if next(left, None) is None:
            raise MemoryError("no room")
        return take(size)

    monkeypatch.setattr(pool, "_take", short)
    return pool


def test_a_pass_that_runs_short_of_memory_goes_on_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, x, counts = small_pool(monkeypatch, 5), torch.randn(5, 8), torch.tensor([4])
    recorder = Recorder(pool, lambda: "layer", lambda name: None)
    with torch.inference_mode(), without_garbage(), pytest.raises(MemoryError, match="no room"), recorder.recording():
        found = everything(x, counts)
    assert torch.equal(found, everything(x, counts))
    del found
    assert pool.is_free


def test_nothing_is_recorded_after_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is short for what a call outside of the recording gives."""
    pool, x = small_pool(monkeypatch, 1), torch.randn(4)
    exchange = outside(lambda x: x * 2)
    recorder = Recorder(pool, lambda: "layer", lambda name: None)
    with torch.inference_mode(), without_garbage(), pytest.raises(MemoryError, match="no room"), recorder.recording():
        found = exchange(x + 1).sin()
    assert torch.equal(found, ((x + 1) * 2).sin())
    assert len(recorder.calls) == 2, [call.operator for call in recorder.calls]


@needs_kernels
def test_what_kernels_read_lives_as_long_as_the_recording() -> None:
    held, norm = [torch.randn(3, 16)], torch.ones(16)
    recorder, result = record(lambda: ops.rms_norm(held[0], norm, 1e-6))
    right = result.clone()
    kept = recorder.take_over()
    held.clear()
    others = [torch.full((3, 16), 7.0) for _ in range(64)]  # where a tensor that is gone would lie
    replay(recorder)
    assert torch.equal(result, right)
    del kept, others


def scaled(x: torch.Tensor) -> torch.Tensor:
    return ops.rms_norm(x, torch.tensor([0.5, 1, 2, float("nan")] * 4), 1e-6) + torch.tensor(3.0)


@needs_kernels
def test_a_constant_is_kept() -> None:
    """A tensor that each pass makes of the same values of the host, for a kernel too."""
    pool, x = MemoryPool(), torch.randn(3, 16)
    one, two = (record(lambda: scaled(x), pool) for _ in range(2))
    assert [call.given for call in one[0].calls] == [call.given for call in two[0].calls]
    assert pool.is_free
    recorder, result = two
    for _ in range(2):
        x.normal_()
        pool.poison()
        others = [torch.full((16,), 7.0) for _ in range(64)]  # where a tensor that is gone would lie
        replay(recorder)
        assert torch.equal(result.nan_to_num(9), scaled(x).nan_to_num(9))
        del others


def test_a_constant_that_is_written_to_is_refused() -> None:
    pool, x = MemoryPool(), torch.ones(2)
    for _ in range(2):
        with pytest.raises(NotCapturable, match=r"a tensor of the host's values \[1\.0, 2\.0\] is written to in layer"):
            record(lambda: torch.tensor([1.0, 2.0]).add_(x), pool)
    assert not pool.constants


def test_what_is_marked_is_called_in_every_replay() -> None:
    calls = []

    @outside
    def exchange(x: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
        calls.append(float(x.sum().item()))  # it may ask the host
        return [x[:size] * 2 for size in sizes] + [x]

    def step() -> torch.Tensor:
        parts = exchange(x + 1, [1, 2])
        return torch.cat([*parts]) - 1

    x = torch.randn(3)
    recorder, result = record(step)
    assert recorder.pool.is_free
    x.normal_()
    replay(recorder)
    assert torch.equal(result, step())
    assert calls[1] == calls[2] != calls[0]
    assert [call.operator for call in recorder.calls if "exchange" in call.operator]


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_run_by_one_call(dtype: torch.dtype) -> None:
    weight = ops.pack_linear_weight(torch.randn(64, 32, dtype=dtype))
    norm, x = torch.randn(32, dtype=dtype), torch.randn(4, 32, dtype=dtype)

    def step() -> torch.Tensor:
        return ops.silu_and_mul(ops.linear(ops.rms_norm(x, norm, 1e-6), weight))

    recorder, result = record(step)
    assert [call.operator for call in recorder.calls] == ["vc_rms_norm", "vc_linear", "vc_silu_and_mul"]
    run = records.KernelRun([(call.kernel, call.given) for call in recorder.calls])
    for _ in range(3):
        x.normal_()
        recorder.pool.poison()
        assert run.run() == 0
        assert torch.equal(result, step())


@needs_kernels
def test_a_kernel_that_refuses_is_named_with_its_record() -> None:
    weight, ids, norm = ops.pack_linear_weight(torch.randn(16, 8)), torch.tensor([1, 2]), torch.ones(8)
    recorder, _ = record(lambda: ops.rms_norm(ops.embedding(ids, weight), norm, 1e-6))
    ids[1] = 99
    run = records.KernelRun([(call.kernel, call.given) for call in recorder.calls])
    assert run.run() == 1
    shown = records.describe(recorder.calls[0])
    assert f"={hex(ids.data_ptr())}" in shown, shown
    assert "T=2" in shown, shown


def test_only_one_pass_is_recorded_at_a_time() -> None:
    def nested() -> torch.Tensor:
        return record(lambda: torch.ones(1))[1]

    with pytest.raises(AssertionError, match="recorded already"):
        record(nested)
    record(lambda: torch.ones(1))


def test_errors_of_captures_are_no_refusals() -> None:
    """An operator that refuses with ``NotImplementedError`` is followed by another one: these must come through."""
    assert not issubclass(CaptureError, NotImplementedError)
    assert not issubclass(NotCapturable, NotImplementedError)
