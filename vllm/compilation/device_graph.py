# SPDX-License-Identifier: Apache-2.0
"""Steps captured as graphs of a CUDA or XPU device, behind the interface that ``recording`` has on the host.

A graph holds what was put on the device's stream with the arguments and addresses of that moment; it holds nothing that
the host did. So each size is recorded twice: first as an eager pass, then while the graphs are captured. What is
compared is what the host gave to the device: torch's operations by a dispatch mode, launches of Triton's kernels, and
our operators, of which the others are parts. A tensor that the pass made is told by how many were
made before it, since the two passes take their memory from different places; any other by its address, and all of these
are kept until the comparison is over, so that one that is built anew each time cannot come back at the address of the
last. A host tensor's address says nothing; what is read from one shows in what the device is given.

Collectives stay outside: one ends the running graph and the next begins behind it. A graph is replayed as soon as it is
captured, so that what is outside runs on real values, in the capture too.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from vllm.compilation import recording
from vllm.compilation.recording import Call, CaptureError, NotCapturable, PassRecorder
from vllm.platforms import Platform

GRAPH = "graph"
_aten = torch.ops.aten
_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_, _aten._unsafe_index}
_SIZED_BY_VALUES = (recording.TO_HOST | {_aten.bincount, _aten.unique_consecutive}) - {_aten.repeat_interleave}
_SHORT_OF_MEMORY = ("out of memory", "OUT_OF_RESOURCES", "OUT_OF_DEVICE_MEMORY", "OUT_OF_HOST_MEMORY")


class DevicePool:
    """The memory of all captured steps of one device: a private pool of torch's, which the graphs keep alive.

    Steps are replayed one at a time and read nothing that an earlier one left, so all share it; the largest is captured
    first, and the others fit into what it took.
    """

    def __init__(self, device: torch.device, platform: Platform) -> None:
        self.device, self.platform, self.module = device, platform, torch.get_device_module(device)
        self.made: dict[int, tuple[weakref.ref[Any], int]] = {}  # storages that the running pass made, by identity
        self._graphs = weakref.WeakSet[Any]()
        self.nbytes = 0  # what the pool and the driver took while graphs were captured

    @functools.cached_property
    def stream(self) -> Any:
        """Captures are not made on the default stream."""
        return self.module.Stream(self.device)

    def begin_graph(self) -> Any:
        if not self._graphs:  # a pool whose last graph is gone is given back, and takes no other
            self.nbytes = 0
            self._handle = self.module.graph_pool_handle()
        self._free = self.module.mem_get_info(self.device)[0]
        graph = self.platform.begin_graph(self._handle)
        self._graphs.add(graph)
        return graph

    def end_graph(self, graph: Any) -> None:
        graph.capture_end()
        self.nbytes += max(self._free - self.module.mem_get_info(self.device)[0], 0)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory; without a hold on it, where the running pass made it."""
        return bare_alias(tensor) if id_of(tensor) in self.made and tensor.numel() else tensor

    @property
    def is_free(self) -> bool:
        return not self.made or bare_storage() is None

    def poison(self) -> None:
        """Where torch fills memory that it makes, the graphs do so too."""

    # --- what the running pass made -------------------------------------------------------------------------------

    def note(self, tensor: torch.Tensor, number: int) -> None:
        key = id_of(tensor)

        def freed(reference: Any) -> None:
            if key in self.made and self.made[key][0] is reference:
                del self.made[key]

        self.made[key] = weakref.ref(tensor.untyped_storage(), freed), number

    def number_of(self, tensor: torch.Tensor) -> int | None:
        return self.made[key][1] if (key := id_of(tensor)) in self.made else None


