"""Where numbers go: to an endpoint that Prometheus scrapes, or over OTLP to a collector.

Nothing of the SDK is imported before counting begins. A process that forks makes a channel first; its children count
by themselves and hand over what they counted, and the process that is asked adds everything up.
"""

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from opentelemetry import metrics as api

from pipeline.config import Settings, SettingsError
from pipeline.telemetry import metrics
from pipeline.telemetry.metrics_export.totals import MetricChannel, MetricPoint, MetricTotals

log = logging.getLogger(__name__)

FLUSH_SECONDS = 3.0  #: seconds that a process which ends gives its last numbers to get out
#: Adds gauges to a meter; only processes that are asked do.
GaugeRegistration = Callable[[api.Meter], None]


def require_exporter(settings: Settings) -> None:
    """Refuse an endpoint when what serves it is not installed."""
    missing = [name for name in ("opentelemetry.sdk", "prometheus_client") if not _is_installed(name)]
    if settings.metrics_port is not None and missing:
        raise SettingsError(
            [
                "PIPELINE_METRICS_PORT: what serves metrics there is not installed; expected the extra `otel` "
                "(pip install 'pipeline[otel]'), or no port"
            ]
        )


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def is_pushed(settings: Settings) -> bool:
    """Whether numbers go to the collector: where nothing is scraped, or where somebody asked for it by name."""
    asked = os.environ.get("OTEL_METRICS_EXPORTER", "").strip().lower()
    if not settings.otlp_endpoint or asked == "none":
        return False
    return settings.metrics_port is None or asked == "otlp"


@dataclass
class MetricsExport:
    """What one process counts with, and what becomes of it. A child's is its parent's, made over by ``begin_child``."""

    settings: Settings
    is_forking: bool = False
    totals: MetricTotals = field(default_factory=MetricTotals)
    channel: MetricChannel | None = None
    endpoint: Any = None
    provider: Any = None
    reader: Any = None
    pid: int = field(default_factory=os.getpid)
    _scraping: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_served(self) -> bool:
        """Whether somebody may come and ask."""
        return self.settings.metrics_port is not None

    @property
    def is_enabled(self) -> bool:
        """Whether anything is counted at all."""
        return self.is_served or is_pushed(self.settings)

    def open_channel(self) -> None:
        """Before this process forks: what its children need to find."""
        if self.is_served and self.is_forking:
            self.channel = MetricChannel()

    def begin(self, *registers: GaugeRegistration) -> None:
        """Count, and answer from now on. Call it once per process, after those before it have been forked."""
        if not self.is_enabled:
            return
        from pipeline.telemetry.metrics_export import collector

        self.reader = collector.pull_reader() if self.is_served else None
        self._use_readers([self.reader] if self.is_served else [], process_wide=not self.is_forking)
        meter = self.provider.get_meter(metrics.SCOPE)
        for register in registers:
            register(meter)
        if self.channel is not None:
            receive = threading.Thread(target=self.channel.receive, args=(self.totals,), name="pipeline-counts")
            receive.daemon = True
            receive.start()
        if self.is_served:
            self._serve()

    def begin_child(self) -> None:
        """In a process that a fork made: count by itself, and hand over."""
        if not self.is_enabled:
            return
        from pipeline.telemetry.metrics_export import collector

        inherited, self.pid, self.is_forking = self.provider, os.getpid(), False
        if self.endpoint is not None:
            self.endpoint.close_inherited_socket()
            self.endpoint = None
        if inherited is not None:  # a copy of the parent's, which tells what it has. A lock of it may be held for ever
            threading.Thread(target=inherited.shutdown, name="pipeline-not-ours", daemon=True).start()
        if self.channel is not None:
            self.channel.close_receiver()
        self._use_readers(
            [collector.handover_reader(self.channel)] if self.channel is not None else [], process_wide=True
        )

    def end(self, timeout: float = FLUSH_SECONDS) -> None:
        """Let the last numbers out. A collector that does not answer is waited for only so long."""
        if self.provider is None or self.pid != os.getpid():
            return
        provider, self.provider = self.provider, None
        leaving = threading.Thread(target=provider.shutdown, name="pipeline-last-numbers", daemon=True)
        leaving.start()
        leaving.join(timeout)
        if self.endpoint is not None:
            self.endpoint.close()
        if self.channel is not None and self.is_forking:  # a child has it from its parent, and others have it too
            self.channel.close()
        metrics.use_provider(None)

    def scrape(self) -> list[MetricPoint]:
        """Everything that was counted so far, here and in the children, and the gauges."""
        from pipeline.telemetry.metrics_export import collector

        with self._scraping:
            rows, gauges = collector.collect(self.reader)
            self.totals.add(rows, self.pid)
            return [*self.totals.points(), *gauges]

    def _use_readers(self, readers: list[Any], *, process_wide: bool) -> None:
        from pipeline.telemetry.metrics_export import collector

        pushed = [collector.push_reader(self.settings.otlp_endpoint)] if is_pushed(self.settings) else []
        self.provider = collector.meter_provider([*readers, *pushed])
        metrics.use_provider(self.provider)
        if process_wide and not metrics.is_configured(api.get_meter_provider()):
            api.set_meter_provider(self.provider)

    def _serve(self) -> None:
        from pipeline.telemetry.metrics_export.server import MetricsEndpoint

        assert self.settings.metrics_port is not None
        self.endpoint = MetricsEndpoint(self.settings.metrics_host, self.settings.metrics_port, self.scrape)
        self.endpoint.start()
