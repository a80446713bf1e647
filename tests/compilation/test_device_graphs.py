# SPDX-License-Identifier: Apache-2.0
"""Steps captured as a device's graphs, on a device that is late (``late_device.py``) and has such graphs."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import late_device
import pytest
import tiny_models as tiny
import torch

from vllm.compilation import recording
from vllm.compilation.cuda_graph import CapturedStep, compare
from vllm.compilation.device_graph import GRAPH, DevicePool, DeviceRecorder
from vllm.compilation.recording import CaptureError, NotCapturable, without_garbage
from vllm.kernels import ops, reference
from vllm.platforms import CpuPlatform, CudaPlatform, XpuPlatform

PROMPTS = [tiny.prompt(n) for n in (9, 3, 17)]


def run(
    monkeypatch: pytest.MonkeyPatch, model: str = "qwen3", tokens: int = 24, ask_the_host: str = "", **options: Any
) -> Any:
    """(tokens of each prompt, replays, rows → captured step)."""
    options = {"max_num_seqs": 4, "cudagraph_capture_sizes": [1, 4], **options}
    with late_device.stand_in(monkeypatch, graphs=True, ask_the_host=ask_the_host) as device:
        llm = tiny.make_llm(model, **options)
        steps, replays = dict(llm.llm_engine.worker.runner.graphs.steps), device.replays
        found = tiny.tokens(tiny.generate(llm, PROMPTS, tokens))
        replays = device.replays - replays
        llm.shutdown()
    return found, replays, steps


def expected(model: str = "qwen3", tokens: int = 24) -> list[tuple[int, ...]]:
    return [tiny.greedy(model, prompt, tokens) for prompt in PROMPTS]


@pytest.mark.parametrize("model", ["qwen3", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_decodes_are_replayed_and_right(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """Lengths grow over block boundaries, in a step whose smallest size holds three requests and one of padding."""
    found, replays, steps = run(monkeypatch, model)
    assert found == expected(model)
    assert sorted(steps) == [1, 4]
    assert replays == 23
    assert {step.num_pieces for step in steps.values()} == {1}


def test_what_is_outside_splits_a_step_into_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that takes the lengths from the host gets those of each step, between the graphs."""
    attend = ops.paged_attention
    monkeypatch.setattr(ops, "paged_attention", recording.outside(attend))
    found, replays, steps = run(monkeypatch, tokens=12, ask_the_host="paged_attention")
    assert found == expected(tokens=12)
    assert {step.num_pieces for step in steps.values()} == {5}, "two layers"
    assert steps[4].outside == ["paged_attention"]
    assert replays == 11 * 3


# --- faults put back ------------------------------------------------------------------------------------------------


