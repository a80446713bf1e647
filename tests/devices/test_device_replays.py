# SPDX-License-Identifier: Apache-2.0
"""Replayed decodes on the device: eager tokens over many steps, whatever the step was captured with; idle time."""

from __future__ import annotations

from typing import Any

import device_models
import device_suite as suite
import pytest
import tiny_models as tiny
import torch

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("device", "nan_memory")]

SIZES = [1, 2, 4]


def captured(name: str, **options: Any) -> Any:
    """An engine with captured steps of ``SIZES``; skipped where this torch, or a kernel, has none."""
    llm = device_models.module_of(name).make_llm(
        name,
        max_num_seqs=4,
        compilation_config={"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": SIZES},
        **options,
    )
    if sorted(llm.llm_engine.worker.runner.graphs.steps) != SIZES:
        llm.shutdown()
        pytest.skip("steps are not captured here: the log says why")
    return llm


@pytest.mark.parametrize("name", ["qwen3-wide", "qwen3-moe-wide", "v3-wide", "qwen3.5-wide"])
def test_replayed_tokens_are_transformers(name: str) -> None:
    """200 decodes of four requests from prompts of 5 tokens and more; captured with lengths that none of them has."""
    llm = captured(name)
    prompts = [tiny.prompt(length) for length in (5, 9, 3, 40)]
    for prompt, got in zip(prompts, tiny.tokens(tiny.generate(llm, prompts, 200)), strict=True):
        device_models.assert_transformers_tokens(name, prompt, got)
    llm.shutdown()


@pytest.mark.parametrize("lengths", [(9, 3), (2, 7, 5)])
def test_a_full_capture_is_replayed_with_padding(lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Four requests in the capture, and in the replay rows of padding beside those of ``lengths``."""
    monkeypatch.setattr(f"{__name__}.SIZES", [4])
    llm = captured("qwen3-wide")
    prompts = [tiny.prompt(length) for length in lengths]
    for prompt, got in zip(prompts, tiny.tokens(tiny.generate(llm, prompts, 40)), strict=True):
        device_models.assert_transformers_tokens("qwen3-wide", prompt, got)
    llm.shutdown()


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "replayed"])
def test_idle_time_between_decodes(eager: bool, record_property: Any) -> None:
    """The share of the time from the first to the last kernel in which the device runs none; told, not judged."""
    if suite.device_type() != "cuda":
        pytest.skip("torch's profiler is asked for CUDA's kernels")
    llm = tiny.make_llm("qwen3-wide", dtype="bfloat16", max_num_seqs=4, enforce_eager=eager)
    prompts = [tiny.prompt(n) for n in (5, 9, 3, 40)]
    tiny.generate(llm, prompts, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        tiny.generate(llm, prompts, 64)
    llm.shutdown()
    spans = sorted(
        (e.time_range.start, e.time_range.end)
        for e in profiler.events()
        if e.device_type is not torch.autograd.DeviceType.CPU
    )
    assert spans
    busy, end = 0.0, spans[0][0]
    for first, last in spans:
        busy += max(last - max(first, end), 0)
        end = max(end, last)
    record_property("idle_share", 1 - busy / (end - spans[0][0]))
