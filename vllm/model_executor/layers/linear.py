# SPDX-License-Identifier: Apache-2.0
"""Linear layers and their tensor-parallel shards.

Every layer holds one local weight [N, K] that is filled from slices of checkpoint tensors: a ``Shard`` says which
slice of which tensor goes where. Once it is complete it is packed as the device's linear operator reads it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.forward_context import set_current_layer
from vllm.kernels import ops
from vllm.kernels.quantized import QuantizedWeight, copied, stack_rows, stackable
from vllm.kernels.weights import PackedWeight
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.step_buffers import buffer_key, step_buffer
from vllm.model_executor.parameter import WeightSpec


def divide(numerator: int, denominator: int, what: str) -> int:
    """``numerator / denominator`` where it is whole; ``ValueError`` naming ``what`` where it is not."""
    if numerator % denominator:
        raise ValueError(
            f"{what}: {numerator} cannot be divided over tensor_parallel_size={denominator}; "
            f"choose a tensor_parallel_size that divides {numerator}"
        )
    return numerator // denominator


@dataclass(frozen=True)
class Shard:
    """Rows ``rows`` (a slice, or indices in the order wanted) and columns ``cols`` of checkpoint tensor ``name`` [full]
    become local rows from ``at`` on."""

    name: str
    full: tuple[int, int]
    rows: slice | torch.Tensor
    cols: slice
    at: int

    @property
    def num_rows(self) -> int:
        if isinstance(self.rows, torch.Tensor):
            return len(self.rows)
        return len(range(*self.rows.indices(self.full[0])))

    @property
    def num_cols(self) -> int:
        return len(range(*self.cols.indices(self.full[1])))


def of_one_tensor(shards: Sequence[Shard], name: str) -> list[Shard]:
    """``shards``, whose tensors a checkpoint holds one below the other in tensor ``name``."""
    firsts = itertools.accumulate((shard.full[0] for shard in shards), initial=0)
    rows = [
        torch.arange(shard.full[0], device="cpu")[shard.rows] + at for at, shard in zip(firsts, shards, strict=False)
    ]
    full = (sum(shard.full[0] for shard in shards), shards[0].full[1])
    taken = torch.cat(rows)
    return [Shard(name, full, slice(None) if len(taken) == full[0] else taken, slice(None), 0)]


class LinearBase(Layer):
    """x [T, K] → x Wᵀ + b [T, N] over this rank's shards.

    Shards that a checkpoint holds in different forms, as one in 16 bits beside quantised ones, are several
    ``products``, each with its rows of the output; otherwise there is one ``packed`` weight.
    """

    weight_attributes = ("weight", "bias", "packed", "products")

    def __init__(self, shards: Sequence[Shard], bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.shards = list(shards)
        self.dtype = dtype
        self.has_bias = bias
        self.input_size_per_partition = self.shards[0].num_cols
        self.output_size_per_partition = sum(shard.num_rows for shard in self.shards)
        self.output_key = buffer_key(self.shards[0].name, self.output_size_per_partition, dtype)
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        self.packed: PackedWeight | QuantizedWeight | None = None
        self.products: list[tuple[slice, PackedWeight | QuantizedWeight]] | None = None
        self.parts: dict[int, QuantizedWeight] = {}  # by their first row, until they are packed

    def weight_specs(self) -> list[WeightSpec]:
        specs = [
            WeightSpec(
                shard.name, shard.full, self._weight_taker(shard), rows=shard.rows, quantized=True, cols=shard.cols
            )
            for shard in self.shards
        ]
        if self.has_bias:
            specs += [
                WeightSpec(
                    shard.name.removesuffix("weight") + "bias",
                    shard.full[:1],
                    self._bias_taker(shard),
                    rows=shard.rows,
                )
                for shard in self.shards
            ]
        return specs

    def _weight_taker(self, shard: Shard):
        def take(loaded: torch.Tensor | QuantizedWeight) -> None:
            if isinstance(loaded, QuantizedWeight):
                self.parts[shard.at] = copied(loaded.columns(shard.cols))
                return
            assert not isinstance(self.packed, QuantizedWeight), f"{shard.name}: a float shard for quantised ones"
            if (
                self.weight is None
                and isinstance(self.packed, PackedWeight)
                and shard.num_rows < self.output_size_per_partition
            ):
                self.weight = ops.unpack_linear_weight(self.packed)
            elif self.weight is None:
                self.weight = torch.empty(
                    self.output_size_per_partition, self.input_size_per_partition, dtype=self.dtype
                )
            self.weight[shard.at : shard.at + shard.num_rows].copy_(loaded[:, shard.cols])

        return take

    def _bias_taker(self, shard: Shard):
        def take(loaded: torch.Tensor) -> None:
            if self.bias is None:
                self.bias = torch.empty(self.output_size_per_partition, dtype=self.dtype)
            self.bias[shard.at : shard.at + shard.num_rows].copy_(loaded)

        return take

    def process_weights_after_loading(self) -> None:
        if self.parts:
            self._pack_parts()
            return
        if self.weight is None and (self.packed is not None or self.products is not None):
            return  # only its bias is new
        assert self.weight is not None, f"{self.shards[0].name}: no weight was loaded"
        assert not isinstance(self.packed, QuantizedWeight), f"{self.shards[0].name}: float for quantised weights"
        self.packed, self.weight = ops.pack_linear_weight(self.weight, self.packed), None

    def _pack_parts(self) -> None:
        runs: list[tuple[slice, list[QuantizedWeight]]] = []  # neighbours of one form; none: in ``weight``
        for shard in self.shards:
            rows, part = slice(shard.at, shard.at + shard.num_rows), self.parts.pop(shard.at, None)
            last = runs[-1] if runs else None
            if last is not None and (stackable(last[1][0], part) if last[1] and part else not last[1] and not part):
                runs[-1] = slice(last[0].start, rows.stop), [*last[1], *([part] if part else [])]
            else:
                runs.append((rows, [part] if part else []))
        products: list[tuple[slice, PackedWeight | QuantizedWeight]] = []
        for rows, parts in runs:
            if parts:
                whole = parts[0] if len(parts) == 1 else stack_rows(parts)
                products.append((rows, ops.pack_quantized_weight(whole)))
            else:
                assert self.weight is not None, f"{self.shards[0].name}: no weight was loaded"
                products.append((rows, ops.pack_linear_weight(self.weight[rows].clone())))
        self.weight = None
        self.packed, self.products = (products[0][1], None) if len(products) == 1 else (None, products)

    @property
    def is_quantized(self) -> bool:
        return self.products is not None or isinstance(self.packed, QuantizedWeight)

    def apply(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if self.products is not None:
            return self._apply_products(x, self.products)
        assert self.packed is not None, f"{self.shards[0].name}: no weight was loaded"
        return ops.linear(x, self.packed, self.bias, step_buffer(self.output_key, x.shape[0]))

    def _apply_products(
        self, x: torch.Tensor, products: list[tuple[slice, PackedWeight | QuantizedWeight]]
    ) -> torch.Tensor:
        out = step_buffer(self.output_key, x.shape[0])
        if out is None:
            out = x.new_empty(x.shape[0], self.output_size_per_partition)
        for rows, packed in products:
            ops.linear(x, packed, None if self.bias is None else self.bias[rows], out[:, rows])
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.apply(x)


class ReplicatedLinear(LinearBase):
    """The whole weight on every rank."""

    def __init__(self, input_size: int, output_size: int, bias: bool, dtype: torch.dtype, prefix: str) -> None:
        shard = Shard(f"{prefix}.weight", (output_size, input_size), slice(None), slice(None), 0)
        super().__init__([shard], bias, dtype)


class MergedColumnParallelLinear(LinearBase):
    """Several linear layers of one input as one matrix product; each one's output rows are split over TP.

    ``fused``: the name under which a checkpoint has them as one.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        bias: bool,
        dtype: torch.dtype,
        names: Sequence[str],
        fused: str | None = None,
    ) -> None:
        tp_size, tp_rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        shards, at = [], 0
        for name, size in zip(names, output_sizes, strict=True):
            local = divide(size, tp_size, f"output size of {name}")
            rows = slice(tp_rank * local, (tp_rank + 1) * local)
            shards.append(Shard(f"{name}.weight", (size, input_size), rows, slice(None), at))
            at += local
        super().__init__(of_one_tensor(shards, f"{fused}.weight") if fused else shards, bias, dtype)


