"""The last spans of a process: flushed if the collector runs, dropped if it is down."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

_END = """
import sys
from pipeline.telemetry import spans_export as export
provider = export.start(sys.argv[1], process_wide=False)
provider.get_tracer("test").start_span("act").end()
sent, leave = [], provider.shutdown
provider.shutdown = lambda: (leave(), sent.append("all"))
export.stop(timeout=600)
print(*sent)
"""


def ended(endpoint: str) -> tuple[str, str]:
    """Return whether a traced process waited at its end for its spans, and what it printed.

    An exporter without a collector retries for half a minute here, and gets ten seconds.
    """
    environ = {**os.environ, "OTEL_EXPORTER_OTLP_TIMEOUT": "3600"}
    command = [sys.executable, "-c", _END, endpoint]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100, check=True)
    return done.stdout.strip(), done.stderr


@pytest.fixture
def unreachable() -> Iterator[str]:
    """Return an endpoint at which nothing can listen."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_a_process_whose_collector_is_down_ends_at_once_without_a_warning(unreachable: str) -> None:
    assert ended(unreachable) == ("", "")


def test_a_running_collector_gets_the_last_spans() -> None:
    received = threading.Event()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            received.set()
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        result = ended(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert (received.is_set(), result) == (True, ("all", ""))
