# SPDX-License-Identifier: Apache-2.0
"""Gloo. It has no uneven all-gather, but an uneven ``all_to_all_single`` that also carries zero rows."""

from __future__ import annotations

from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase


class CpuCommunicator(DeviceCommunicatorBase):
    """Ordered sums by default: they cost no more than Gloo's own reductions, which go by all-reduce."""

    ordered_sums = True
    barrier_takes_device = False
    ragged_by_exchange = True