def test_put_back_lengths_of_the_host_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replay would see those of the capture."""
    with pytest.raises(CaptureError, match=r"the captured step of 4 rows differs from the eager one in rows \[0"):
        run(monkeypatch, ask_the_host="paged_attention")


def test_an_operator_that_asks_the_host_stays_between_the_graphs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = reference.silu_and_mul

    def asks(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        x.sum().item()
        return plain(x, out)

    monkeypatch.setattr(reference, "silu_and_mul", asks)
    found, replays, steps = run(monkeypatch, tokens=4)
    assert found == expected(tokens=4)
    assert sorted(steps) == [1, 4]
    assert {step.num_pieces for step in steps.values()} == {5}, "two layers"
    assert replays == 3 * 3
    told = "silu_and_mul runs eagerly between the pieces of captured steps: aten.item.default brings a value of the "
    assert caplog.text.count(f"{told}step to the host in silu_and_mul of ") == 1


@pytest.mark.slow
def test_the_sizes_that_memory_does_not_hold_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begin, tried = DevicePool.begin_graph, list[int]()

    def short(self: DevicePool) -> Any:
        tried.append(1)
        if len(tried) == 1:
            raise RuntimeError("level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)")
        return begin(self)

    monkeypatch.setattr(DevicePool, "begin_graph", short)
    found, replays, steps = run(monkeypatch, tokens=4)
    assert found == expected(tokens=4)
    assert sorted(steps) == [1]
    assert replays == 0
    assert caplog.text.count("steps of 4 rows are not captured: memory is short: ") == 1


# --- one pass ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[late_device.Device]:
    with late_device.stand_in(monkeypatch, graphs=True) as device, torch.inference_mode():
        yield device


def passes(function: Callable[[int], Any]) -> tuple[CapturedStep, Any]:
    """``function`` of 0 and of 1 as the two passes of a capture."""
    pool, layer = DevicePool(late_device.HERE, late_device.StandInPlatform()), lambda: "layers.7"
    recorders = [DeviceRecorder(pool, layer, lambda _: None, captures) for captures in (False, True)]
    results = []
    with without_garbage():
        for i, recorder in enumerate(recorders):
            with recorder.recording():
                results.append(function(i))
    (one, first_kept), (two, kept) = (recorder.take_over() for recorder in recorders)
    compare(one, two, 4)
    del first_kept
    outside = [call.operator for call in two if call.replay is not None and call.operator != GRAPH]
    return CapturedStep(4, [c.replay for c in two if c.replay], outside, pool.alias(results[1]), {}, kept), results[1]


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(late_device.HERE)


def test_pieces_hand_their_results_on(device: late_device.Device) -> None:
    """Two calls outside, one of a tensor that a graph made and one in place, of what the first gave."""
    x, w = randn(4, 8), randn(8)
    calls = []

    @recording.outside
    def summed(y: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        calls.append(scale)
        return y.sum(0, keepdim=True).expand(4, 8).contiguous() * scale

    @recording.outside
    def doubled(y: torch.Tensor) -> None:
        y.mul_(2)

    def forward(_: int = 0) -> torch.Tensor:
        y = ops.rms_norm(x, w, 1e-6)
        y = summed(y, scale=0.5) + y
        doubled(y)
        return y * w

    step, _ = passes(forward)
    assert step.num_pieces == 5
    assert step.outside == [f"{test_pieces_hand_their_results_on.__name__}.<locals>.{n}" for n in ("doubled", "summed")]
    for _ in range(3):
        x.copy_(randn(4, 8))
        right, before = forward().cpu(), len(calls)
        assert torch.equal(step.replay({}).cpu(), right)
        assert len(calls) == before + 1


def test_a_value_of_the_host_is_named_with_operator_and_layer(device: late_device.Device) -> None:
    x, w = randn(4, 8), randn(8)
    with pytest.raises(CaptureError, match=r"in layers\.7: rms_norm was given argument 2: '0\.1' and '0\.2'"):
        passes(lambda i: ops.rms_norm(x, w, 0.1 + 0.1 * i))


def test_a_tensor_that_is_made_anew_for_each_step_is_found(device: late_device.Device) -> None:
    """Were the first one not kept, the second could lie where it lay."""
    w = randn(8)
    made = iter([randn(4, 8) for _ in range(2)])
    with pytest.raises(CaptureError, match=r"rms_norm was given argument 0\.0: \d+ and \d+"):
        passes(lambda _: ops.rms_norm(next(made), w, 1e-6))


def test_what_a_graph_reads_lives_as_long_as_it(device: late_device.Device) -> None:
    """A device's graph holds addresses; those of the stand-in hold the tensors, so what the step keeps is looked at."""
    x, w = randn(4, 8), randn(8)
    step, _ = passes(lambda _: ops.rms_norm(x.exp(), w, 1e-6))
    kept = {one.data_ptr() for one in step._kept if isinstance(one, torch.UntypedStorage)}
    assert kept == {x.untyped_storage().data_ptr(), w.untyped_storage().data_ptr()}, "and nothing that the pass made"


def test_a_branch_of_the_host_is_found(device: late_device.Device) -> None:
    x = randn(4, 8)
    with pytest.raises(CaptureError, match="the model asks the host"):
        passes(lambda i: x.exp() if i else x.sin())
    with pytest.raises(CaptureError, match="the model asks the host"):
        passes(lambda i: x.exp().exp() if i else x.exp())


def test_what_a_pass_makes_may_lie_anywhere(device: late_device.Device) -> None:
    x, held = randn(4, 8), []

    def forward(i: int) -> torch.Tensor:
        held.extend(torch.empty_like(x) for _ in range(3))
        return x.exp()[1:].sin().add_(1)

    step, _ = passes(forward)
    x.copy_(randn(4, 8))
    assert torch.equal(step.replay({}).cpu(), (x.exp()[1:].sin() + 1).cpu())


WAITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "copy_": lambda x: torch.empty(4, 8).copy_(x),
    "values of the step": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "index": lambda x: x[x > 0],
    "repeat_interleave": lambda x: torch.repeat_interleave((x[0] > 0).int()),
    "brings values of the host": lambda x: torch.ones(4).to(x.device),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_for_the_device_is_refused(device: late_device.Device, name: str) -> None:
    """In each of the two passes, which go on to their end: other ranks may be in them."""
    x, ended = randn(4, 8), list[int]()

    def forward(i: int) -> None:
        WAITS[name](x)
        ended.append(i)

    with pytest.raises(NotCapturable, match=rf"{name}.* in layers\.7"):
        passes(forward)
    assert ended == [0]
    assert device.capturing is None
    assert recording.active is None


def test_a_capture_that_runs_short_of_memory_goes_on_eagerly(
    monkeypatch: pytest.MonkeyPatch, device: late_device.Device
) -> None:
    """Other ranks wait in the pass's collectives, and these may be sized by what it computes."""
    x, seen = randn(4, 8), list[torch.Tensor]()
    dispatch = late_device.Device.__torch_dispatch__

    def short(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.sin.default and self.capturing is not None:
            raise torch.OutOfMemoryError("XPU out of memory")
        return dispatch(self, func, types, args, kwargs)

    collective = recording.outside(lambda y: seen.append(y.clone()))

    def forward(_: int) -> torch.Tensor:
        y = x.exp() + 1
        collective(y)
        z = y * 2
        y = z.sin()
        collective(y)
        return y

    monkeypatch.setattr(late_device.Device, "__torch_dispatch__", short)
    with pytest.raises(torch.OutOfMemoryError, match="XPU out of memory"):
        passes(forward)
    assert len(seen) == 4
    right = (x.exp() + 1).cpu()
    for found, values in zip(seen, (right, (right * 2).sin()) * 2, strict=True):
        assert torch.equal(found.cpu(), values)
    assert device.capturing is None


def test_what_a_capture_does_not_bear_is_told_of(device: late_device.Device) -> None:
    x = randn(4, 8)

    def forward(i: int) -> torch.Tensor:
        y = x.exp()
        if i:
            torch.xpu.Event().record()
            device.wait("event")
        return y

    with pytest.raises(NotCapturable, match=r"layers\.7: event: operation not permitted"):
        passes(forward)
    assert device.capturing is None


def test_launches_of_triton_kernels_are_compared(monkeypatch: pytest.MonkeyPatch, device: late_device.Device) -> None:
    class JITFunction:
        __name__ = "_attend"

        def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            args[0].add_(args[1])

    monkeypatch.setitem(sys.modules, "triton.runtime.jit", types.SimpleNamespace(JITFunction=JITFunction))
    x, kernel, run = randn(4), JITFunction(), JITFunction.run
    passes(lambda _: kernel.run(x, 3, grid=(1,), warmup=False, BLOCK=16) or x)
    with pytest.raises(CaptureError, match=r"_attend was given argument 1\.1: 95 and 96"):
        passes(lambda i: kernel.run(x, 95 + i, grid=(1,), warmup=False))
    with pytest.raises(CaptureError, match=r"_attend was given argument 0\.0: 1 and 2"):
        passes(lambda i: kernel.run(x, 3, grid=(1 + i,), warmup=False))
    assert JITFunction.run is run


# --- the platforms' choices -------------------------------------------------------------------------------------------


def test_platforms_choose_what_is_known_to_be_sound(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert CpuPlatform().choose_graph_mode(None, 4) == "FULL_AND_PIECEWISE"
    for platform in (CudaPlatform(), XpuPlatform()):
        assert platform.choose_graph_mode(None, 1) == "FULL_DECODE_ONLY"
        assert platform.choose_graph_mode(None, 2) == "NONE"
        caplog.clear()
        assert platform.choose_graph_mode("FULL", 2) == "FULL"
        assert "cudagraph_mode FULL: asked for; the collectives of 2 ranks split each step" in caplog.text
        assert ("pytorch #189403" in caplog.text) == platform.is_xpu()
    monkeypatch.delattr(torch.xpu, "XPUGraph")
    assert XpuPlatform().choose_graph_mode(None, 1) == "NONE"
    caplog.clear()
    assert XpuPlatform().choose_graph_mode("FULL", 1) == "NONE"
    assert "has no torch.xpu.XPUGraph: steps run eagerly" in caplog.text
