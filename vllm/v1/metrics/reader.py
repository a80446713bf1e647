# SPDX-License-Identifier: Apache-2.0
"""The engine's counts as ``LLM.get_metrics`` gives them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Metric:
    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class Counter(Metric):
    """Only grows."""

    value: float


@dataclass(kw_only=True)
class Gauge(Metric):
    """As it is now."""

    value: float


@dataclass(kw_only=True)
class Vector(Metric):
    """One count for each position."""

    values: list[int]


@dataclass(kw_only=True)
class Histogram(Metric):
    """``buckets``: upper bound → number of values up to it."""

    count: int
    sum: float
    buckets: dict[str, int]


__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