class DeviceRecorder(PassRecorder):
    """See ``recording.PassRecorder``. With ``captures`` the pass becomes graphs, else it runs eagerly."""

    pool: DevicePool

    def __init__(
        self,
        pool: DevicePool,
        layer: Callable[[], str],
        set_layer: Callable[[str], None],
        captures: bool,
        eager: Collection[str] = (),
    ) -> None:
        super().__init__(pool, layer, set_layer, eager)
        self.captures = captures
        self._kept: dict[int, Any] = {}
        self._graphs = list[Any]()
        self._graph: Any = None
        self._pending = list[tuple[torch.Tensor, torch.Tensor]]()
        self._count = self._first = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the pass, and inside ``without_garbage``.

        Raises:
            NotCapturable: something in the pass waits for the device, once the pass has ended; or cannot be in a graph,
                at once.
            torch.OutOfMemoryError: once the pass has ended, unless it is short of memory without graphs too. Neither
                memory nor graphs of this pass are left then.
        """
        assert recording.active is None, "a pass is recorded already"
        module, device, stream = self.pool.module, self.pool.device, self.pool.stream
        recording.active = self
        self.pool.made.clear()
        stream.wait_stream(module.current_stream(device))
        try:
            with module.stream(stream):
                try:
                    self._begin()
                    with _launches(self), self:
                        yield
                    self._end()
                    if self.obstacle is not None:
                        raise self.obstacle
                except BaseException as error:
                    was_capturing, where = self._graph is not None, self._where()
                    self._give_up()
                    if not isinstance(error, RuntimeError) or isinstance(
                        error, (CaptureError, NotCapturable, torch.OutOfMemoryError)
                    ):
                        raise
                    if _is_short(error):
                        raise torch.OutOfMemoryError(str(error)) from error
                    if not was_capturing:
                        raise
                    raise NotCapturable(f"{where}: {error}", self.running) from error
        finally:
            recording.active = None
        module.current_stream(device).wait_stream(stream)

    def take_over(self) -> tuple[list[Call], list[Any]]:
        """The calls, and what must live as long as they may be made."""
        return self.calls, [*self._kept.values(), *self._graphs]

    # --- graphs ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._first = len(self.calls)
        if self.captures:
            try:
                self._graph = self.pool.begin_graph()
            except RuntimeError as error:
                if not _is_short(error):
                    raise
                self.stop(torch.OutOfMemoryError(str(error)))
            else:
                self._graphs.append(self._graph)

    def stop(self, obstacle: Exception) -> None:
        """What was captured so far is computed: the rest of the pass runs on it, eagerly."""
        super().stop(obstacle)
        self._end()
        self.captures = False

    def _end(self) -> None:
        graph, is_empty = self._graph, len(self.calls) == self._first
        if graph is not None:
            self.pool.end_graph(graph)
            self._graph = None
            for target, made in self._pending:
                target.copy_(made)
            self._pending.clear()
            if not is_empty:
                graph.replay()
        if not is_empty:
            self.calls.append(Call(GRAPH, self._layer(), (), None if graph is None else graph.replay))

    def _give_up(self) -> None:
        """End the stream's capture and give the memory of this pass's graphs back."""
        graph, self._graph = self._graph, None
        if graph is not None:
            with suppress(RuntimeError):  # what broke the capture, once more
                graph.capture_end()
        self._pending.clear()
        self.calls.clear()
        for graph in self._graphs:
            graph.reset()
            self.pool._graphs.discard(graph)
        self._graphs.clear()
        self.pool.module.empty_cache()

    def outside(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], name: str) -> Any:
        layer = self._layer()
        given = self._described((args, kwargs))
        self.is_paused = True
        try:
            then, kwargs_then = self._frozen(list(args)), self._frozen(kwargs)
            self._end()
            result = function(*args, **kwargs)
            known = {id_of(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
            made = [x if self._is_here(x) and id_of(x) not in known else None for x in tree_leaves(result)]
            self._begin()
            static = self._static(made)
            if self.captures:
                self._pending = [
                    (to, x) for to, x in zip(static, made, strict=True) if to is not None and x is not None
                ]
                left = iter(static)
                result = tree_map(lambda x: x if (to := next(left)) is None else to, result)
                made = static
            for x in made:
                if x is not None:
                    self._note(x)
            targets = self._frozen(made)
        finally:
            self.is_paused = self.obstacle is not None

        def replay() -> None:
            self._set_layer(layer)
            for target, x in zip(targets, tree_leaves(function(*then, **kwargs_then)), strict=True):
                if target is not None:
                    target.copy_(x)

        self.calls.append(Call(name, layer, given, replay if self.captures else None))
        self._first = len(self.calls)
        return result

    def _frozen(self, values: Any) -> Any:
        return tree_map(lambda x: self.pool.alias(x) if isinstance(x, torch.Tensor) else x, values)

    def _static(self, made: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Memory that the running graph knows of, and that is free before it: written before each of its replays."""
        try:
            return [None if x is None else self._empty_like(x) for x in made] if self.captures else []
        except torch.OutOfMemoryError as error:
            self.stop(torch.OutOfMemoryError(str(error)))
            return []

    @staticmethod
    def _empty_like(x: torch.Tensor) -> torch.Tensor:
        """Not filled: the graph would fill it again after it was written."""
        deterministic: Any = torch.utils.deterministic
        fills, deterministic.fill_uninitialized_memory = deterministic.fill_uninitialized_memory, False
        try:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        finally:
            deterministic.fill_uninitialized_memory = fills

    # --- what the device is given -----------------------------------------------------------------------------------

    def _note_operator(self, name: str, args: Sequence[Any]) -> None:
        if not self.is_paused:
            self._add(name, self._described(args[1:]))

    def launch(self, name: str, arguments: Any) -> None:
        """Triton's kernel ``name`` is about to be launched."""
        if not self.is_paused:
            self._add(name, self._described(arguments))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        is_here = any(self._is_here(x) for x in tensors)
        if (brings := self._brings(func, args, kwargs)) is not None:
            self.refuse(f"{func} brings {brings}")
            return func(*args, **kwargs)
        given = self._described((args, kwargs))
        known = {id_of(x) for x in tensors}
        try:
            result = func(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            if not self.captures:
                raise
            self.stop(torch.OutOfMemoryError(str(error)))
            return func(*args, **kwargs)
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor) and self._is_here(x)]
        new = [x for x in made if id_of(x) not in known]
        for x in new:
            self._note(x)
        is_view = not new and not func._schema.is_mutable  # it shows where it is used
        if (is_here or made) and not is_view and func.overloadpacket not in recording.EMPTY:
            self._add(str(func), given)
        return result

    def _brings(self, func: Any, args: Any, kwargs: Any) -> str | None:
        """What goes from the device to the host or back, where the host would wait for it."""
        packet, sized = func.overloadpacket, False
        if packet in _SIZED_BY_VALUES:
            sized = self._is_here(args[0])
        elif packet is _aten.repeat_interleave:
            sized = self._is_here(args[0]) and kwargs.get("output_size") is None
        elif packet in _INDEXING and self._is_here(args[0]):
            indices = [x for x in args[1] if x is not None]
            sized = any(not self._is_here(x) or x.dtype in (torch.bool, torch.uint8) for x in indices)
        elif packet is _aten.copy_:
            return self._copies(args[1], args[0].device)
        elif packet in (_aten.to, _aten._to_copy):
            targets = [x for x in (*args[1:], *kwargs.values()) if isinstance(x, (torch.device, torch.Tensor))]
            devices = [x if isinstance(x, torch.device) else x.device for x in targets]
            return next((found for device in devices if (found := self._copies(args[0], device))), None)
        return "a value of the step to the host" if sized else None

    def _copies(self, source: torch.Tensor, to: torch.device) -> str | None:
        if self._is_here(source) and to.type != self.pool.device.type:
            return "values of the step to the host"
        if not self._is_here(source) and to.type == self.pool.device.type and source.dim():
            return "values of the host to the device"
        return None

    # --- how it is told -----------------------------------------------------------------------------------------------

    def _is_here(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor) and x.device.type == self.pool.device.type

    def _add(self, operator: str, given: Any) -> None:
        self.calls.append(Call(operator, self._layer(), given))

    def _note(self, tensor: torch.Tensor) -> None:
        self._count += 1
        self.pool.note(tensor, self._count)

    def _described(self, value: Any) -> Any:
        """``value`` with what is compared in the place of what it holds."""
        if isinstance(value, torch.Tensor):
            return self._place(value), tuple(value.shape), value.stride(), value.dtype
        if isinstance(value, (list, tuple)):
            return tuple(self._described(x) for x in value)
        if isinstance(value, dict):
            return tuple((name, self._described(x)) for name, x in value.items())
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return type(value).__name__, self._described(vars(value))
        if isinstance(value, float):
            return repr(value)  # NaN is itself
        is_plain = value is None or isinstance(value, (int, str, bytes, torch.dtype, torch.device, torch.layout))
        return value if is_plain else type(value).__name__

    def _place(self, tensor: torch.Tensor) -> Any:
        if not self._is_here(tensor):
            return f"the host's {tensor.tolist()}" if not tensor.dim() else "the host's"
        storage, number = tensor.untyped_storage(), self.pool.number_of(tensor)
        if number is None:
            self._kept[id_of(tensor)] = storage
            return tensor.data_ptr()
        return f"made as number {number}", tensor.data_ptr() - storage.data_ptr()


