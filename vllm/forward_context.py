# SPDX-License-Identifier: Apache-2.0
"""What one forward pass knows beyond its tensors, and where in the run this process is.

Layers read the context by name (``get_forward_context().attn_metadata[layer_name]``), so a model file passes only
activations. Each thread has a :class:`Place` of its own, whose layer the attention and MoE layers set in passing: a
thread that stands for the device is in one step while the host prepares the next, and what fails quotes its own place.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(eq=False)
class Place:
    """Where a thread is in the run: its step, -1 before the first, and its layer, empty outside the model. After a
    forward pass that failed it is the layer that failed."""

    thread: int
    step: int = -1
    layer: str = ""

    def __str__(self) -> str:
        return f"step {self.step}, layer {self.layer or 'none'}"


class _Thread(threading.local):
    def __init__(self) -> None:
        self.place = Place(threading.get_ident())


_thread = _Thread()
device_place: Place | None = None
"""That of the thread that stands for the device, while it works."""


def get_place() -> Place:
    """The calling thread's."""
    return _thread.place


def set_current_step(step: int) -> None:
    """Name the step that this thread is in."""
    _thread.place.step = step


def set_current_layer(layer_name: str) -> None:
    """Name the layer that this thread computes."""
    _thread.place.layer = layer_name


@contextmanager
def working() -> Iterator[None]:
    """Around what the calling thread does in the place of a device."""
    global device_place
    device_place = _thread.place
    try:
        yield
    finally:
        device_place = None


@dataclass(frozen=True)
class DPMetadata:
    """The token rows that every DP rank runs in this step, padding included.

    ``num_tokens_across_dp_cpu``: int32 ``[dp_size]`` on the host, the same on all ranks.
    """

    num_tokens_across_dp_cpu: torch.Tensor
    dp_rank: int

    @staticmethod
    def make(num_tokens_across_dp: Sequence[int] | torch.Tensor, dp_rank: int, num_tokens_padded: int) -> DPMetadata:
        """The agreed counts; this rank's own entry must be the rows that it really runs (``num_tokens_padded``)."""
        across = num_tokens_across_dp
        counts = tuple(across.tolist() if isinstance(across, torch.Tensor) else across)
        assert counts[dp_rank] == num_tokens_padded, (
            f"DP rank {dp_rank} agreed on {counts[dp_rank]} rows (all ranks: {list(counts)}) but runs "
            f"{num_tokens_padded}"
        )
        return _metadata_of(counts, dp_rank)

    @property
    def num_tokens_across_dp(self) -> tuple[int, ...]:
        return tuple(self.num_tokens_across_dp_cpu.tolist())

    def sp_local_sizes(self, sp_size: int) -> tuple[int, ...]:
        """Rows that each EP rank sends when the ``sp_size`` TP ranks of a DP group share its rows.

        Entry ``dp_rank * sp_size + tp_rank`` is ``ceil(rows / sp_size)``: [26, 30] over 2 gives (13, 13, 15, 15).
        """
        return sp_local_sizes(self.num_tokens_across_dp, sp_size)


@functools.lru_cache(maxsize=256)
def _metadata_of(counts: tuple[int, ...], dp_rank: int) -> DPMetadata:
    return DPMetadata(torch.tensor(counts, dtype=torch.int32, device="cpu"), dp_rank)


def sp_local_sizes(num_tokens_across_dp: Sequence[int], sp_size: int) -> tuple[int, ...]:
    """See :meth:`DPMetadata.sp_local_sizes`."""
    return tuple(-(-n // sp_size) for n in num_tokens_across_dp for _ in range(sp_size))


@dataclass(frozen=True)
class ForwardContext:
    """One forward pass.

    Attributes:
        attn_metadata: layer name → that layer's attention metadata; None in profiling runs.
        static_forward_context: layer name → layer, as the model registered them.
        dp_metadata: the rows of all DP ranks; None where each rank computes for itself (DP size 1).
        batch_plan: the step's frozen plan, of the runner's own type.
        slot_mapping: int64 [T], each row's cache slot, negative in pad rows; None where no layer asks which those are.
        is_dummy: the rows are all padding (idle rank, warm-up), so diagnostics stay silent.
        step_buffers: the engine's ``StepBuffers`` for layer outputs; None where layers allocate.
        additional: values of one backend's own.
    """

    attn_metadata: Mapping[str, Any] | None
    static_forward_context: Mapping[str, Any] = field(default_factory=dict)
    dp_metadata: DPMetadata | None = None
    batch_plan: Any = None
    slot_mapping: torch.Tensor | None = None
    is_dummy: bool = False
    step_buffers: Any = None
    additional: Mapping[str, Any] = field(default_factory=dict)


_context: ForwardContext | None = None


def get_forward_context() -> ForwardContext:
    """The running forward pass's context; asserts that there is one."""
    assert _context is not None, "no forward context: call the model inside set_forward_context(...)"
    return _context


def is_forward_context_available() -> bool:
    return _context is not None


class _Running:
    """A context while it is entered; a class, since a generator takes three times as long to enter and to leave."""

    def __init__(self, context: ForwardContext, step: int | None) -> None:
        self.context, self.step = context, step
        self.outer: ForwardContext | None = None

    def __enter__(self) -> ForwardContext:
        global _context
        self.outer, _context = _context, self.context
        if self.step is not None:
            set_current_step(self.step)
        set_current_layer("")
        return self.context

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        global _context
        _context = self.outer
        if kind is None:
            set_current_layer("")


def set_forward_context(
    attn_metadata: Mapping[str, Any] | None,
    static_forward_context: Mapping[str, Any] | None = None,
    *,
    dp_metadata: DPMetadata | None = None,
    batch_plan: Any = None,
    slot_mapping: torch.Tensor | None = None,
    is_dummy: bool = False,
    step_buffers: Any = None,
    step: int | None = None,
    additional: Mapping[str, Any] | None = None,
) -> AbstractContextManager[ForwardContext]:
    """Run one forward pass under a context; ``step`` names it for diagnostics. Nested passes restore the outer one."""
    context = ForwardContext(
        attn_metadata, static_forward_context or {}, dp_metadata, batch_plan, slot_mapping, is_dummy, step_buffers,
        additional or {},
    )  # fmt: skip
    return _Running(context, step)


def run_in_context(context: ForwardContext, step: int) -> AbstractContextManager[ForwardContext]:
    """``set_forward_context`` of one that was made before."""
    return _Running(context, step)
