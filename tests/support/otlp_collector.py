"""A collector for spans and metrics: OTLP over HTTP as the wire has it, kept in memory. It may be slow, or refuse."""

import gzip
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector(ThreadingHTTPServer):
    """Remembers every span that it was sent."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.received: list[tuple[dict[str, Any], Any]] = []  #: attributes of the resource, and the span
        self.headers: list[dict[str, str]] = []
        self.numbers: dict[tuple[str, str], Any] = {}  #: metrics by process and name
        self.lock = threading.Lock()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def spans(self, name: str = "") -> list[Any]:
        """The spans of a name, or all."""
        with self.lock:
            return [span for _, span in self.received if not name or span.name == name]

    def counts(self) -> Counter[str]:
        """How many spans of each name came."""
        return Counter(span.name for span in self.spans())

    def processes(self) -> set[int]:
        """The processes that sent spans of runs."""
        with self.lock:
            return {of["process.pid"] for of, span in self.received if span.name in ("prepare", "mutate", "next")}

    def take(self, body: bytes) -> None:
        """Remember one request."""
        request = ExportTraceServiceRequest.FromString(body)
        found = [
            (attributes(of.resource.attributes), span)
            for of in request.resource_spans
            for scope in of.scope_spans
            for span in scope.spans
        ]
        with self.lock:
            self.received += found

    def take_numbers(self, body: bytes) -> None:
        """Remember one request with metrics: the last word of each process counts."""
        for of in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            who = attributes(of.resource.attributes)["service.instance.id"]
            with self.lock:
                for scope in of.scope_metrics:
                    self.numbers |= {(who, metric.name): metric for metric in scope.metrics}

    def number(self, name: str, **labels: str) -> float:
        """A counter over all processes."""
        with self.lock:
            points = [
                point for (_, of), metric in self.numbers.items() if of == name for point in metric.sum.data_points
            ]
        found = [point for point in points if labels.items() <= attributes(point.attributes).items()]
        return float(sum(point.as_int + point.as_double for point in found))


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.path in ("/v1/traces", "/v1/metrics")
        self.server.headers.append(dict(self.headers))
        body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        if self.path == "/v1/traces":
            self.server.take(body)
        else:
            self.server.take_numbers(body)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        return


def attributes(given: Any) -> dict[str, Any]:
    """Attributes as Python has them."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in given}


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens."""
    collector = Collector()
    thread = threading.Thread(target=collector.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        collector.shutdown()
        collector.server_close()
        thread.join()
