"""Collect the counts of processes and add them up; imported only by a process that exports metrics.

The SDK counts differences. A process that answers scrapes collects its own on scrape. A child of its pool hands over
its new counts once a second, and drops them only after they were sent. So nothing is counted twice, and no total
decreases when another child replaces one that ended.
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
#: Series that are kept at most. Ours are far fewer: the limit is for metrics of user code.
MAX_SERIES = 20_000
#: Bytes of one datagram; where the system takes less, it is sent in halves.
MAX_DATAGRAM_BYTES = 64 * 1024
_DELTA: dict[type, export.AggregationTemporality] = dict.fromkeys(
    (sdk.Counter, sdk.UpDownCounter, sdk.Histogram, sdk.ObservableCounter, sdk.ObservableUpDownCounter),
    export.AggregationTemporality.DELTA,
)
_LIBRARY_SCOPE = "opentelemetry"  #: scopes of libraries that measure themselves; those are not exported


def meter_provider(readers: Sequence[export.MetricReader]) -> sdk.MeterProvider:
    """Create a provider with our resource; the instance is this process, so that children stay apart."""
    resource = Resource.create({"process.pid": os.getpid()})
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "pipeline"}))
    if "OTEL_RESOURCE_ATTRIBUTES" not in os.environ or "service.instance.id" not in resource.attributes:
        resource = resource.merge(Resource({"service.instance.id": str(uuid.uuid4())}))
    return sdk.MeterProvider(
        readers, resource=resource, exemplar_filter=sdk.AlwaysOffExemplarFilter(), shutdown_on_exit=False
    )


def pull_reader() -> export.InMemoryMetricReader:
    """Create a reader that collects the differences since its last collection."""
    return export.InMemoryMetricReader(preferred_temporality=_DELTA)


def handover_reader(channel: "MetricChannel") -> export.MetricReader:
    """Create the reader of a child, which hands over to the process that forked it."""
    return _PeriodicReader(_HandoverExporter(channel), export_interval_millis=HANDOVER_SECONDS * 1000)


def push_reader(endpoint: str) -> export.MetricReader:
    """Create a reader that sends to a collector every `OTEL_METRIC_EXPORT_INTERVAL`."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    return _PeriodicReader(OTLPMetricExporter(endpoint=f"{endpoint.rstrip('/')}/v1/metrics"))


class _PeriodicReader(export.PeriodicExportingMetricReader):
    def _at_fork_reinit(self) -> None:
        """Start no thread in the copy of a fork: the parent exports these counts."""


class _HandoverExporter(export.MetricExporter):
    """Hand counts over to the parent. Unsent counts are added to the next handover."""

    def __init__(self, channel: "MetricChannel") -> None:
        super().__init__(preferred_temporality=_DELTA)
        self.channel, self.unsent = channel, MetricTotals()

    def export(self, metrics_data: export.MetricsData, *_: Any, **__: Any) -> export.MetricExportResult:
        """Hand over the counts, without waiting. A child's gauges are not exported."""
        self.unsent.add(points_of(metrics_data)[0])
        self._send()
        return export.MetricExportResult.SUCCESS

    def force_flush(self, *_: Any, **__: Any) -> bool:
        """Do nothing: every export hands over at once."""
        return True

    def shutdown(self, *_: Any, **__: Any) -> None:
        """Give the parent a moment to read: counts that are left when the process ends are lost."""
        ends_at = time.monotonic() + FINAL_HANDOVER_SECONDS
        while not self._send() and time.monotonic() < ends_at:
            threading.Event().wait(0.02)

    def _send(self) -> bool:
        """Hand over; return whether nothing is left."""
        left = self.channel.send(self.unsent.take())
        self.unsent.add(left)
        return not left


class Series(NamedTuple):
    """The name, kind and labels of values that are added up."""

    name: str
    kind: str
    unit: str
    description: str
    bounds: tuple[float, ...]  #: of a histogram's buckets
    labels: tuple[tuple[str, str], ...]
    pid: int = 0  #: of an up-down counter's process, which it ends with


#: The number of a series; of a histogram the number in each bucket, and the sum.
Numbers = tuple[float, ...]
Value = tuple[Series, Numbers]


def points_of(data: export.MetricsData | None) -> tuple[list[Value], list[Value]]:
    """Return the counts since the last collection, which can be added up, and the gauges."""
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
        """Add the counts of a process. New series beyond ``MAX_SERIES`` are dropped."""
        with self._lock:
            for series, numbers in values:
                if series in self._sums:
                    self._sums[series] = tuple(map(operator.add, self._sums[series], numbers))
                elif len(self._sums) < MAX_SERIES:
                    self._sums[series] = numbers
                elif not self._has_warned:
                    self._has_warned = True
                    log.warning("more than %d series: new ones, of %s, are dropped", MAX_SERIES, series.name)

    def take(self) -> list[Value]:
        """Return all sums, and reset them."""
        with self._lock:
            sums, self._sums = self._sums, {}
        return list(sums.items())

    def values(self) -> list[Value]:
        """Return all sums; up-down counters of processes that have ended are dropped."""
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
    """Send counts from children to the process that forks them, as datagrams; created before the first fork."""

    def __init__(self) -> None:
        self.sender, self.receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sender.setblocking(False)

    def send(self, sent: Sequence[Value]) -> Sequence[Value]:
        """Send values without waiting. Returns those that were not sent: the parent is busy or gone."""
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
        """Add up received values until the channel is closed."""
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
    """Rebuild a value from JSON."""
    (name, kind, unit, description, bounds, labels, pid), numbers = written
    pairs = tuple((key, value) for key, value in labels)
    return Series(name, kind, unit, description, tuple(bounds), pairs, pid), tuple(numbers)
