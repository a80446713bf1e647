# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import enum


class FinishReason(str, enum.Enum):
    """Why a request ended; equal to the ``finish_reason`` of an output."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"

    def __str__(self) -> str:
        return self.value
