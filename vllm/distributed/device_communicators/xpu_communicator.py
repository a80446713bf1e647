# SPDX-License-Identifier: Apache-2.0
"""XCCL (or oneCCL's older ``ccl`` backend). Nothing in it needs the device: it runs over any process group.

XCCL turns uneven tensor lists into a series of broadcasts, which hang on B60 at sizes such as [13, 13, 15, 15], so
ragged gathers and reductions are padded with zero rows to the largest size and go through the into-tensor forms.
"""

from __future__ import annotations

from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase


class XpuCommunicator(DeviceCommunicatorBase):
    """Zero-padded into-tensor collectives, sums by the backend, barriers that name their device."""
