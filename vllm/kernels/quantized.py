# SPDX-License-Identifier: Apache-2.0
"""Weights that stay quantised: one form for what all checkpoint formats hold, and what it means.

Whatever a checkpoint calls them, a matrix [N, K] is codes, and scales (and zeros) for groups of columns of each row:
``w[n, k] = (value(code[n, k]) - zero[n, k // group_size]) * scale[n, k // group_size]``. A scale of a block of rows, or
of the whole tensor, is repeated for each row. Slices and stacks of rows, and slices of columns at the edges of groups,
are again such matrices: so a layer shards and merges quantised weights as it does others.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vllm.kernels.activation_scales import activation_scale
from vllm.kernels.blocks import block_values


class Format(NamedTuple):
    """``bytes`` hold the codes of ``columns`` neighbouring columns. ``scaled``: scales lie beside the codes, not among
    them: a block of such codes says all of its columns. ``zero``: the value that stands for 0 where there are no zeros.
    """

    columns: int
    bytes: int
    scaled: bool
    zero: int


# int4: 0 to 15, the even column in the low half of a byte. int8: two's complement. fp8: e4m3fn. mxfp4: e2m1, in the
# order of int4. Blocks of GGUF files, with their scales and minima among the codes, as they are: see ``blocks``.
FORMATS = {
    "int4": Format(2, 1, True, 8),
    "int8": Format(1, 1, True, 0),
    "fp8": Format(1, 1, True, 0),
    "mxfp4": Format(2, 1, True, 0),
    "q4_1": Format(32, 20, False, 0),
    "q5_0": Format(32, 22, False, 16),
    "q5_1": Format(32, 24, False, 0),
    "q4_k": Format(256, 144, False, 0),
    "q5_k": Format(256, 176, False, 0),
    "q6_k": Format(256, 210, False, 32),
}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_ELEMENTS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix [N, K], or those of E experts [E, N, K], in plain layout unless ``kind`` says otherwise.

    format: a key of ``FORMATS``. codes: uint8 [(E,) N, bytes of a row]. group_size: columns of a scale, K for all.
    scales: a float dtype, [(E,) N, ceil(K / group_size)]. zeros: in the values' unit, uint8 or int8, of scales' shape;
    None: the format's. dtype: that of the inputs and outputs of products with it.
    activations: None: products take the inputs as they are; "int8", "fp8": they round each input row first, to the
    largest magnitude among its columns.
    input_order: int64 [(E,) K], column k of the weight belongs to column ``input_order[k]`` of the inputs; None: to k.
    gated: of experts: N = 2 * I rows are [gate; up].
    kind: "plain", or the layout of the implementation that packed it, which alone reads codes, scales and zeros then.
    """

    format: str
    N: int
    K: int
    group_size: int
    dtype: torch.dtype
    codes: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    activations: str | None = None
    input_order: Tensor | None = None
    gated: bool = False
    kind: str = "plain"

    @property
    def E(self) -> int:
        return self.codes.shape[0]

    @functools.cached_property
    def address(self) -> int:
        return self.codes.data_ptr()

    @property
    def form(self) -> tuple[object, ...]:
        """What matrices must have in common to be stacked."""
        of_scales = None if self.scales is None else self.scales.dtype
        of_zeros = None if self.zeros is None else self.zeros.dtype
        return self.format, self.K, self.group_size, self.dtype, of_scales, of_zeros, self.activations

    def rows(self, rows: slice | Tensor | int) -> QuantizedWeight:
        """Rows of a plain [N, K], in the order wanted: views for a slice. Of experts, their matrices; an int: one."""
        of_experts = self.input_order is not None and self.input_order.dim() == 2
        order = _of(self.input_order, rows) if of_experts else self.input_order
        codes, scales, zeros = self.codes[rows], _of(self.scales, rows), _of(self.zeros, rows)
        return self._with(codes=codes, scales=scales, zeros=zeros, input_order=order)

    def columns(self, columns: slice) -> QuantizedWeight:
        """Columns of a plain [N, K], from the edge of one group to that of another.

        Raises:
            ValueError: a group would be cut, or the columns are not in the order of the inputs.
        """
        first, last, _ = columns.indices(self.K)
        if (first, last) == (0, self.K):
            return self
        why_not = uncut(self.format, self.K, self.group_size, columns, self.input_order is not None)
        if why_not is not None:
            raise ValueError(why_not)
        size = self.group_size
        step = FORMATS[self.format]
        codes = self.codes[..., first // step.columns * step.bytes : -(-last // step.columns) * step.bytes]
        groups = slice(None) if size >= self.K else slice(first // size, -(-last // size))
        whole = last - first if size >= self.K else size
        return dataclasses.replace(
            self,
            K=last - first,
            group_size=whole,
            codes=codes,
            scales=None if self.scales is None else self.scales[..., groups],
            zeros=None if self.zeros is None else self.zeros[..., groups],
        )

    def _with(self, **tensors: Tensor | None) -> QuantizedWeight:
        codes = tensors["codes"]
        assert codes is not None
        return dataclasses.replace(self, N=codes.shape[-2], **tensors)  # type: ignore[arg-type]


def _of(tensor: Tensor | None, rows: slice | Tensor | int) -> Tensor | None:
    return None if tensor is None else tensor[rows]


def uncut(format: str, K: int, group_size: int, columns: slice, ordered: bool) -> str | None:
    """Why ``columns`` of such a matrix cannot be had; None where they can. ``ordered``: it has an ``input_order``."""
    first, last, _ = columns.indices(K)
    if (first, last) == (0, K):
        return None
    if ordered:
        return (
            "columns quantised in the order of their activations (act-order) cannot be split over tensor-parallel "
            "ranks; use tensor_parallel_size=1 (enable_expert_parallel=True and data_parallel_size share out whole "
            "experts), or a checkpoint without desc_act"
        )
    unit = FORMATS[format].columns
    if (group_size < K and (first % group_size or (last % group_size and last != K))) or first % unit or last % unit:
        return (
            f"columns {first} to {last} of {K} cut a group of {group_size} that shares a scale; choose a "
            f"tensor_parallel_size that leaves whole groups, or a checkpoint with smaller ones"
        )
    return None


def with_zeros(weight: QuantizedWeight) -> QuantizedWeight:
    """``weight`` with the zeros spelt out that its format implies."""
    if weight.zeros is not None or weight.scales is None:
        return weight
    dtype = torch.int8 if weight.format == "int8" else torch.uint8
    zeros = torch.full(weight.scales.shape, FORMATS[weight.format].zero, dtype=dtype, device=weight.codes.device)
    return dataclasses.replace(weight, zeros=zeros)


def stack_rows(parts: list[QuantizedWeight]) -> QuantizedWeight:
    """Matrices of one ``form``, and of one ``input_order``, one below the other; a copy, also of a single one."""
    if any(part.zeros is not None for part in parts):
        parts = [with_zeros(part) for part in parts]
    forms = {part.form for part in parts}
    assert len(forms) == 1, f"{len(parts)} matrices have {len(forms)} forms: {forms}"

    def cat(name: str) -> Tensor | None:
        return None if getattr(parts[0], name) is None else torch.cat([getattr(part, name) for part in parts])

    return parts[0]._with(codes=cat("codes"), scales=cat("scales"), zeros=cat("zeros"))


def stackable(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    """Whether ``stack_rows`` can take both."""
    alike = with_zeros(one).form == with_zeros(other).form
    if one.input_order is None or other.input_order is None:
        return alike and one.input_order is other.input_order
    return alike and torch.equal(one.input_order, other.input_order)


def copied(weight: QuantizedWeight, num_rows: int | None = None) -> QuantizedWeight:
    """A plain [N, K] in memory of its own on the default device, with rows of zeros up to ``num_rows``."""
    N, device = weight.N if num_rows is None else num_rows, torch.get_default_device()

    def copy(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        new = torch.empty((N, *tensor.shape[1:]), dtype=tensor.dtype, device=device)
        new[: weight.N].copy_(tensor)
        new[weight.N :].zero_()
        return new

    order = None if weight.input_order is None else weight.input_order.to(device, copy=True)
    new = {name: copy(getattr(weight, name)) for name in ("codes", "scales", "zeros")}
    return dataclasses.replace(weight, N=N, input_order=order, **new)  # type: ignore[arg-type]


def put_rows(
    into: QuantizedWeight | None, part: QuantizedWeight, E: int, N: int, expert: int, first: int, gated: bool = False
) -> QuantizedWeight:
    """Matrices [E, N, K] on the default device, undefined at first, with ``part`` as the rows of ``expert`` from
    ``first`` on: into those of the call before, or the same with zeros where one of the two has some.

    Raises:
        ValueError: the forms differ.
    """
    assert part.input_order is None, "whoever puts experts together sees to their orders"
    if into is None:

        def room(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else torch.empty((E, N, tensor.shape[1]), dtype=tensor.dtype)

        new = {name: room(getattr(part, name)) for name in ("codes", "scales", "zeros")}
        into = dataclasses.replace(part, N=N, gated=gated, **new)  # type: ignore[arg-type]
    if (into.zeros is None) != (part.zeros is None):
        into, part = with_zeros(into), with_zeros(part)
    if into.form != part.form:
        raise ValueError(f"experts of one layer are quantised in different ways, {into.form} and {part.form}")
    for name in ("codes", "scales", "zeros"):
        if (new_rows := getattr(part, name)) is not None:
            getattr(into, name)[expert, first : first + part.N].copy_(new_rows)
    return into


def values(format: str, codes: Tensor) -> Tensor:
    """uint8 codes [..., bytes] -> the values that they stand for, float32 [..., columns], before zero and scale; of a
    format whose scales are among the codes: after them."""
    if format == "int8":
        return codes.view(torch.int8).float()
    if format == "fp8":
        return codes.view(torch.float8_e4m3fn).float()
    if not FORMATS[format].scaled:
        return block_values(format, codes.unflatten(-1, (-1, FORMATS[format].bytes))).flatten(-2)
    halves = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    if format == "int4":
        return halves.float()
    assert format == "mxfp4", f"{format} is none of {', '.join(FORMATS)}"
    table = torch.tensor([*E2M1, *(-x for x in E2M1)], device=codes.device)
    return table[halves.long()]


def dequantize(weight: QuantizedWeight) -> Tensor:
    """The matrix that a plain one means, float32 [(E,) N, K], columns in the order of the inputs."""
    assert weight.kind == "plain", f"a {weight.kind} weight is read by the kernels that packed it"
    w = values(weight.format, weight.codes)[..., : weight.K]
    if weight.scales is not None:
        spread = functools.partial(torch.repeat_interleave, repeats=weight.group_size, dim=-1)
        zero = FORMATS[weight.format].zero if weight.zeros is None else spread(weight.zeros.float())[..., : weight.K]
        w = (w - zero) * spread(weight.scales.float())[..., : weight.K]
    if weight.input_order is not None:
        w = torch.empty_like(w).scatter_(-1, weight.input_order.unsqueeze(-2).expand_as(w), w)
    return w


def round_activations(x_TK: Tensor, to: str | None) -> Tensor:
    """What products with a weight whose ``activations`` is ``to`` take in the place of x: each row on its own grid."""
    if to is None:
        return x_TK
    on_grid, scale = grids(x_TK, to)
    return on_grid * scale


def grids(x_TK: Tensor, to: str) -> tuple[Tensor, Tensor]:
    """(the rows on their grids, the grids' scales [T, 1]), float32: whole numbers or those of e4m3."""
    most = {"int8": 127.0, "fp8": torch.finfo(torch.float8_e4m3fn).max}[to]
    wide = x_TK.float()
    scale = activation_scale(wide, most)
    on_grid = wide / scale
    on_grid = on_grid.round() if to == "int8" else on_grid.to(torch.float8_e4m3fn).float()
    return on_grid, scale


def pack_quantized_weight(weight: QuantizedWeight, exact: bool = False) -> QuantizedWeight:
    return weight


def multiplies_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def quantize(weight_NK: Tensor, format: str, group_size: int, dtype: torch.dtype) -> QuantizedWeight:
    """The matrix in ``format``, symmetric, each group of columns of a row by the largest magnitude in it."""
    N, K = weight_NK.shape
    group_size = min(group_size, K)
    groups, unit = -(-K // group_size), FORMATS[format].columns
    codes = torch.empty(N, -(-K // unit), dtype=torch.uint8, device=weight_NK.device)
    scales = torch.empty(N, groups, dtype=torch.float32, device=weight_NK.device)
    rows_at_once = max(_ELEMENTS_AT_ONCE // K, 1)
    for first in range(0, N, rows_at_once):
        rows = slice(first, first + rows_at_once)
        w = torch.nn.functional.pad(weight_NK[rows].float(), (0, groups * group_size - K)).unflatten(1, (groups, -1))
        most = w.abs().amax(-1)
        if format == "mxfp4":
            scale = torch.ldexp(torch.ones_like(most), torch.frexp(most).exponent - 3)
        else:
            scale = most / {"int4": 7.0, "int8": 127.0, "fp8": torch.finfo(torch.float8_e4m3fn).max}[format]
        scales[rows] = scale = torch.where(most > 0, scale, torch.ones_like(scale))
        w = (w / scale[..., None]).flatten(1)[:, :K]
        if format == "fp8":
            codes[rows] = w.to(torch.float8_e4m3fn).view(torch.uint8)
        elif format == "int8":
            codes[rows] = w.round().to(torch.int8).view(torch.uint8)
        else:
            if format == "int4":
                halves = (w.round() + 8).to(torch.uint8)
            else:
                middles = torch.tensor([(low + high) / 2 for low, high in itertools.pairwise(E2M1)])
                halves = torch.bucketize(w.abs(), middles.to(w.device)).to(torch.uint8) + 8 * (w < 0).to(torch.uint8)
            halves = torch.nn.functional.pad(halves, (0, K % 2))
            codes[rows] = halves[:, ::2] | halves[:, 1::2] << 4
    if format == "mxfp4":
        scales = scales.bfloat16()
    return QuantizedWeight(format, N, K, group_size, dtype, codes, scales)
