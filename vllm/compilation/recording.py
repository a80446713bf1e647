# SPDX-License-Identifier: Apache-2.0
"""What one forward pass does, as a list of calls that can be made again without any Python of the model.

While a ``Recorder`` is active it sees three kinds of calls: the C++ kernels, by their packed records; tensor
operations of torch, by a dispatch mode; and what ``outside`` marks, which cannot be captured and is called as it is
(collectives). All that they make lies in one ``MemoryPool``, at addresses that follow from the order of the calls
alone, so two recordings of one step are equal, byte for byte, but for values that came from the host.
"""

from __future__ import annotations

import functools
import gc
import textwrap
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_ALIGNMENT = 64
_SLAB = 1 << 20
_FILL = "fill_uninitialized_memory"
_F = TypeVar("_F", bound=Callable[..., Any])

_aten = torch.ops.aten
# What only makes memory; what brings a tensor's value to the host.
EMPTY = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
TO_HOST = {
    _aten._local_scalar_dense,
    _aten.item,
    _aten.is_nonzero,
    _aten.equal,
    _aten.nonzero,
    _aten.masked_select,
    _aten.unique_dim,
    _aten._unique2,
    _aten.repeat_interleave,
}


class CaptureError(RuntimeError):
    """A captured step would go stale."""


class NotCapturable(RuntimeError):
    """A step asks the host in its middle, so that it cannot be captured. ``operator``: the one of ``kernels.ops`` that
    does so; empty where it is the model itself."""

    def __init__(self, text: str, operator: str = "") -> None:
        super().__init__(text)
        self.operator = operator


