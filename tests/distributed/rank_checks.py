# SPDX-License-Identifier: Apache-2.0
"""What tests do inside a rank: compare bits, watch inputs, count and delay collectives."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from vllm.distributed import observer
from vllm.distributed.device_communicators import base_device_communicator as base
from vllm.distributed.observer import CollectiveRecord


def own_rank() -> int:
    return int(os.environ["RANK"])


def own_world() -> int:
    return int(os.environ["WORLD_SIZE"])


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8).view(-1)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert torch.equal(bits(actual), bits(expected)), f"{actual} is not {expected}"


def warnings_of(name: str) -> list[str]:
    """What the logger of this name warns of from now on."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    return found


@contextlib.contextmanager
def unchanged(*tensors: torch.Tensor) -> Iterator[None]:
    before = [bits(x).clone() for x in tensors]
    yield
    for x, old in zip(tensors, before, strict=True):
        assert torch.equal(bits(x), old), "a collective changed its input"


class Ledger:
    """Observer that keeps the records and delays this rank at random before each collective."""

    def __init__(self, max_delay_s: float = 0.0) -> None:
        self.records: list[CollectiveRecord] = []
        self.errors: list[BaseException] = []
        self.delay = random.Random(os.environ.get("RANK", "0"))
        self.max_delay_s = max_delay_s

    def before(self, record: CollectiveRecord) -> int:
        self.records.append(record)
        if self.max_delay_s:
            time.sleep(self.delay.uniform(0, self.max_delay_s))
        return len(self.records) - 1

    def after(self, token: int, error: BaseException | None = None) -> None:
        if error is not None:
            self.errors.append(error)

    def queued(self, token: int, event: Any) -> None:
        pass


@contextlib.contextmanager
def observed(max_delay_s: float = 0.0) -> Iterator[Ledger]:
    ledger = Ledger(max_delay_s)
    previous = observer.set_collective_observer(ledger)
    try:
        yield ledger
    finally:
        observer.set_collective_observer(previous)


@contextlib.contextmanager
def backend_calls() -> Iterator[list[str]]:
    """The calls that reach torch.distributed, by name."""
    calls: list[str] = []
    sites = [(base, "_all_gather_single"), (base, "_reduce_scatter_single")]
    sites += [(dist, name) for name in ("all_to_all_single", "all_reduce", "all_gather", "reduce_scatter", "broadcast")]
    originals = [(module, name, getattr(module, name)) for module, name in sites]

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return call(*args, **kwargs)

        return wrapper

    for module, name, call in originals:
        setattr(module, name, counted(name, call))
    try:
        yield calls
    finally:
        for module, name, call in originals:
            setattr(module, name, call)


def of_real_rows(honest: Callable[..., None]) -> Callable[..., None]:
    """The attention operator ``honest`` with a habit of devices' kernels: rows of no request stay as they were."""

    def attend(q: Any, keys: Any, values: Any, table: Any, starts: Any, *rest: Any, **host: Any) -> None:
        lengths, scale, out, window = rest
        real = int(starts[-1])
        honest(q[:real], keys, values, table, starts, lengths, scale, out[:real], window, **host)

    return attend


def attend_real_rows_only() -> None:
    """From here on attention leaves rows of no request as they were, the layer's part too."""
    from vllm.kernels import ops
    from vllm.model_executor.layers.attention import attention

    attention.zero_padding_rows = lambda output, slot_mapping: None
    ops.paged_attention = of_real_rows(ops.paged_attention)
