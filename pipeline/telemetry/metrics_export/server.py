"""The Prometheus endpoint of a process. Imported only where one is wanted."""

import errno
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import Metric
from prometheus_client.exposition import choose_encoder

from pipeline.telemetry.metrics import prometheus_name
from pipeline.telemetry.metrics_export.totals import HISTOGRAM, SUM, MetricPoint

log = logging.getLogger(__name__)

BIND_RETRY_SECONDS = 10.0  #: seconds until a port that is taken is tried again
METRICS_PATH = "/metrics"
_PROMETHEUS_TYPES = {SUM: "counter", HISTOGRAM: "histogram"}
Scrape = Callable[[], Iterable[MetricPoint]]


class MetricFamilies:
    """Rows as Prometheus has them. Of two metrics with one name the first is shown."""

    def __init__(self, rows: Iterable[MetricPoint]) -> None:
        self.rows = rows

    def collect(self) -> Iterator[Metric]:
        """Every family once, with its series."""
        found: dict[str, tuple[str, Metric]] = {}
        for row in self.rows:
            name = prometheus_name(row.name, row.unit, is_counter=False)
            kind, family = found.setdefault(
                name, (row.kind, Metric(name, row.description, _PROMETHEUS_TYPES.get(row.kind, "gauge")))
            )
            if kind == row.kind:
                _add_samples(family, name, row)
        yield from (family for _, family in found.values())


def _add_samples(family: Metric, name: str, row: MetricPoint) -> None:
    labels = {prometheus_name(key, "", is_counter=False): _encodable(value) for key, value in row.labels}
    if not isinstance(row.value, tuple):
        family.add_sample(f"{name}_total" if row.kind == SUM else name, labels, row.value)
        return
    count, total, buckets = row.value
    below = 0.0
    for bound, inside in zip((*map(str, row.bounds), "+Inf"), buckets, strict=True):
        below += inside
        family.add_sample(f"{name}_bucket", {**labels, "le": bound}, below)
    family.add_sample(f"{name}_count", labels, count)
    family.add_sample(f"{name}_sum", labels, total)


def _encodable(value: object) -> str:
    """A label as it can be sent: one that somebody else's code made must not silence all the others."""
    return str(value).encode("utf-8", "replace").decode()


def exposition(rows: Iterable[MetricPoint], accepts: str = "") -> tuple[str, bytes]:
    """Content type and text of an answer."""
    encode, kind = choose_encoder(accepts)
    return kind, encode(MetricFamilies(rows))  # of a registry only `collect` is asked


class MetricsEndpoint:
    """Answers scrapes, from threads of its own, until it is closed or its process ends."""

    def __init__(self, host: str, port: int, scrape: Scrape) -> None:
        self.host, self.port, self.scrape = host, port, scrape
        self._server: _Server | None = None
        self._stopping = threading.Event()
        self._has_warned = False

    def start(self) -> None:
        """Answer from now on; where the port is taken, from the moment it is free."""
        self.bind()
        threading.Thread(target=self._serve, name="pipeline-metrics", daemon=True).start()

    def bind(self) -> bool:
        """Take the port. One that is taken keeps nobody from working: it is said, and tried again."""
        try:
            self._server = self._server or _Server(self.host, self.port, self.scrape)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                taken = "another process has it" if error.errno == errno.EADDRINUSE else str(error)
                log.warning(
                    "metrics cannot be served on port %d of %s: %s. Nothing else suffers, and it is tried again every "
                    "%g s; to be scraped now, give this process a PIPELINE_METRICS_PORT of its own",
                    self.port,
                    self.host,
                    taken,
                    BIND_RETRY_SECONDS,
                )
            return False
        return True

    def close_inherited_socket(self) -> None:
        """Let go of the port in a process that a fork made: it belongs to the one that answers."""
        if self._server is not None:
            self._server.socket.close()

    def close(self) -> None:
        """Answer no more."""
        self._stopping.set()
        if self._server is not None:
            ending = threading.Thread(target=self._server.shutdown, name="pipeline-metrics-end", daemon=True)
            ending.start()
            ending.join(2.0)
            self._server.server_close()

    def _serve(self) -> None:
        while not self.bind():
            if self._stopping.wait(BIND_RETRY_SECONDS):
                return
        if self._has_warned:
            log.info("metrics are served on port %d of %s now", self.port, self.host)
        assert self._server is not None
        self._server.serve_forever()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, scrape: Scrape) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.scrape = scrape
        super().__init__((host, port), _Handler)

    def handle_error(self, *_: Any) -> None:
        log.warning("a scrape was not answered", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10.0

    def do_GET(self) -> None:
        if urlsplit(self.path).path != METRICS_PATH:
            return self._answer(404, "text/plain; charset=utf-8", f"Expected {METRICS_PATH}.\n".encode())
        kind, body = exposition(self.server.scrape(), self.headers.get("Accept", ""))
        return self._answer(200, kind, body)

    def _answer(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nobody wants a line per scrape."""