class MemoryPool:
    """Memory of captured steps on the host, taken and given back while one is recorded and for good when it is done.

    Steps are replayed one at a time, and read nothing that an earlier one left, so all share one pool. A tensor's
    memory is free again when the last of its views is gone, as the recorded pass goes on.
    """

    def __init__(self) -> None:
        self._slabs: list[np.ndarray] = []
        self._free: list[list[tuple[int, int]]] = []  # of each slab, (offset, size) in order of offsets
        self.constants: dict[Any, torch.Tensor] = {}  # as ``described`` → tensors of the host's values, outside

    @property
    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in self._slabs)

    def holds(self, tensor: torch.Tensor) -> bool:
        return any(0 <= tensor.data_ptr() - slab.ctypes.data < slab.nbytes for slab in self._slabs)

    @staticmethod
    def described(tensor: torch.Tensor) -> tuple[Any, ...]:
        """Its values, shape and dtype."""
        return str(tensor.tolist()), tuple(tensor.shape), tensor.dtype

    def empty(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Contents undefined."""
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if 0 not in shape else 0
        size = max(-(-extent * dtype.itemsize // _ALIGNMENT), 1) * _ALIGNMENT
        index, offset = self._take(size)
        memory = self._slabs[index][offset : offset + size]
        weakref.finalize(memory, self._give_back, index, offset, size).atexit = False
        return torch.from_numpy(memory).view(dtype).as_strided(tuple(shape), tuple(stride))

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, without a hold on it."""
        if not tensor.numel():  # has no address, yet would hold its memory
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        for slab in self._slabs:
            offset = tensor.data_ptr() - slab.ctypes.data
            if 0 <= offset < slab.nbytes:
                base = torch.from_numpy(slab).view(tensor.dtype)
                return base.as_strided(tensor.shape, tensor.stride(), offset // tensor.element_size())
        return tensor

    @property
    def is_free(self) -> bool:
        return all(free == [(0, slab.nbytes)] for free, slab in zip(self._free, self._slabs, strict=True))

    def poison(self) -> None:
        """Every byte 0xFF, which is NaN in each float type."""
        for slab in self._slabs:
            slab.fill(0xFF)

    def _take(self, size: int) -> tuple[int, int]:
        for index, free in enumerate(self._free):
            for place, (offset, room) in enumerate(free):
                if room >= size:
                    free[place : place + 1] = [(offset + size, room - size)] if room > size else []
                    return index, offset
        slab = np.empty(max(size, _SLAB) + _ALIGNMENT, np.uint8)
        first = -slab.ctypes.data % _ALIGNMENT
        self._slabs.append(slab[first : first + max(size, _SLAB)])
        self._free.append([(0, self._slabs[-1].nbytes)])
        return self._take(size)

    def _give_back(self, index: int, offset: int, size: int) -> None:
        free = sorted([*self._free[index], (offset, size)])
        merged = free[:1]
        for at, room in free[1:]:
            last, before = merged[-1]
            if last + before == at:
                merged[-1] = (last, before + room)
            else:
                merged.append((at, room))
        self._free[index] = merged


@dataclass(frozen=True)
class Call:
    """One call of a recorded pass.

    ``given``: what it was given, to be compared with the same call of another recording: the record of a kernel, or
    arguments, where a tensor is its address, shape, strides and dtype. ``replay`` makes it again; ``kernel`` is the C
    function that takes ``given``, where it is one.
    """

    operator: str
    layer: str
    given: Any
    replay: Callable[[], object] | None = None
    kernel: Any = None


@contextmanager
def without_garbage() -> Iterator[None]:
    """Garbage is collected before and not within it: when recorded passes give memory back must not vary."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class PassRecorder(TorchDispatchMode):
    """What looks at a pass, on the host or on a device; ``layer`` says where the pass is, ``eager`` which operators of
    ``kernels.ops`` are called between the pieces.

    An ``obstacle`` ends the recording and not the pass: other ranks wait in the collectives that are to come.
    """

    def __init__(
        self, pool: Any, layer: Callable[[], str], set_layer: Callable[[str], None], eager: Collection[str] = ()
    ) -> None:
        super().__init__()
        self.pool, self.calls, self.is_paused = pool, list[Call](), False
        self.running = ""  # an operator of ``kernels.ops``
        self.obstacle: Exception | None = None
        self._layer, self._set_layer, self._eager = layer, set_layer, eager

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler for it, whose first call keeps the frames that it looked at

    def stop(self, obstacle: Exception) -> None:
        """The rest of the pass runs unseen; ``recording`` raises ``obstacle`` at its end."""
        self.obstacle, self.is_paused = obstacle, True

    def refuse(self, why: str) -> None:
        self.stop(NotCapturable(f"{why} in {self._where()}", self.running))

    def operator(self, name: str, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """``function`` of ``args``, the first of them ``name``, which runs this operator of ``kernels.ops``."""
        self.running = name
        if name in self._eager and not self.is_paused:
            result = self.outside(function, args, {}, name)
        else:
            self._note_operator(name, args)
            result = function(*args)
        self.running = ""  # not where it raises: that is where the pass ends
        return result

    def outside(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], name: str) -> Any:
        """``function`` of these arguments, which is called in every replay as well."""
        raise NotImplementedError

    def _note_operator(self, name: str, args: Sequence[Any]) -> None:
        """It is about to run; what it calls is seen."""

    def _where(self) -> str:
        layer = self._layer() or "the model"
        return f"{self.running} of {layer}" if self.running else layer


class Recorder(PassRecorder):
    """The calls of the pass that runs while it is ``active``, on the host."""

    pool: MemoryPool

    def __init__(
        self, pool: MemoryPool, layer: Callable[[], str], set_layer: Callable[[str], None], eager: Collection[str] = ()
    ) -> None:
        super().__init__(pool, layer, set_layer, eager)
        self._kept: list[Any] = []
        self._constants: list[tuple[Call, torch.Tensor]] = []
        self._stand_in: Any = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the pass, and inside ``without_garbage``.

        Raises, once the pass has ended:
            NotCapturable: something in it reads a value of the step on the host.
            MemoryError: the pool could not grow.
        """
        global active
        assert active is None, "a pass is recorded already"
        active = self
        try:
            with self:
                yield
        finally:
            active = None
        for call, tensor in self._constants:
            if self.pool.described(tensor) != call.given:
                self.pool.constants.pop(call.given, None)
                where = call.layer or "the model"
                values = textwrap.shorten(call.given[0], 80)
                self.stop(NotCapturable(f"a tensor of the host's values {values} is written to in {where}"))
        if self.obstacle is not None:
            raise self.obstacle

    def take_over(self) -> tuple[list[Call], list[Any]]:
        """The calls, and what must live as long as they may be made."""
        return self.calls, self._kept

    # --- the C++ kernels ------------------------------------------------------------------------------------------

    def keep(self, tensor: torch.Tensor) -> None:
        """A kernel was given the tensor's address."""
        if not self.is_paused and not self.pool.holds(tensor):
            self._kept.append(tensor)

    def in_place_of(self, library: Any, names: Sequence[str]) -> Any:
        """What has the functions of ``library``, where each call of one of ``names`` is recorded."""
        if self.is_paused:
            return library
        if self._stand_in is None:
            self._stand_in = _Library(library, names, self)
        return self._stand_in

    # --- torch's operations ---------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        packet = func.overloadpacket
        if packet is _aten.lift_fresh:  # of memory that torch has just made, or of somebody's
            return self._constant(args[0]) if args[0].untyped_storage().resizable() else args[0]
        if packet is _aten.detach_:  # of what was just lifted
            return func(*args, **kwargs)
        if packet in TO_HOST or (
            packet is _aten.index and any(x is not None and x.dtype is torch.bool for x in args[1])
        ):
            self.refuse(f"{func} brings a value of the step to the host")
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if _may_be_view(func) and _storage(result) == _storage(args[0]):  # it shows where it is used
            return result
        if packet in EMPTY:
            return self._pooled(result, copy=False)
        mine = self._results(result, (args, kwargs))
        given = _described((str(func), args, kwargs))
        if func._schema.is_mutable:
            self._add(str(func), given, functools.partial(func, *self._frozen(args), **self._frozen(kwargs)))
        elif any(x is not None for x in mine):
            call = functools.partial(func, *self._frozen(args), **self._frozen(kwargs))
            return self._computed(str(func), given, call, result, mine)
        return result

    def outside(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], name: str) -> Any:
        given, layer = _described((name, args, kwargs)), self._layer()
        frozen_args, frozen_kwargs = self._frozen(list(args)), self._frozen(kwargs)
        given_leaves, frozen_leaves = tree_leaves((args, kwargs)), tree_leaves((frozen_args, frozen_kwargs))
        originals = {id(frozen): x for x, frozen in zip(given_leaves, frozen_leaves, strict=True)}

        def call() -> Any:
            self._set_layer(layer)
            return function(*frozen_args, **frozen_kwargs)

        self.is_paused = True
        try:
            # Of aliases: another thread, such as Gloo's, may let go of its arguments later than the call returns.
            result = call()
            mine = [
                None if id(x) in originals or not isinstance(x, torch.Tensor) else self._pooled(x)
                for x in tree_leaves(result)
            ]
            made = self._computed(name, given, call, result, mine)
            return tree_map(lambda x: originals.get(id(x), x) if isinstance(x, torch.Tensor) else x, made)
        finally:
            self.is_paused = self.obstacle is not None

    def _constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, which was made of the host's values: the same one in each recording that has these values."""
        given = self.pool.described(tensor)
        kept = self.pool.constants.setdefault(given, tensor)
        self.calls.append(Call("torch.tensor", self._layer(), given))
        self._constants.append((self.calls[-1], kept))
        return kept

    # --- how they are kept ----------------------------------------------------------------------------------------

    def _add(self, operator: str, given: Any, replay: Callable[[], object]) -> None:
        self.calls.append(Call(operator, self._layer(), given, replay))

    def _computed(
        self, operator: str, given: Any, call: Callable[[], Any], result: Any, mine: list[torch.Tensor | None]
    ) -> Any:
        """``result``, where each of its tensors that is none of the arguments' memory lies in the pool, in ``mine``."""
        targets = [None if x is None else self.pool.alias(x) for x in mine]

        def replay() -> None:
            for target, made in zip(targets, tree_leaves(call()), strict=True):
                if target is not None:
                    target.copy_(made)

        self._add(operator, given, replay)
        leaves = iter(mine)
        return tree_map(lambda x: x if (kept := next(leaves)) is None else kept, result)

    def _results(self, result: Any, arguments: Any) -> list[torch.Tensor | None]:
        """Copies in the pool of the tensors of ``result`` that are not the arguments' memory; None for the rest."""
        known = {x.untyped_storage().data_ptr() for x in tree_leaves(arguments) if isinstance(x, torch.Tensor)}
        return [
            self._pooled(x)
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in known - {0}
            else None
            for x in tree_leaves(result)
        ]

    def _pooled(self, tensor: torch.Tensor, copy: bool = True) -> torch.Tensor:
        try:
            pooled = self.pool.empty(tensor.shape, tensor.stride(), tensor.dtype)
        except MemoryError as error:
            self.stop(MemoryError(str(error)))
            return tensor
        # As torch fills what it makes where that is asked for, NaN included.
        return pooled.copy_(tensor) if copy or memory_is_filled() else pooled

    def _frozen(self, values: Any) -> Any:
        return tree_map(lambda x: self.pool.alias(x) if isinstance(x, torch.Tensor) else x, values)


def memory_is_filled() -> bool:
    """Whether torch puts NaN into memory that it gives out."""
    return torch.are_deterministic_algorithms_enabled() and bool(getattr(torch.utils.deterministic, _FILL))


@functools.cache
def _may_be_view(func: Any) -> bool:
    """Some operations of which torch says so make a copy at times: ``contiguous``, ``reshape``, ``to``."""
    returns = func._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def _storage(x: Any) -> int:
    return x.untyped_storage().data_ptr() if isinstance(x, torch.Tensor) else 0


class _Library:
    """The kernels, each of whose calls is made and recorded."""

    def __init__(self, library: Any, names: Sequence[str], recorder: Recorder) -> None:
        self._library = library
        for name in names:
            setattr(self, name, self._recorded(name, getattr(library, name), recorder))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    @staticmethod
    def _recorded(name: str, function: Any, recorder: Recorder) -> Callable[[bytes], int]:
        def call(record: bytes) -> int:
            recorder.calls.append(Call(name, recorder._layer(), record, None, function))
            return function(record)

        return call


def _described(value: Any) -> Any:
    """``value`` with what is compared in the place of tensors."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr(), tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(_described(x) for x in value)
    if isinstance(value, dict):
        return {name: _described(x) for name, x in value.items()}
    return value


active: Any = None  # the Recorder, or that of a device


def outside(method: _F) -> _F:
    """Marks what cannot be captured: it is called between the pieces of a step that are, in every replay."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if active is None or active.is_paused:
            return method(*args, **kwargs)
        return active.outside(method, args, kwargs, method.__qualname__)

    return cast(_F, call)
