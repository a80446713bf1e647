# SPDX-License-Identifier: Apache-2.0
"""Token embedding and output head, their vocabulary rows split over TP.

Each rank holds ``ceil(vocab / tp)`` rows; the rows past the vocabulary on the last ranks are zero and their logits
are cut off after the gather.
"""

from __future__ import annotations

import dataclasses

import torch

from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.kernels import ops
from vllm.kernels.quantized import QuantizedWeight, copied, dequantize
from vllm.kernels.weights import PackedWeight
from vllm.logger import init_logger
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.parameter import WeightSpec

logger = init_logger(__name__)


class VocabParallelEmbedding(Layer):
    """Token ids [T] → rows [T, hidden]. A tied ``ParallelLMHead`` reads the same packed weight."""

    weight_attributes = ("weight", "packed")

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, prefix: str) -> None:
        super().__init__()
        self.tp_size, tp_rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        self.vocab_size, self.hidden_size, self.dtype, self.prefix = vocab_size, hidden_size, dtype, prefix
        self.rows_per_partition = -(-vocab_size // self.tp_size)
        self.first = min(tp_rank * self.rows_per_partition, vocab_size)
        self.last = min(self.first + self.rows_per_partition, vocab_size)
        self.weight: torch.Tensor | QuantizedWeight | None = None
        self.packed: PackedWeight | QuantizedWeight | None = None

    def weight_specs(self) -> list[WeightSpec]:
        full, rows = (self.vocab_size, self.hidden_size), slice(self.first, self.last)
        return [WeightSpec(f"{self.prefix}.weight", full, self._take, rows=rows, quantized=True)]

    def _take(self, loaded: torch.Tensor | QuantizedWeight) -> None:
        if isinstance(loaded, QuantizedWeight):
            self.weight = copied(loaded, self.rows_per_partition)
            return
        self.weight = torch.zeros(self.rows_per_partition, self.hidden_size, dtype=self.dtype)
        self.weight[: self.last - self.first].copy_(loaded)

    def process_weights_after_loading(self) -> None:
        assert self.weight is not None, f"{self.prefix}: no weight was loaded"
        if isinstance(self.weight, QuantizedWeight):
            exact = not isinstance(self, ParallelLMHead)  # whose rows are not looked up
            self.packed, self.weight = ops.pack_quantized_weight(self.weight, exact), None
            return
        into = None if isinstance(self.packed, QuantizedWeight) else self.packed
        self.packed, self.weight = ops.pack_linear_weight(self.weight, into), None

    @property
    def is_quantized(self) -> bool:
        return isinstance(self.packed, QuantizedWeight)

    def _lookup(self, ids: torch.Tensor, vocab_range: tuple[int, int] | None = None) -> torch.Tensor:
        assert self.packed is not None, f"{self.prefix}: no weight was loaded"
        return ops.embedding(ids, self.packed, vocab_range)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.tp_size == 1:
            return self._lookup(input_ids)
        return tensor_model_parallel_all_reduce(self._lookup(input_ids, (self.first, self.last)))

    def project(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden] → this rank's logits [R, rows_per_partition]."""
        assert self.packed is not None, f"{self.prefix}: no weight was loaded"
        return ops.linear(hidden_states, self.packed)


class ParallelLMHead(VocabParallelEmbedding):
    """hidden [R, hidden] → logits [R, vocab]; ``tie_to``: the embedding whose weight it shares, unless the checkpoint
    holds another for the head: as in transformers that one is taken, whatever the config says."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        prefix: str,
        tie_to: VocabParallelEmbedding | None = None,
    ) -> None:
        super().__init__(vocab_size, hidden_size, dtype, prefix)
        # A tuple hides the embedding from nn.Module, which would list its weights a second time.
        self._tied_to = () if tie_to is None else (tie_to,)

    def weight_specs(self) -> list[WeightSpec]:
        return [dataclasses.replace(spec, optional=bool(self._tied_to)) for spec in super().weight_specs()]

    def process_weights_after_loading(self) -> None:
        if not self._tied_to:
            super().process_weights_after_loading()

    def settle_tie(self) -> None:
        """Share the embedding's weight or not, now that all weights are loaded."""
        if not self._tied_to or self.weight is None:
            return
        held = self.weight.codes if isinstance(self.weight, QuantizedWeight) else self.weight
        rows = torch.arange(self.rows_per_partition, device=held.device).split(4096)
        if all(torch.equal(self._tied_to[0]._lookup(some), self._rows(some)) for some in rows):
            self.weight = None
            return
        logger.warning("tie_word_embeddings is set, but the checkpoint's %s differs: it is not tied", self.prefix)
        self._tied_to = ()
        self.process_weights_after_loading()

    def _rows(self, rows: torch.Tensor) -> torch.Tensor:
        if isinstance(self.weight, QuantizedWeight):
            return dequantize(self.weight.rows(rows)).to(self.dtype)
        assert self.weight is not None, f"{self.prefix}: no weight was loaded"
        return self.weight[rows]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = (self._tied_to or (self,))[0].project(hidden_states)
        if self.tp_size > 1:
            # rows of their own again: the gather puts the ranks' columns one after the other
            logits = tensor_model_parallel_all_gather(logits, dim=-1).contiguous()
        return logits[:, : self.vocab_size]
