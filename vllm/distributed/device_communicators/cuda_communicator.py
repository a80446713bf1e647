# SPDX-License-Identifier: Apache-2.0
"""NCCL. Uneven lists are grouped broadcasts there too, so ragged sizes are padded with zero rows."""

from __future__ import annotations

from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase


class CudaCommunicator(DeviceCommunicatorBase):
    """Zero-padded into-tensor collectives, sums by the backend, barriers that name their device."""
