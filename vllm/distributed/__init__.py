# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks and their collectives."""

from vllm.distributed.communication_op import (
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.distributed.observer import (
    CollectiveError,
    CollectiveObserver,
    CollectiveRecord,
    get_collective_observer,
    record_collective,
    set_collective_observer,
)
from vllm.distributed.parallel_state import (
    GroupCoordinator,
    cleanup_dist_env_and_memory,
    destroy_distributed_environment,
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    get_data_parallel_rank,
    get_data_parallel_world_size,
    get_dp_group,
    get_ep_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_tp_group,
    get_world_group,
    init_distributed_environment,
    initialize_model_parallel,
    model_parallel_is_initialized,
)

__all__ = [
    "CollectiveError",
    "CollectiveObserver",
    "CollectiveRecord",
    "GroupCoordinator",
    "cleanup_dist_env_and_memory",
    "destroy_distributed_environment",
    "destroy_model_parallel",
    "ensure_model_parallel_initialized",
    "get_collective_observer",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_dp_group",
    "get_ep_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "get_tp_group",
    "get_world_group",
    "init_distributed_environment",
    "initialize_model_parallel",
    "model_parallel_is_initialized",
    "record_collective",
    "set_collective_observer",
    "tensor_model_parallel_all_gather",
    "tensor_model_parallel_all_reduce",
]
