# SPDX-License-Identifier: Apache-2.0
"""``EngineMetrics`` in the text that Prometheus scrapes, from a registry of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from vllm.v1.metrics.engine_metrics import MEANINGS
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Metric


class _Engine(Collector):
    def __init__(self, snapshot: Callable[[], Iterable[Metric]]) -> None:
        self._snapshot = snapshot

    def describe(self) -> list[Family]:
        return []

    def collect(self) -> Iterator[Family]:
        for name, samples in itertools.groupby(self._snapshot(), lambda metric: metric.name):
            metrics = list(samples)
            text, keys = MEANINGS[name.removeprefix("vllm:")], list(metrics[0].labels)
            family: Family
            if isinstance(metrics[0], Histogram):
                family = HistogramMetricFamily(name, text, labels=keys)
            else:
                kind = CounterMetricFamily if isinstance(metrics[0], Counter) else GaugeMetricFamily
                family = kind(name, text, labels=keys)
            for metric in metrics:
                values = list(metric.labels.values())
                if isinstance(family, HistogramMetricFamily):
                    assert isinstance(metric, Histogram), f"{name} mixes kinds: {metric!r}"
                    family.add_metric(values, list(metric.buckets.items()), metric.sum)
                else:
                    assert isinstance(metric, Counter | Gauge), f"{name} mixes kinds: {metric!r}"
                    family.add_metric(values, metric.value)
            yield family


class Exposition:
    """``snapshot`` gives the metrics of the moment, those of one name one after the other."""

    def __init__(self, snapshot: Callable[[], Iterable[Metric]]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Engine(snapshot))
        ProcessCollector(registry=self.registry)

    def text(self) -> bytes:
        return generate_latest(self.registry)