def _is_short(error: RuntimeError) -> bool:
    return any(sign in str(error) for sign in _SHORT_OF_MEMORY)


def id_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def bare_storage() -> Any:
    """What makes a storage of memory that it does not own; None where torch has no such thing, and memory that is
    handed from one graph to the next stays taken."""
    return getattr(torch._C, "_construct_storage_from_data_pointer", None)


def bare_alias(tensor: torch.Tensor) -> torch.Tensor:
    make, storage = bare_storage(), tensor.untyped_storage()
    if make is None:
        return tensor
    bare = make(storage.data_ptr(), storage.device, storage.nbytes())
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(bare, tensor.storage_offset(), tensor.shape, tensor.stride())


@contextmanager
def _launches(recorder: DeviceRecorder) -> Iterator[None]:
    """Each launch of a Triton kernel is shown to ``recorder`` first, whosever kernel it is."""
    places = (("triton.runtime.jit", "JITFunction"), ("triton.runtime.interpreter", "InterpretedFunction"))
    kinds = [getattr(sys.modules[module], name) for module, name in places if module in sys.modules]
    before = [(kind, kind.run) for kind in kinds]

    def shown(run: Any) -> Any:
        def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            if not warmup:
                recorder.launch(kernel.__name__, (grid, args, kwargs))
            was, recorder.is_paused = recorder.is_paused, True
            try:
                return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)
            finally:
                recorder.is_paused = was

        return launch

    for kind, run in before:
        kind.run = shown(run)
    try:
        yield
    finally:
        for kind, run in before:
            kind.run = run
