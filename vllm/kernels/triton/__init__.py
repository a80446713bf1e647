# SPDX-License-Identifier: Apache-2.0
"""Operators in Triton, one file a family. Importing this package needs ``triton``.

Inputs are widened to fp32 after they are loaded and rounded once before they are stored. Without a device the kernels
run in Triton's interpreter (``TRITON_INTERPRET=1``, set before ``triton`` is imported), launch by launch in Python.
"""

from vllm.kernels.triton.gdn import gated_delta_net

__all__ = ["gated_delta_net"]
