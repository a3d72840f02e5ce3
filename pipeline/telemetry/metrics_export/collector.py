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

from pipeline.telemetry.metrics_export.totals import HISTOGRAM, LEVEL, SUM, Channel, Row, Totals

GAUGE = "gauge"
LAST_MOMENT = 1.0  #: seconds for the last handover of a process that ends
EVERY = 1.0  #: seconds between two handovers: what a process loses at most that is killed
_DIFFERENCES: dict[type, AggregationTemporality] = dict.fromkeys(
    (Counter, UpDownCounter, Histogram, ObservableCounter, ObservableUpDownCounter), AggregationTemporality.DELTA
)
#: Of the libraries that watch themselves; what handlers count by themselves is welcome.
_NOT_OURS = "opentelemetry"


def provider(readers: Sequence[MetricReader]) -> MeterProvider:
    """A provider with our resource. Its instance is this process: those of a pool must not be taken for one."""
    resource = Resource.create({"process.pid": os.getpid()})
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "pipeline"}))
    if "OTEL_RESOURCE_ATTRIBUTES" not in os.environ or "service.instance.id" not in resource.attributes:
        resource = resource.merge(Resource({"service.instance.id": str(uuid.uuid4())}))
    return MeterProvider(readers, resource=resource, exemplar_filter=AlwaysOffExemplarFilter(), shutdown_on_exit=False)


def asked() -> InMemoryMetricReader:
    """A reader that collects when it is asked, what has come since it last was."""
    return InMemoryMetricReader(preferred_temporality=_DIFFERENCES)


def handing_over(channel: Channel) -> PeriodicExportingMetricReader:
    """A reader that hands over to the process that started this one."""
    return PeriodicExportingMetricReader(_HandOver(channel), export_interval_millis=EVERY * 1000)


def pushing(endpoint: str) -> PeriodicExportingMetricReader:
    """A reader that sends to a collector, as often as `OTEL_METRIC_EXPORT_INTERVAL` says."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    return PeriodicExportingMetricReader(_OnlyHere(OTLPMetricExporter(endpoint=f"{endpoint.rstrip('/')}/v1/metrics")))


def taken(reader: InMemoryMetricReader) -> tuple[list[Row], list[Row]]:
    """What was counted since the last time, and the gauges as they are."""
    rows = list(rows_of(reader.get_metrics_data()))
    return [row for row in rows if row.kind != GAUGE], [row for row in rows if row.kind == GAUGE]


def rows_of(data: MetricsData | None) -> Iterator[Row]:
    """What the SDK collected, as rows."""
    for resource in data.resource_metrics if data is not None else ():
        for scope in resource.scope_metrics:
            if not scope.scope.name.startswith(_NOT_OURS):
                for metric in scope.metrics:
                    yield from _rows(metric)


def _rows(metric: Any) -> Iterator[Row]:
    kind = _kind(metric.data)
    if kind is None:
        return
    for point in metric.data.data_points:
        labels = tuple(sorted((str(key), str(value)) for key, value in (point.attributes or {}).items()))
        about = (metric.name, kind, metric.unit or "", metric.description or "")
        if kind == HISTOGRAM:
            value = (point.count, point.sum, tuple(point.bucket_counts))
            yield Row(*about, tuple(point.explicit_bounds), labels, value)
        else:
            yield Row(*about, (), labels, point.value)


def _kind(data: object) -> str | None:
    match data:
        case SumData(is_monotonic=True):
            return SUM
        case SumData():
            return LEVEL
        case HistogramData():
            return HISTOGRAM
        case GaugeData():
            return GAUGE
    return None


class _HandOver(MetricExporter):
    """Keeps what does not get out, and adds it to what comes next."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(preferred_temporality=_DIFFERENCES)
        self.channel, self.kept, self.pid = channel, Totals(), os.getpid()

    def export(self, metrics_data: MetricsData, *_: Any, **__: Any) -> MetricExportResult:
        """Hand over what was counted, without waiting."""
        if os.getpid() == self.pid:  # else a copy that a fork made: what it has is told by the original
            self.kept.add(row for row in rows_of(metrics_data) if row.kind != GAUGE)
            self._send()
        return MetricExportResult.SUCCESS

    def force_flush(self, *_: Any, **__: Any) -> bool:
        """Everything that can be out is."""
        return True

    def shutdown(self, *_: Any, **__: Any) -> None:
        """The process ends: what is left now is lost, so the other end is given a moment to make room."""
        ends_at = time.monotonic() + LAST_MOMENT
        while os.getpid() == self.pid and not self._send() and time.monotonic() < ends_at:
            threading.Event().wait(0.02)

    def _send(self) -> bool:
        """Whether nothing is left."""
        rows = self.kept.take()
        left = self.channel.send(rows) if rows else []
        self.kept.add(left)
        return not left


class _OnlyHere(MetricExporter):
    """Exports from the process that made it, and from no copy of it."""

    def __init__(self, usual: MetricExporter) -> None:
        super().__init__(usual._preferred_temporality, usual._preferred_aggregation)
        self.usual, self.pid = usual, os.getpid()

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **options: Any) -> MetricExportResult:
        if os.getpid() != self.pid:
            return MetricExportResult.SUCCESS
        return self.usual.export(metrics_data, timeout_millis, **options)

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return self.usual.force_flush(timeout_millis)

    def shutdown(self, timeout_millis: float = 30_000, **options: Any) -> None:
        if os.getpid() == self.pid:
            self.usual.shutdown(timeout_millis, **options)
