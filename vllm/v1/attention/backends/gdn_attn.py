# SPDX-License-Identifier: Apache-2.0
"""What the gated-delta-net layers need to know of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm.kernels.table import choose
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True)
class GDNAttentionMetadata:
    """One step's batch, R requests.

    query_start_loc [R + 1] int32: first row of each request; a pad request has no rows, and rows from
    ``query_start_loc[-1]`` on belong to none. ``query_start_loc_cpu`` is the same on the host.
    state_indices [R] int32: state slot of each request, the pad slot (0) for a pad request.
    """

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    state_indices: torch.Tensor


class GDNAttentionMetadataBuilder(AttentionMetadataBuilder):
    def __init__(self, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(kv_cache_config)
        if choose(torch.get_default_device().type)["gated_delta_net"].implementation == "fla":
            self.cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE  # prompts go by the host's counts

    def build(self, common: CommonAttentionMetadata) -> GDNAttentionMetadata:
        return GDNAttentionMetadata(common.query_start_loc, common.query_start_loc_cpu, common.state_indices)


class GDNAttentionBackend:
    """Stands where an attention backend does; its layers keep state slots instead of cache blocks."""

    name: ClassVar[str] = "GDN_ATTN"
    builder_cls: ClassVar[type[AttentionMetadataBuilder]] = GDNAttentionMetadataBuilder
