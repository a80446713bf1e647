# SPDX-License-Identifier: Apache-2.0
"""What the files of the device suite share: the device, the sizes, time by the device's clock, and what is reported.

Nothing here asks for a device when it is imported: ranks are forked from a process that has imported it.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm.kernels import table

IMPLEMENTATIONS = table.IMPLEMENTATIONS


@functools.cache
def device_type() -> str:
    """``xpu``, ``cuda``, what ``VLLM_TEST_DEVICE`` says, or nothing where there is no device."""
    if asked := os.environ.get("VLLM_TEST_DEVICE"):
        return asked
    return next((name for name in ("xpu", "cuda") if hasattr(torch, name) and getattr(torch, name).is_available()), "")


def device_count() -> int:
    """Devices that a rank each can have; on the CPU as many as anybody asks for."""
    return 64 if device_type() == "cpu" else getattr(torch, device_type()).device_count()


def no_device() -> str:
    return (
        f"no XPU and no CUDA device: torch {torch.__version__} finds none here. An Arc needs torch's XPU build "
        " and Intel's compute runtime, an NVIDIA card torch's CUDA build and its driver; VLLM_TEST_DEVICE=cpu runs the "
        "suite's code on the CPU at small sizes, which says nothing of a card"
    )


@dataclass(frozen=True)
class Sizes:
    """What the tests compute on. ``rows`` are token rows of which the last are pads."""

    rows: int
    pads: int
    hidden: int
    heads: int
    kv_heads: int
    head_dims: tuple[int, ...]
    experts: int
    top_k: int
    expert_inner: int
    gdn_k_heads: int
    gdn_v_heads: int
    gdn_dim: int
    vocab: int
    contexts: tuple[int, ...]
    """Tokens that each request of a mixed batch has in the cache."""
    # What is timed
    decode_requests: int
    decode_context: int
    prefill_tokens: int
    copy_bytes: int
    matrix: int
    repeats: int
    # The model of Qwen3-30B-A3B's shape
    layers: int
    model_experts: int
    model_vocab: int
    generated: int


REAL = Sizes(
    rows=333, pads=13, hidden=2048, heads=32, kv_heads=8, head_dims=(64, 128, 256), experts=64, top_k=8,
    expert_inner=768, gdn_k_heads=16, gdn_v_heads=32, gdn_dim=128, vocab=32000, contexts=(1, 17, 700, 1024, 2500),
    decode_requests=64, decode_context=4096, prefill_tokens=4096, copy_bytes=1 << 30, matrix=8192, repeats=9,
    layers=6, model_experts=128, model_vocab=151936, generated=17,
)  # fmt: skip
SMALL = Sizes(
    rows=21, pads=5, hidden=64, heads=4, kv_heads=2, head_dims=(16, 32), experts=8, top_k=2,
    expert_inner=32, gdn_k_heads=2, gdn_v_heads=4, gdn_dim=32, vocab=96, contexts=(1, 17, 40),
    decode_requests=3, decode_context=40, prefill_tokens=32, copy_bytes=1 << 20, matrix=64, repeats=1,
    layers=2, model_experts=8, model_vocab=160, generated=3,
)  # fmt: skip


def sizes() -> Sizes:
    return SMALL if device_type() == "cpu" and os.environ.get("VLLM_TEST_SIZES") != "real" else REAL


def synchronize() -> None:
    if device_type() != "cpu":
        getattr(torch, device_type()).synchronize()


@functools.cache
def _busy_work() -> tuple[Tensor, Tensor]:
    """Noise, since a product of constants takes less power and so less time; and room for its square."""
    noise = torch.randn(sizes().matrix, sizes().matrix, device=device_type()).to(torch.bfloat16)
    return noise, torch.empty_like(noise)


def seconds(run: Callable[[], Any], repeats: int | None = None) -> float:
    """The median time of ``run``, by the device's events. The device is kept busy while the host queues a call, so that
    only what the call itself waits for counts."""
    repeats = repeats or sizes().repeats
    for _ in range(2):
        run()
    synchronize()
    if device_type() == "cpu":
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)
    module = getattr(torch, device_type())
    pairs = [[module.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    noise, product = _busy_work()
    for begin_event, end_event in pairs:
        torch.mm(noise, noise, out=product)
        begin_event.record()
        run()
        end_event.record()
    synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs) / 1e3


@dataclass(frozen=True)
class Card:
    """What the card does at best, measured here: bytes read and written by a copy, operations of a bfloat16 product."""

    bytes_per_s: float
    flops_per_s: float


@functools.cache
def card() -> Card:
    s, device = sizes(), device_type()
    source = torch.ones(s.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copying = seconds(lambda: target.copy_(source))
    noise, product = _busy_work()
    multiplying = seconds(lambda: torch.mm(noise, noise, out=product))
    return Card(2 * s.copy_bytes / copying, 2 * s.matrix**3 / multiplying)


def needs(operator: str, implementation: str) -> str | None:
    """None where ``implementation`` has ``operator`` on this device, else why a runner has to go without."""
    if (missing := table.why_not(implementation, device_type())) is not None:
        return missing
    module: Any = table._module(implementation)
    if not hasattr(module, operator):
        return f"{implementation} has no {operator}"
    return module.why_not(operator) if hasattr(module, "why_not") else None


def candidates(operator: str) -> list[str]:
    """The implementations that the table knows for this operator on this device, plain torch last; in Triton's
    interpreter, Triton's too."""
    row = table.TABLE[operator][table.DEVICES.index(device_type())] if device_type() in table.DEVICES else ""
    interpreted = ["triton"] if device_type() == "cpu" and table.why_not("triton", "cpu") is None else []
    return [*row.split(), *interpreted, "reference"]


def chosen(operator: str) -> str:
    return table.choose(device_type())[operator].implementation


# What the report tells beside the tests' outcomes, in the order in which it was measured.
MEASURED: list[dict[str, Any]] = []


def measured(what: str, **values: Any) -> None:
    MEASURED.append({"what": what, **values})
