# SPDX-License-Identifier: Apache-2.0
"""How the ranks share the model: TP × DP, with expert parallelism over all of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelConfig:
    """RANK → dp_rank = RANK // tensor_parallel_size, tp_rank = RANK % tensor_parallel_size, ep_rank = RANK; of several
    replicas each counts its own ranks from 0.

    ``eplb_step_interval``: steps between two balancings of the experts' load; None: experts stay where they are.
    """

    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    distributed_executor_backend: str | None = None
    eplb_step_interval: int | None = None

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "data_parallel_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: give 1 or more")
        if self.eplb_step_interval is not None and not self.enable_expert_parallel:
            raise ValueError("enable_eplb=True moves experts between ranks: it needs enable_expert_parallel=True")
        if self.distributed_executor_backend not in (None, "external_launcher", "uni", "ray"):
            raise NotImplementedError(
                f"distributed_executor_backend={self.distributed_executor_backend!r} is not supported: start the ranks "
                "with torchrun and pass 'external_launcher', or serve with 'ray'"
            )

    @property
    def world_size(self) -> int:
        """Ranks in all: TP × DP."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def expert_parallel_size(self) -> int:
        return self.world_size if self.enable_expert_parallel else 1
