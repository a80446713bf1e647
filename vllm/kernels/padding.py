# SPDX-License-Identifier: Apache-2.0
"""What a pad row holds where a real one holds an index (law 2): each is a place that no kernel reads or writes. And
how pad requests are kept from a kernel."""

from __future__ import annotations

from torch import Tensor, cat

NULL_BLOCK = 0
PAD_SLOT = -1
PAD_STATE_SLOT = 0
PAD_EXPERT = -1


def with_rows(query_start_loc_cpu: Tensor, query_start_loc: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
    """query_start_loc and ``tables`` [R, …] of the requests that have rows in this step, by the host's copy; a kernel
    may take one without for a decode. Views, but where a request without rows stands before others."""
    kept = query_start_loc_cpu.diff().nonzero()[:, 0]
    n, R = len(kept), len(query_start_loc_cpu) - 1
    if n == 0 or int(kept[-1]) == n - 1:
        return query_start_loc[: n + 1], *(table[:n] for table in tables)
    kept = kept.to(query_start_loc.device)
    return cat([query_start_loc[kept], query_start_loc[R : R + 1]]), *(table[kept] for table in tables)
