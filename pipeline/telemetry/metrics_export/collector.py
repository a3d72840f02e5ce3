"""Collect what processes count and add it up; imported only by a process that exports metrics.

The SDK counts differences. A process that answers scrapes collects its own when it is scraped. A child of its pool
hands over once a second what it has counted since, and forgets it only when it is out. So nothing is counted twice,
and no total decreases when a child ends and another takes its place.
"""

import errno
import json
import logging
import operator
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from opentelemetry.sdk import metrics as sdk
from opentelemetry.sdk.metrics import export
from opentelemetry.sdk.resources import Resource

from pipeline.telemetry.metrics import COUNTER, GAUGE, HISTOGRAM, UP_DOWN

log = logging.getLogger(__name__)

HANDOVER_SECONDS = 1.0  #: between two handovers of a child: what a killed child loses at most
FINAL_HANDOVER_SECONDS = 1.0  #: for the last handover of a child that ends
#: Series that are kept at most. Ours are far fewer: it is for what handlers count by themselves.
MAX_SERIES = 20_000
#: Bytes of one datagram; a system that takes less says so, and it is sent in halves.
MAX_DATAGRAM_BYTES = 64 * 1024
_DELTA: dict[type, export.AggregationTemporality] = dict.fromkeys(
    (sdk.Counter, sdk.UpDownCounter, sdk.Histogram, sdk.ObservableCounter, sdk.ObservableUpDownCounter),
    export.AggregationTemporality.DELTA,
)
_LIBRARY_SCOPE = "opentelemetry"  #: scopes of libraries that measure themselves; those are not exported


def meter_provider(readers: Sequence[export.MetricReader]) -> sdk.MeterProvider:
    """A provider with our resource. Its instance is this process: those of a pool must not be taken for one."""
    resource = Resource.create({"process.pid": os.getpid()})
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "pipeline"}))
    if "OTEL_RESOURCE_ATTRIBUTES" not in os.environ or "service.instance.id" not in resource.attributes:
        resource = resource.merge(Resource({"service.instance.id": str(uuid.uuid4())}))
    return sdk.MeterProvider(
        readers, resource=resource, exemplar_filter=sdk.AlwaysOffExemplarFilter(), shutdown_on_exit=False
    )


def pull_reader() -> export.InMemoryMetricReader:
    """A reader that collects when it is asked: the differences since the last time."""
    return export.InMemoryMetricReader(preferred_temporality=_DELTA)


def handover_reader(channel: "MetricChannel") -> export.MetricReader:
    """A reader of a child, which hands over to the process that forked it."""
    return _PeriodicReader(_HandoverExporter(channel), export_interval_millis=HANDOVER_SECONDS * 1000)


def push_reader(endpoint: str) -> export.MetricReader:
    """A reader that sends to a collector, as often as `OTEL_METRIC_EXPORT_INTERVAL` says."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    return _PeriodicReader(OTLPMetricExporter(endpoint=f"{endpoint.rstrip('/')}/v1/metrics"))


class _PeriodicReader(export.PeriodicExportingMetricReader):
    def _at_fork_reinit(self) -> None:
        """Start no thread in a copy that a fork made: the process that made the reader exports its counts."""


class _HandoverExporter(export.MetricExporter):
    """Hands counts over to the parent. Counts that do not get out are added to the next handover."""

    def __init__(self, channel: "MetricChannel") -> None:
        super().__init__(preferred_temporality=_DELTA)
        self.channel, self.unsent = channel, MetricTotals()

    def export(self, metrics_data: export.MetricsData, *_: Any, **__: Any) -> export.MetricExportResult:
        """Hand over what was counted, without waiting. A child's gauges are not exported."""
        self.unsent.add(points_of(metrics_data)[0])
        self._send()
        return export.MetricExportResult.SUCCESS

    def force_flush(self, *_: Any, **__: Any) -> bool:
        """Do nothing: every export hands over at once."""
        return True

    def shutdown(self, *_: Any, **__: Any) -> None:
        """Give the parent a moment to make room: what is left when the process ends is lost."""
        ends_at = time.monotonic() + FINAL_HANDOVER_SECONDS
        while not self._send() and time.monotonic() < ends_at:
            threading.Event().wait(0.02)

    def _send(self) -> bool:
        """Hand over; returns whether nothing is left."""
        left = self.channel.send(self.unsent.take())
        self.unsent.add(left)
        return not left


class Series(NamedTuple):
    """The name, the labels and the kind of what is counted together."""

    name: str
    kind: str
    unit: str
    description: str
    bounds: tuple[float, ...]  #: of a histogram's buckets
    labels: tuple[tuple[str, str], ...]
    pid: int = 0  #: of the process, for an up-down counter: it ends with its process


