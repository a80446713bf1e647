# SPDX-License-Identifier: Apache-2.0
"""The TP group's collectives as functions; ``dim`` counts from the end where it is negative."""

from __future__ import annotations

import torch

from vllm.distributed.parallel_state import get_tp_group


def tensor_model_parallel_all_gather(input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """The equal shapes of all TP ranks, joined along ``dim`` in rank order."""
    return get_tp_group().all_gather(input_, dim)


def tensor_model_parallel_all_reduce(input_: torch.Tensor) -> torch.Tensor:
    """The sum over the TP ranks, on each of them; the input stays unchanged."""
    return get_tp_group().all_reduce(input_)
