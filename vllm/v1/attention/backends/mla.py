# SPDX-License-Identifier: Apache-2.0
"""What the latent attention layers need to know of a step: which of its requests are served together."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata


@dataclass(frozen=True)
class Part:
    """Neighbouring requests, rows [first, last) of the step; lengths and tables are as ``ops.paged_attention`` takes
    them, with ``query_start_loc`` counted from ``first``.

    ``expanded``: one request whose keys and values are made from its latents, which lie in ``blocks`` [n] of the cache;
    ``own_table`` [1, n] is 0, 1, … for keys that lie in order.
    """

    first: int
    last: int
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor | None
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor | None
    block_table: torch.Tensor
    expanded: bool
    blocks: torch.Tensor | None = None
    own_table: torch.Tensor | None = None


@dataclass(frozen=True)
class MLAMetadata(CommonAttentionMetadata):
    """The common metadata, and the parts of the step. Rows that no part has are padding."""

    block_size: int = 0
    _parts: dict[int, list[Part]] = field(default_factory=dict)

    def parts(self, expand_from: int) -> list[Part]:
        """In the order of rows: each request of ``expand_from`` rows or more by itself, the others with their
        neighbours. Where there is none of so many rows, as in a decode, all rows are one part, those of padding too:
        it depends on nothing but the step's sizes. Made for the first layer that asks."""
        if expand_from not in self._parts:
            self._parts[expand_from] = self._cut(expand_from)
        return self._parts[expand_from]

    def _cut(self, expand_from: int) -> list[Part]:
        starts, lengths = self.query_start_loc_cpu.tolist(), self.seq_lens_cpu.tolist()
        rows = [end - start for start, end in itertools.pairwise(starts)]
        if max(rows, default=0) < expand_from:
            starts_cpu, lens_cpu = self.on_host
            common = self.query_start_loc, starts_cpu, self.seq_lens, lens_cpu, self.block_table
            return [Part(0, self.num_padded_tokens, *common, expanded=False)]
        parts, first = [], 0
        while first < len(rows):
            last = first + 1
            expanded = rows[first] >= expand_from
            if rows[first] and lengths[first]:
                while (
                    not expanded and last < len(rows) and rows[last] < expand_from and (lengths[last] or not rows[last])
                ):
                    last += 1
                parts.append(self._part(first, last, expanded))
            first = last
        return parts

    def _part(self, first: int, last: int, expanded: bool) -> Part:
        starts, starts_cpu = (x[first : last + 1] for x in (self.query_start_loc, self.query_start_loc_cpu))
        lens, lens_cpu, table = (x[first:last] for x in (self.seq_lens, self.seq_lens_cpu, self.block_table))
        begin, *_, end = starts_cpu.tolist()
        blocks = own_table = None
        if expanded:
            blocks = table[0, : cdiv(lens_cpu.tolist()[0], self.block_size)]
            own_table = torch.arange(len(blocks), dtype=torch.int32, device=table.device)[None]
        if begin:
            starts, starts_cpu = starts - begin, starts_cpu - begin
        return Part(begin, end, starts, starts_cpu, lens, lens_cpu, table, expanded, blocks, own_table)


class MLAMetadataBuilder(AttentionMetadataBuilder):
    cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def build(self, common: CommonAttentionMetadata) -> MLAMetadata:
        return MLAMetadata(**vars(common), block_size=self.kv_cache_config.block_size)


class MLABackend:
    """Stands where an attention backend does; the operators are those of ``PagedAttentionBackend``."""

    name: ClassVar[str] = "MLA"
    builder_cls: ClassVar[type[AttentionMetadataBuilder]] = MLAMetadataBuilder