#: The number of a series; of a histogram the number in each bucket, and the sum.
Numbers = tuple[float, ...]
Value = tuple[Series, Numbers]


def points_of(data: export.MetricsData | None) -> tuple[list[Value], list[Value]]:
    """Counts since the last collection, which can be added up; and the gauges as they are."""
    counts, gauges = list[Value](), list[Value]()
    for resource in data.resource_metrics if data is not None else ():
        for scope in resource.scope_metrics:
            for metric in scope.metrics if not scope.scope.name.startswith(_LIBRARY_SCOPE) else ():
                (gauges if isinstance(metric.data, export.Gauge) else counts).extend(_values(metric))
    return counts, gauges


def _values(metric: Any) -> Iterator[Value]:
    kind = _point_kind(metric.data)
    about, pid = (metric.name, kind, metric.unit or "", metric.description or ""), os.getpid() if kind == UP_DOWN else 0
    for point in metric.data.data_points:
        labels = tuple(sorted((str(key), str(value)) for key, value in (point.attributes or {}).items()))
        if kind == HISTOGRAM:
            yield Series(*about, tuple(point.explicit_bounds), labels), (*point.bucket_counts, point.sum)
        else:
            yield Series(*about, (), labels, pid), (point.value,)


def _point_kind(data: object) -> str:
    match data:
        case export.Histogram():
            return HISTOGRAM
        case export.Gauge():
            return GAUGE
        case export.Sum(is_monotonic=False):
            return UP_DOWN
    return COUNTER


class MetricTotals:
    """Sums of counts by series."""

    def __init__(self) -> None:
        self._sums: dict[Series, Numbers] = {}
        self._lock = threading.Lock()
        self._has_warned = False

    def add(self, values: Iterable[Value]) -> None:
        """Add what a process counted. New series are not kept when there are too many."""
        with self._lock:
            for series, numbers in values:
                if series in self._sums:
                    self._sums[series] = tuple(map(operator.add, self._sums[series], numbers))
                elif len(self._sums) < MAX_SERIES:
                    self._sums[series] = numbers
                elif not self._has_warned:
                    self._has_warned = True
                    log.warning("more than %d series are counted: new ones, of %s, are not", MAX_SERIES, series.name)

    def take(self) -> list[Value]:
        """Return all sums, and begin anew."""
        with self._lock:
            sums, self._sums = self._sums, {}
        return list(sums.items())

    def values(self) -> list[Value]:
        """All sums. The up-down counters of processes that have ended are dropped, the others are added up."""
        with self._lock:
            ended = {pid for pid in {series.pid for series in self._sums} if pid and not _is_alive(pid)}
            self._sums = {series: numbers for series, numbers in self._sums.items() if series.pid not in ended}
            kept = list(self._sums.items())
        added = MetricTotals()
        added.add((series._replace(pid=0), numbers) for series, numbers in kept)
        return added.take()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class MetricChannel:
    """From the children of a pool to the process that forks them: made before they are, one datagram at a time."""

    def __init__(self) -> None:
        self.sender, self.receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sender.setblocking(False)

    def send(self, sent: Sequence[Value]) -> Sequence[Value]:
        """Hand values over without waiting. Returns those that did not get out: the parent is busy or gone."""
        if not sent:
            return []
        message = json.dumps(sent).encode()
        try:
            if len(message) > MAX_DATAGRAM_BYTES:
                raise OSError(errno.EMSGSIZE, "more than one datagram")
            self.sender.send(message)
        except OSError as error:
            if error.errno != errno.EMSGSIZE:
                return sent
            middle = len(sent) // 2
            return [*self.send(sent[:middle]), *self.send(sent[middle:])] if middle else []
        return []

    def receive(self, totals: MetricTotals) -> None:
        """Add up what comes, until the channel is closed."""
        try:
            while message := self.receiver.recv(MAX_DATAGRAM_BYTES):
                totals.add(map(_decoded_value, json.loads(message)))
        except OSError:
            log.debug("the channel was closed", exc_info=True)

    def close(self) -> None:
        """Close both ends; ``receive`` returns."""
        self.receiver.shutdown(socket.SHUT_RDWR)
        self.receiver.close()
        self.sender.close()


def _decoded_value(written: Any) -> Value:
    """A value as it was before it was written as JSON."""
    (name, kind, unit, description, bounds, labels, pid), numbers = written
    pairs = tuple((key, value) for key, value in labels)
    return Series(name, kind, unit, description, tuple(bounds), pairs, pid), tuple(numbers)
