# SPDX-License-Identifier: Apache-2.0
"""Small helpers that scripts import; each lives in one of the modules of this package."""

from __future__ import annotations

import uuid

from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.counter import Counter
from vllm.utils.math_utils import cdiv, round_up
from vllm.utils.network_utils import get_distributed_init_method, get_ip, get_open_port


def random_uuid() -> str:
    """32 random hexadecimal digits."""
    return uuid.uuid4().hex


__all__ = [
    "Counter",
    "FlexibleArgumentParser",
    "cdiv",
    "get_distributed_init_method",
    "get_ip",
    "get_open_port",
    "random_uuid",
    "round_up",
]