class ColumnParallelLinear(MergedColumnParallelLinear):
    """Output rows split over TP."""

    def __init__(self, input_size: int, output_size: int, bias: bool, dtype: torch.dtype, prefix: str) -> None:
        super().__init__(input_size, [output_size], bias, dtype, [prefix])


class QKVParallelLinear(LinearBase):
    """q, k and v of one input: rows [q heads | k heads | v heads] of this rank.

    Query heads are split over TP. With fewer KV heads than ranks each KV head is held by ``tp_size / num_kv_heads``
    neighbouring ranks. ``q_rows_per_head`` is 2 × head_size where the query projection also makes an output gate.
    ``fused``: checkpoints have the three as one, ``qkv_proj``.
    """

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        num_heads: int,
        num_kv_heads: int,
        bias: bool,
        dtype: torch.dtype,
        prefix: str,
        q_rows_per_head: int | None = None,
        fused: bool = False,
    ) -> None:
        tp_size, tp_rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        q_rows_each = q_rows_per_head or head_size
        heads = divide(num_heads, tp_size, "attention heads")
        if num_kv_heads >= tp_size:
            kv_heads = divide(num_kv_heads, tp_size, "key-value heads")
            first_kv = tp_rank * kv_heads
        else:
            if tp_size % num_kv_heads:
                raise ValueError(
                    f"key-value heads: tensor_parallel_size={tp_size} is no multiple of {num_kv_heads}, so they can "
                    f"neither be divided nor replicated; choose a divisor or a multiple of {num_kv_heads}"
                )
            kv_heads, first_kv = 1, tp_rank * num_kv_heads // tp_size
        kv_rows = slice(first_kv * head_size, (first_kv + kv_heads) * head_size)
        q_rows = slice(tp_rank * heads * q_rows_each, (tp_rank + 1) * heads * q_rows_each)
        q_size, kv_size = heads * q_rows_each, kv_heads * head_size
        full_kv = (num_kv_heads * head_size, hidden_size)
        shards = [
            Shard(f"{prefix}.q_proj.weight", (num_heads * q_rows_each, hidden_size), q_rows, slice(None), 0),
            Shard(f"{prefix}.k_proj.weight", full_kv, kv_rows, slice(None), q_size),
            Shard(f"{prefix}.v_proj.weight", full_kv, kv_rows, slice(None), q_size + kv_size),
        ]
        super().__init__(of_one_tensor(shards, f"{prefix}.qkv_proj.weight") if fused else shards, bias, dtype)
        self.num_heads, self.num_kv_heads = heads, kv_heads
        self.q_size, self.kv_size = q_size, kv_size

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """qkv [T, N] → views q [T, q_size], k and v [T, kv_size]."""
        return qkv.split_with_sizes((self.q_size, self.kv_size, self.kv_size), dim=-1)


class RowParallelLinear(LinearBase):
    """Input columns split over TP; the partial sums are reduced unless the caller does that itself."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool,
        dtype: torch.dtype,
        prefix: str,
        reduce_results: bool = True,
    ) -> None:
        tp_size, tp_rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        local = divide(input_size, tp_size, f"input size of {prefix}")
        cols = slice(tp_rank * local, (tp_rank + 1) * local)
        super().__init__([Shard(f"{prefix}.weight", (output_size, input_size), slice(None), cols, 0)], bias, dtype)
        self.reduce_results = reduce_results and tp_size > 1
        self.adds_bias = tp_rank == 0
        self.prefix = prefix

    def process_weights_after_loading(self) -> None:
        super().process_weights_after_loading()
        if not self.adds_bias:
            self.bias = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.apply(x)
        if not self.reduce_results:
            return out
        set_current_layer(self.prefix)
        return tensor_model_parallel_all_reduce(out)
