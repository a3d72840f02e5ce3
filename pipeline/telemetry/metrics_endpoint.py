"""Serve metrics to Prometheus; imported only by a process with an endpoint."""

import errno
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from http.server import ThreadingHTTPServer
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import MetricsHandler, generate_latest
from prometheus_client.registry import Collector

from pipeline.telemetry.metrics import COUNTER, HISTOGRAM, prometheus_name
from pipeline.telemetry.metrics_collector import Numbers, Series, Value

log = logging.getLogger(__name__)

BIND_RETRY_SECONDS = 10.0  #: seconds between attempts to bind a port that is taken
METRICS_PATH = "/metrics"
_TYPES = {COUNTER: "counter", HISTOGRAM: "histogram"}
Scrape = Callable[[], Iterable[Value]]


class MetricFamilies(Collector):
    """Convert series for Prometheus. Of two metrics with one name the first is kept."""

    def __init__(self, scrape: Scrape) -> None:
        self.scrape = scrape

    def collect(self) -> Iterator[Metric]:
        """Yield every metric once, with its series."""
        found: dict[str, tuple[str, Metric]] = {}
        for series, numbers in self.scrape():
            name = prometheus_name(series.name, series.unit, is_counter=False)
            new = series.kind, Metric(name, series.description, _TYPES.get(series.kind, "gauge"))
            kind, family = found.setdefault(name, new)
            if kind == series.kind:
                _add_samples(family, series, numbers)
        yield from (family for _, family in found.values())


def _add_samples(family: Metric, series: Series, numbers: Numbers) -> None:
    labels = {prometheus_name(key, "", is_counter=False): _encodable(value) for key, value in series.labels}
    if series.kind != HISTOGRAM:
        family.add_sample(f"{family.name}_total" if series.kind == COUNTER else family.name, labels, numbers[0])
        return
    *buckets, total = numbers
    for bound, count in zip((*map(str, series.bounds), "+Inf"), accumulate(buckets), strict=True):
        family.add_sample(f"{family.name}_bucket", {**labels, "le": bound}, count)
    family.add_sample(f"{family.name}_count", labels, sum(buckets))
    family.add_sample(f"{family.name}_sum", labels, total)


def _encodable(value: str) -> str:
    """Replace characters that cannot be encoded, which would fail the whole scrape."""
    return value.encode("utf-8", "replace").decode()


def exposition(values: Iterable[Value]) -> str:
    """Format series in the text format of Prometheus."""
    return generate_latest(_registry(lambda: values)).decode()


def _registry(scrape: Scrape) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(MetricFamilies(scrape))
    return registry


class MetricsEndpoint:
    """Answer scrapes in separate threads, until it is closed or the process ends."""

    def __init__(self, host: str, port: int, scrape: Scrape) -> None:
        self.host, self.port, self.scrape = host, port, scrape
        self._server: _Server | None = None
        self._stopping = threading.Event()

    def start(self) -> None:
        """Start to answer; if the port is taken, as soon as it is free."""
        is_bound = self._bind(warn=True)
        threading.Thread(target=self._serve, args=(is_bound,), name="pipeline-metrics", daemon=True).start()

    def close_inherited_socket(self) -> None:
        """Close the port in a forked child: it belongs to the parent."""
        if self._server is not None:
            self._server.socket.close()

    def close(self) -> None:
        """Stop to answer."""
        self._stopping.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _serve(self, is_bound: bool) -> None:
        if not is_bound:
            while not self._bind(warn=False):
                if self._stopping.wait(BIND_RETRY_SECONDS):
                    return
            log.info("metrics are served on port %d of %s now", self.port, self.host)
        assert self._server is not None
        self._server.serve_forever()

    def _bind(self, *, warn: bool) -> bool:
        """Bind the port. A port that is taken is only a warning."""
        try:
            self._server = _Server(self.host, self.port, self.scrape)
        except OSError as error:
            if warn:
                log.warning(
                    "metrics cannot be served on port %d of %s: %s. The process works without it and tries again "
                    "every %g s; to scrape it now, give it its own PIPELINE_METRICS_PORT",
                    *(self.port, self.host),
                    "another process has it" if error.errno == errno.EADDRINUSE else error,
                    BIND_RETRY_SECONDS,
                )
            return False
        return True


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, scrape: Scrape) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler.factory(_registry(scrape)))

    def handle_error(self, *_: Any) -> None:
        log.warning("a scrape was not answered", exc_info=True)


class _Handler(MetricsHandler):
    timeout = 10.0

    def do_GET(self) -> None:  # noqa: N802 - as http.server calls it
        if urlsplit(self.path).path == METRICS_PATH:
            self.path = METRICS_PATH  # prometheus_client would leave out what a query does not name
            super().do_GET()
        else:
            self.send_error(404, f"Expected {METRICS_PATH}")
