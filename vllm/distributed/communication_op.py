# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel collectives by name."""

from __future__ import annotations

import torch

from vllm.distributed.parallel_state import get_tp_group


def tensor_model_parallel_all_reduce(input_: torch.Tensor) -> torch.Tensor:
    """Sum over the TP group; the input stays unchanged."""
    return get_tp_group().all_reduce(input_)


def tensor_model_parallel_all_gather(input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Concatenate the TP ranks' equal shapes along ``dim``."""
    return get_tp_group().all_gather(input_, dim)


def tensor_model_parallel_reduce_scatter(input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Sum over the TP group and keep this rank's part along ``dim``."""
    return get_tp_group().reduce_scatter(input_, dim)
