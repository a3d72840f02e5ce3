"""Export the metrics of a process: scraped by Prometheus, or pushed over OTLP to a collector.

The SDK is imported only when the export begins. A process that forks opens a channel first. Its children count
separately and hand over their counts; the process that answers scrapes adds them up.
"""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from opentelemetry import metrics as api

from pipeline.config import Settings, SettingsError
from pipeline.telemetry import metrics

if TYPE_CHECKING:
    from pipeline.telemetry.metrics_collector import MetricChannel, MetricTotals, Value
    from pipeline.telemetry.metrics_endpoint import MetricsEndpoint

FLUSH_SECONDS = 3.0  #: seconds that an ending process waits for its last export
#: Adds gauges to a meter.
GaugeRegistration = Callable[[api.Meter], None]


def require_exporter(settings: Settings) -> None:
    """Refuse an endpoint when the packages that serve it are not installed."""
    missing = [name for name in ("opentelemetry.sdk", "prometheus_client") if not _is_installed(name)]
    if settings.metrics_port is not None and missing:
        raise SettingsError(
            [
                "PIPELINE_METRICS_PORT: the metrics exporter is not installed; expected the extra `otel` "
                "(pip install 'celery-durable-effects[otel]'), or no port"
            ]
        )


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def is_pushed(settings: Settings) -> bool:
    """Return whether metrics are pushed: if nothing is scraped, or OTEL_METRICS_EXPORTER asks for it."""
    asked = os.environ.get("OTEL_METRICS_EXPORTER", "").strip().lower()
    if not settings.otlp_endpoint or asked == "none":
        return False
    return settings.metrics_port is None or asked == "otlp"


@dataclass
class MetricsExport:
    """Export the metrics of one process. A child uses the object of its parent, after ``begin_child``."""

    settings: Settings
    is_forking: bool = False
    totals: "MetricTotals | None" = None
    channel: "MetricChannel | None" = None
    endpoint: "MetricsEndpoint | None" = None
    provider: Any = None
    reader: Any = None
    pid: int = field(default_factory=os.getpid)
    _scraping: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_served(self) -> bool:
        """Whether an endpoint answers scrapes."""
        return self.settings.metrics_port is not None

    @property
    def is_enabled(self) -> bool:
        """Whether metrics are exported at all."""
        return self.is_served or is_pushed(self.settings)

    def open_channel(self) -> None:
        """Create the channel of the children, before this process forks."""
        if self.is_served and self.is_forking:
            from pipeline.telemetry.metrics_collector import MetricChannel

            self.channel = MetricChannel()

    def begin(self, *registers: GaugeRegistration) -> None:
        """Start to count and export. Call it once per process, after the first children were forked."""
        if not self.is_enabled:
            return
        from pipeline.telemetry import metrics_collector

        self.totals, self.reader = (
            metrics_collector.MetricTotals(),
            metrics_collector.pull_reader() if self.is_served else None,
        )
        self._use_readers([self.reader] if self.is_served else [], process_wide=not self.is_forking)
        meter = self.provider.get_meter(metrics.SCOPE)
        for register in registers:
            register(meter)
        if self.channel is not None:
            receive = self.channel.receive
            threading.Thread(target=receive, args=(self.totals,), name="pipeline-metrics-receiver", daemon=True).start()
        if self.settings.metrics_port is not None:
            from pipeline.telemetry.metrics_endpoint import MetricsEndpoint

            self.endpoint = MetricsEndpoint(self.settings.metrics_host, self.settings.metrics_port, self.scrape)
            self.endpoint.start()

    def begin_child(self) -> None:
        """Start to count in a forked child, and hand over to the parent."""
        if not self.is_enabled:
            return
        from pipeline.telemetry import metrics_collector

        self.pid, self.is_forking = os.getpid(), False
        if self.endpoint is not None:
            self.endpoint.close_inherited_socket()
            self.endpoint = None
        self._use_readers(
            [metrics_collector.handover_reader(self.channel)] if self.channel is not None else [], process_wide=True
        )

    def end(self, timeout: float = FLUSH_SECONDS) -> None:
        """Export the last metrics; wait at most ``timeout`` for the collector."""
        if self.provider is None or self.pid != os.getpid():
            return
        provider, self.provider = self.provider, None
        shutdown = threading.Thread(target=provider.shutdown, name="pipeline-flush-metrics", daemon=True)
        shutdown.start()
        shutdown.join(timeout)
        if self.endpoint is not None:
            self.endpoint.close()
        if self.channel is not None and self.is_forking:  # a child shares it with its parent and siblings
            self.channel.close()
        metrics.use_provider(None)

    def scrape(self) -> "list[Value]":
        """Return the counts of this process and its children, and the gauges."""
        from pipeline.telemetry import metrics_collector

        assert self.totals is not None
        with self._scraping:
            counts, gauges = metrics_collector.points_of(self.reader.get_metrics_data())
            self.totals.add(counts)
            return [*self.totals.values(), *gauges]

    def _use_readers(self, readers: list[Any], *, process_wide: bool) -> None:
        from pipeline.telemetry import metrics_collector

        pushed = [metrics_collector.push_reader(self.settings.otlp_endpoint)] if is_pushed(self.settings) else []
        self.provider = metrics_collector.meter_provider([*readers, *pushed])
        metrics.use_provider(self.provider)
        if process_wide and not metrics.is_configured(api.get_meter_provider()):
            api.set_meter_provider(self.provider)
