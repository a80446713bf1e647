# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations


class EngineGenerateError(Exception):
    """One request failed; the engine goes on."""


class EngineDeadError(Exception):
    """The engine is lost; the message says what was lost first."""
