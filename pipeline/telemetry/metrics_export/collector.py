"""The SDK's side of counting; imported only by processes in which somebody counts.

A process that is asked for its numbers collects them then. One that belongs to a pool hands over every second what it
has counted since. In both the SDK counts differences, which can be added up across processes.
"""

import os
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from opentelemetry.sdk.metrics import (
    AlwaysOffExemplarFilter,
    Counter,
    Histogram,
    MeterProvider,
    ObservableCounter,
    ObservableUpDownCounter,
    UpDownCounter,
)
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    InMemoryMetricReader,
    MetricExporter,
    MetricExportResult,
    MetricReader,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.metrics.export import Gauge as GaugeData
from opentelemetry.sdk.metrics.export import Histogram as HistogramData
from opentelemetry.sdk.metrics.export import Sum as SumData
from opentelemetry.sdk.resources import Resource

from pipeline.telemetry.metrics_export.totals import HISTOGRAM, SUM, UP_DOWN, MetricChannel, MetricPoint, MetricTotals

GAUGE_KIND = "gauge"
FINAL_HANDOVER_SECONDS = 1.0  #: seconds for the last handover of a process that ends
HANDOVER_SECONDS = 1.0  #: seconds between two handovers: what a process loses at most that is killed
_DELTA_TEMPORALITY: dict[type, AggregationTemporality] = dict.fromkeys(
    (Counter, UpDownCounter, Histogram, ObservableCounter, ObservableUpDownCounter), AggregationTemporality.DELTA
)
#: Of the libraries that watch themselves; what handlers count by themselves is welcome.
_LIBRARY_SCOPE = "opentelemetry"


def meter_provider(readers: Sequence[MetricReader]) -> MeterProvider:
    """A provider with our resource. Its instance is this process: those of a pool must not be taken for one."""
    resource = Resource.create({"process.pid": os.getpid()})
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "pipeline"}))
    if "OTEL_RESOURCE_ATTRIBUTES" not in os.environ or "service.instance.id" not in resource.attributes:
        resource = resource.merge(Resource({"service.instance.id": str(uuid.uuid4())}))
    return MeterProvider(readers, resource=resource, exemplar_filter=AlwaysOffExemplarFilter(), shutdown_on_exit=False)


def pull_reader() -> InMemoryMetricReader:
    """A reader that collects when it is asked, what has come since it last was."""
    return InMemoryMetricReader(preferred_temporality=_DELTA_TEMPORALITY)


def handover_reader(channel: MetricChannel) -> PeriodicExportingMetricReader:
    """A reader that hands over to the process that started this one."""
    return PeriodicExportingMetricReader(_HandoverExporter(channel), export_interval_millis=HANDOVER_SECONDS * 1000)


def push_reader(endpoint: str) -> PeriodicExportingMetricReader:
    """A reader that sends to a collector, as often as `OTEL_METRIC_EXPORT_INTERVAL` says."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    return PeriodicExportingMetricReader(
        _SameProcessExporter(OTLPMetricExporter(endpoint=f"{endpoint.rstrip('/')}/v1/metrics"))
    )


def collect(reader: InMemoryMetricReader) -> tuple[list[MetricPoint], list[MetricPoint]]:
    """What was counted since the last time, and the gauges as they are."""
    rows = list(points_of(reader.get_metrics_data()))
    return [row for row in rows if row.kind != GAUGE_KIND], [row for row in rows if row.kind == GAUGE_KIND]


def points_of(data: MetricsData | None) -> Iterator[MetricPoint]:
    """What the SDK collected, as rows."""
    for resource in data.resource_metrics if data is not None else ():
        for scope in resource.scope_metrics:
            if not scope.scope.name.startswith(_LIBRARY_SCOPE):
                for metric in scope.metrics:
                    yield from _points(metric)


def _points(metric: Any) -> Iterator[MetricPoint]:
    kind = _point_kind(metric.data)
    if kind is None:
        return
    for point in metric.data.data_points:
        labels = tuple(sorted((str(key), str(value)) for key, value in (point.attributes or {}).items()))
        about = (metric.name, kind, metric.unit or "", metric.description or "")
        if kind == HISTOGRAM:
            value = (point.count, point.sum, tuple(point.bucket_counts))
            yield MetricPoint(*about, tuple(point.explicit_bounds), labels, value)
        else:
            yield MetricPoint(*about, (), labels, point.value)


def _point_kind(data: object) -> str | None:
    match data:
        case SumData(is_monotonic=True):
            return SUM
        case SumData():
            return UP_DOWN
        case HistogramData():
            return HISTOGRAM
        case GaugeData():
            return GAUGE_KIND
    return None


class _HandoverExporter(MetricExporter):
    """Keeps what does not get out, and adds it to what comes next."""

    def __init__(self, channel: MetricChannel) -> None:
        super().__init__(preferred_temporality=_DELTA_TEMPORALITY)
        self.channel, self.unsent, self.pid = channel, MetricTotals(), os.getpid()

    def export(self, metrics_data: MetricsData, *_: Any, **__: Any) -> MetricExportResult:
        """Hand over what was counted, without waiting."""
        if os.getpid() == self.pid:  # else a copy that a fork made: what it has is told by the original
            self.unsent.add(row for row in points_of(metrics_data) if row.kind != GAUGE_KIND)
            self._send()
        return MetricExportResult.SUCCESS

    def force_flush(self, *_: Any, **__: Any) -> bool:
        """Everything that can be out is."""
        return True

    def shutdown(self, *_: Any, **__: Any) -> None:
        """The process ends: what is left now is lost, so the other end is given a moment to make room."""
        ends_at = time.monotonic() + FINAL_HANDOVER_SECONDS
        while os.getpid() == self.pid and not self._send() and time.monotonic() < ends_at:
            threading.Event().wait(0.02)

    def _send(self) -> bool:
        """Whether nothing is left."""
        rows = self.unsent.take()
        left = self.channel.send(rows) if rows else []
        self.unsent.add(left)
        return not left


class _SameProcessExporter(MetricExporter):
    """Exports from the process that made it, and from no copy of it."""

    def __init__(self, usual: MetricExporter) -> None:
        super().__init__(usual._preferred_temporality, usual._preferred_aggregation)
        self.exporter, self.pid = usual, os.getpid()

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **options: Any) -> MetricExportResult:
        if os.getpid() != self.pid:
            return MetricExportResult.SUCCESS
        return self.exporter.export(metrics_data, timeout_millis, **options)

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return self.exporter.force_flush(timeout_millis)

    def shutdown(self, timeout_millis: float = 30_000, **options: Any) -> None:
        if os.getpid() == self.pid:
            self.exporter.shutdown(timeout_millis, **options)
