# SPDX-License-Identifier: Apache-2.0
"""A stand-in for an accelerator, on the CPU: what it computes is right, and it is late.

``Device`` is a dispatch mode under which torch has a device ``xpu``. Its tensors have no memory that a host kernel or
numpy could take for its own, none is fp64, and an operator refuses to mix them with the host's. Work is queued in order
and done only when the host waits, so that a copy reads its pinned source as late as a device may: memory that is
written before shows in the result. What makes the host wait is counted, with the place in the engine that it came from:

- values that go to the host: ``item``, ``tolist``, ``cpu``, ``bool``, a copy that blocks;
- results whose size only the device knows: ``nonzero``, ``unique``, a boolean index;
- copies to the device from memory that is not pinned, or that block;
- an event that is waited for and has not come, and a barrier.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from poison import library
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only

import vllm
from vllm.compilation import device_graph
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.observer import mark_queued
from vllm.engine import arg_utils
from vllm.kernels import reference, table
from vllm.platforms import XpuPlatform
from vllm.platforms.interface import PeakMemory
from vllm.v1.worker import gpu_worker, settings

aten = torch.ops.aten
HERE, HOST = torch.device("xpu", 0), torch.device("cpu")
_ENGINE = str(Path(vllm.__file__).parent)

# The size of the result is in the values.
_SIZED_BY_VALUES = {
    aten._local_scalar_dense,
    aten._unique2,
    aten.bincount,
    aten.equal,
    aten.masked_select,
    aten.nonzero,
    aten.unique_consecutive,
    aten.unique_dim,
}
_INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._unsafe_index}
# Composite operators that a device runs as one.
_WHOLE = {aten.linear, aten.matmul, aten.scaled_dot_product_attention}


# Operators that a device has kernels for. Their twins, which read values on the host as they please, stand for them.
KERNELS: dict[str, Callable[..., Any]] = {
    "reshape_and_cache": lambda *_: None,
    "paged_attention": lambda *_: None,
    "fused_experts": lambda x, *_: x.shape,
    "gated_delta_net": lambda x, weights, conv, state, *_: (x.shape[0], state.shape[1] * state.shape[3]),
}


class DeviceTensor(torch.Tensor):
    """Its values are in ``memory`` once the queue has come to them."""

    memory: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, memory: torch.Tensor) -> DeviceTensor:
        assert memory.dtype != torch.float64, "the device has no fp64"
        layout = {"strides": memory.stride(), "storage_offset": memory.storage_offset(), "dtype": memory.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, memory.shape, device=HERE, **layout)
        made.memory = memory
        return made

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.memory.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.memory.untyped_storage()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert xpu:0 device type tensor to numpy")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on a tensor of the stand-in device, outside of it")


def _is_ours(device: Any) -> bool:
    return device is not None and torch.device(device).type == HERE.type


def _memory(values: Any) -> Any:
    """``values`` with tensors of the device as the memory behind them, and the host for the device."""
    values = tree_map_only(DeviceTensor, lambda x: x.memory, values)
    return tree_map_only(torch.device, lambda device: HOST if _is_ours(device) else device, values)


def _copy(value: Any) -> Any:
    """Of host tensors, and of records with those of the device as ``_memory`` has them."""
    if dataclasses.is_dataclass(value):
        made = copy.copy(value)
        for name, held in vars(value).items():
            object.__setattr__(made, name, _memory(held))
        return made
    return value.clone() if isinstance(value, torch.Tensor) else value


def _on_meta(values: Any) -> Any:
    def meta(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    values = tree_map_only(torch.Tensor, lambda x: meta(x) if isinstance(x, DeviceTensor) or x.dim() else x, values)
    return tree_map_only(torch.device, lambda device: torch.device("meta") if _is_ours(device) else device, values)


class Device(TorchDispatchMode):
    """``waits``: for what and where in the engine the host waited → how often. Not ``late``: all is done at once."""

    def __init__(self, late: bool = True) -> None:
        super().__init__()
        self.late = late
        self.waits: Counter[str] = Counter()
        self.bytes_uploaded = 0
        self.launched = self.done = 0
        self._queue: deque[Callable[[], None]] = deque()
        self.capturing: list[Callable[[], None]] | None = None
        self.replays = 0
        self._pinned: dict[int, torch.UntypedStorage] = {}

    # --- the queue --------------------------------------------------------------------------------------------------

    def _launch(self, work: Callable[[], None]) -> None:
        if self.capturing is not None:
            self.capturing.append(work)
            return
        self._queue.append(work)
        self.launched += 1
        if not self.late:
            self.run_until(self.launched)

    def run_until(self, count: int) -> None:
        """Do the first ``count`` of all that was launched."""
        with _disable_current_modes(), torch.inference_mode():
            while self.done < count:
                self._queue.popleft()()
                self.done += 1

    def wait(self, what: str, count: int | None = None) -> None:
        """The host waits, until all that it launched is done or the first ``count``."""
        if self.capturing is not None:
            raise RuntimeError(f"{what}: operation not permitted when stream is capturing")
        frame: Any = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.startswith(_ENGINE):
            frame = frame.f_back
        where = "outside the engine"
        if frame is not None:
            where = f"{frame.f_code.co_filename[len(_ENGINE) + 1 :]}:{frame.f_code.co_name}"
        self.waits[f"{what} in {where}"] += 1
        self.run_until(self.launched if count is None else count)

    # --- memory of the host -----------------------------------------------------------------------------------------

    def _pin(self, x: torch.Tensor) -> torch.Tensor:
        self._pinned[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    def _is_pinned(self, x: torch.Tensor) -> bool:
        return x.untyped_storage().data_ptr() in self._pinned

    # --- operators --------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        op = func.overloadpacket
        if op in (aten.pin_memory, aten._pin_memory):
            return self._pin(args[0].clone())
        if op is aten.is_pinned:
            return not isinstance(args[0], DeviceTensor) and self._is_pinned(args[0])
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        ours = [x for x in tensors if isinstance(x, DeviceTensor)]
        if not ours and not _is_ours(kwargs.get("device")):
            pinned = kwargs.pop("pin_memory", False)
            out = func(*args, **kwargs)
            return self._pin(out) if pinned else out
        if op not in _WHOLE and func._can_decompose():
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        if op is aten._to_copy:
            return self._copied(func, *args, **kwargs)
        if op is aten.copy_ and len({isinstance(x, DeviceTensor) for x in args[:2]}) == 2:
            return self._transfer(args[0], args[1], kwargs.get("non_blocking", len(args) > 2 and args[2]))
        if not tensors:
            kwargs.pop("pin_memory", None)
            return DeviceTensor(func(*args, **_memory(kwargs)))
        if op in _INDEXING:
            args = (args[0], [self._index(x) for x in args[1]], *args[2:])
            tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        if mixed := [x for x in tensors if not isinstance(x, DeviceTensor) and x.dim()]:
            raise RuntimeError(f"{func} mixes devices: a host tensor {tuple(mixed[0].shape)} with one on {HERE}")
        if op in _SIZED_BY_VALUES or (op is aten.repeat_interleave and kwargs.get("output_size") is None):
            self.wait(op.__name__)
            return tree_map_only(torch.Tensor, DeviceTensor, func(*_memory(args), **_memory(kwargs)))
        if func.is_view:
            # A view has the version counter of its base, if that has one.
            with torch.inference_mode(ours[0].is_inference()):
                return tree_map_only(torch.Tensor, DeviceTensor, func(*_memory(args), **_memory(kwargs)))
        return self._compute(func, args, kwargs)

    def _index(self, index: torch.Tensor | None) -> torch.Tensor | None:
        if index is None:
            return None
        if not isinstance(index, DeviceTensor):
            self.wait("index from the host")
            return DeviceTensor(index.clone())
        if index.dtype in (torch.bool, torch.uint8):
            self.wait("boolean index")
        return index

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Queue the operator; the shapes of what it makes are known now."""
        written = [
            kwargs.get(argument.name, args[at] if at < len(args) else None)
            for at, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        given = tree_map_only(torch.Tensor, lambda x: x if isinstance(x, DeviceTensor) else x.clone(), (args, kwargs))
        args_then, kwargs_then = _memory(given)
        if written:
            self._launch(lambda: func(*args_then, **kwargs_then))
            return written[0] if len(func._schema.returns) == 1 else tuple(written)
        bool_index = func.overloadpacket in _INDEXING and any(x is not None and x.dtype == torch.bool for x in args[1])
        if bool_index:  # it was waited for
            return tree_map_only(torch.Tensor, DeviceTensor, func(*args_then, **kwargs_then))
        meta_args, meta_kwargs = _on_meta((args, kwargs))
        made = tree_map_only(
            torch.Tensor,
            lambda x: DeviceTensor(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)),
            func(*meta_args, **meta_kwargs),
        )

        def work() -> None:
            found = func(*args_then, **kwargs_then)
            for to, values in zip(tree_flatten(made)[0], tree_flatten(found)[0], strict=True):
                if isinstance(to, DeviceTensor):
                    to.memory.copy_(values)

        self._launch(work)
        return made

    def kernel(self, function: Callable[..., Any], shape_of: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` as one operator of the device. ``shape_of`` its arguments: that of what it returns, if anything.

        What it reads of the host, it reads when it is launched.
        """

        def call(*args: Any) -> DeviceTensor | None:
            if not isinstance(args[0], DeviceTensor):
                return function(*args)
            then = [_memory(x if isinstance(x, DeviceTensor) else _copy(x)) for x in args]
            shape = shape_of(*args)
            if shape is None:
                self._launch(lambda: function(*then))
                return None
            made = torch.empty(shape, dtype=args[0].dtype, device=HERE)
            self._launch(lambda: made.memory.copy_(function(*then)))
            return made

        return call

    def collectives(self) -> Callable[..., None]:
        """In the place of ``DeviceCommunicatorBase._run``, over Gloo."""

        def run(group: DeviceCommunicatorBase, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            kwargs.pop("device_ids", None)
            if collective is dist.barrier:
                self.wait("barrier")
            then = _memory(args)
            self._launch(lambda: collective(*then, **kwargs, group=group.device_group))
            mark_queued(HERE)

        return run

    def _copied(self, func: Any, x: torch.Tensor, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        to_us = isinstance(x, DeviceTensor) if device is None else _is_ours(device)
        if to_us and isinstance(x, DeviceTensor):
            return self._compute(func, (x,), kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
        if to_us:
            # A change of dtype on the way makes a new tensor on the host first.
            source = func(x, **kwargs) if kwargs.get("dtype", x.dtype) != x.dtype else x
            out: torch.Tensor = DeviceTensor(torch.empty_like(source))
            return self._transfer(out, source, non_blocking)
        changed = self._compute(func, (x,), kwargs) if kwargs.get("dtype", x.dtype) != x.dtype else x
        out = torch.empty_like(changed.memory)
        return self._transfer(self._pin(out) if non_blocking else out, changed, non_blocking)

    def _transfer(self, to: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        """Between the host and the device; only a copy of pinned memory goes on by itself."""
        host = source if isinstance(to, DeviceTensor) else to
        self.bytes_uploaded += source.nbytes if host is source else 0
        target, values = _memory((to, source))
        if not self._is_pinned(host) or not non_blocking:
            self.wait("copy to the device" if host is source else "copy to the host")
        self._launch(lambda: target.copy_(values))
        if not self._is_pinned(host) or not non_blocking:
            self.run_until(self.launched)
        return to


def event_of(device: Device) -> type:
    class Event:
        """As ``torch.xpu.Event``: comes when all that was launched before ``record`` is done."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.after = 0

        def record(self, stream: Any = None) -> None:
            self.after = device.launched

        def query(self) -> bool:
            return device.done >= self.after

        def synchronize(self) -> None:
            if not self.query():
                device.wait("event", self.after)

    return Event


def graph_of(device: Device) -> type:
    class Graph:
        """As ``torch.xpu.XPUGraph``: what is launched while it is captured is done in each replay, and not before."""

        def __init__(self) -> None:
            self.work: list[Callable[[], None]] = []

        def capture_begin(self, pool: Any = None) -> None:
            assert device.capturing is None, "a graph is captured already"
            device.capturing = self.work

        def capture_end(self) -> None:
            assert device.capturing is self.work
            device.capturing = None

        def replay(self) -> None:
            assert device.capturing is None, "a graph is captured"
            device.replays += 1
            for work in self.work:
                device._launch(work)

        def reset(self) -> None:
            self.work = []

    return Graph


class Stream:
    """There is one queue."""

    def __init__(self, device: Any = None) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass


class StandInPlatform(XpuPlatform):
    has_graphs = False

    def why_no_graphs(self) -> str | None:
        return None if self.has_graphs else "the stand-in has none"

    @property
    def dist_backend(self) -> str:
        return "gloo"

    def import_dist_backend(self) -> None:
        pass

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int | None:
        return None

    def get_device(self, local_rank: int) -> torch.device:
        return HERE

    def device_name(self, device: torch.device) -> str:
        return "stand-in"

    def memory_info(self, device: torch.device) -> tuple[int, int]:
        return 1 << 33, 1 << 33

    def synchronize(self) -> None:
        torch.xpu.synchronize()

    def empty_cache(self) -> None:
        pass

    def set_device(self, device: torch.device) -> None:
        pass

    @contextmanager
    def measure_peak(self, device: torch.device) -> Iterator[PeakMemory]:
        self.synchronize()
        yield PeakMemory()
        self.synchronize()


@contextmanager
def stand_in(monkeypatch: pytest.MonkeyPatch, late: bool = True, graphs: bool = False) -> Iterator[Device]:
    """Inside, engines run on the stand-in device; with ``late`` its work is done when the host waits and not before.

    Ranks that exchange something take one that is not late: the work of one would wait for the host of another.
    """
    device, platform = Device(late), StandInPlatform()
    platform.has_graphs = graphs
    with monkeypatch.context() as patch:
        if graphs:
            patch.setattr(reference, "ASKS_THE_HOST", ())
            patch.setattr(torch.xpu, "XPUGraph", graph_of(device))
            patch.setattr(torch.xpu, "Stream", Stream)
            patch.setattr(torch.xpu, "current_stream", lambda *_: Stream())
            patch.setattr(torch.xpu, "stream", lambda *_: nullcontext())
            patch.setattr(torch.xpu, "graph_pool_handle", lambda: (0, 1))
            patch.setattr(torch.xpu, "empty_cache", lambda: None)
            patch.setattr(torch.xpu, "mem_get_info", lambda *_: (1 << 33, 1 << 33))
            # The works of a graph hold their memory, which is never another tensor's.
            patch.setattr(device_graph, "bare_alias", lambda x: DeviceTensor(x.memory))
            patch.setattr(device_graph.DevicePool, "is_free", True)
        patch.setenv("VLLM_KERNELS", "reference")
        for operator, shape_of in KERNELS.items():
            patch.setattr(reference, operator, device.kernel(getattr(reference, operator), shape_of))
        patch.setattr("vllm.platforms.get_platform", lambda name: platform)
        for module in (arg_utils, gpu_worker, settings):
            patch.setattr(module, "current_platform", platform)
        patch.setattr(DeviceCommunicatorBase, "_run", device.collectives())
        patch.setattr(torch.xpu, "_lazy_init", lambda: None)
        patch.setattr(torch.xpu, "Event", event_of(device))
        patch.setattr(torch.xpu, "synchronize", lambda *_: device.run_until(device.launched))
        library("device_guard.cpp")
        # Tensors from Python values are made on the host and then copied, where the mode sees it.
        only_lift = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            with device:
                yield device
        finally:
            torch._C._set_only_lift_cpu_tensors(only_lift)
            table.choose.cache_clear()
