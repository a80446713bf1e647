# SPDX-License-Identifier: Apache-2.0
"""What the gated-delta-net layers need to know of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata


@dataclass(frozen=True)
class GDNAttentionMetadata:
    """One step's batch, R requests.

    query_start_loc [R + 1] int32: first row of each request; a pad request has no rows, and rows from
    ``query_start_loc[-1]`` on belong to none. ``query_start_loc_cpu`` is the same on the host; None in captured steps.
    state_indices [R] int32: state slot of each request, the pad slot (0) for a pad request.
    """

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor | None
    state_indices: torch.Tensor


class GDNAttentionMetadataBuilder(AttentionMetadataBuilder):
    operator = "gated_delta_net"

    def build(self, common: CommonAttentionMetadata) -> GDNAttentionMetadata:
        return GDNAttentionMetadata(common.query_start_loc, common.on_host[0], common.state_indices)


class GDNAttentionBackend:
    """Stands where an attention backend does; its layers keep state slots instead of cache blocks."""

    name: ClassVar[str] = "GDN_ATTN"
    builder_cls: ClassVar[type[AttentionMetadataBuilder]] = GDNAttentionMetadataBuilder
