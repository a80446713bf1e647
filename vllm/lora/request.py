# SPDX-License-Identifier: Apache-2.0
"""A name that clients import."""

from __future__ import annotations

from typing import Any


class LoRARequest:
    """Upstream's request for an adapter; this engine serves none."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        raise NotImplementedError("LoRA adapters are not supported; merge the adapter into the checkpoint")
