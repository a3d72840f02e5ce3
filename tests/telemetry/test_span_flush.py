"""The last spans of a process: sent when a collector is there, and waited for by nobody when it is away."""

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
from pipeline.telemetry.tracing import export
provider = export.start(sys.argv[1], process_wide=False)
provider.get_tracer("test").start_span("act").end()
sent, leave = [], provider.shutdown
provider.shutdown = lambda: (leave(), sent.append("all"))
export.stop(timeout=600)
print(*sent)
"""


def ended(endpoint: str) -> tuple[str, str]:
    """Whether a traced process waited at its end until all was sent or given up, and what it said to its parent.

    An exporter that finds nobody goes on for half a minute here, and is given ten.
    """
    environ = {**os.environ, "OTEL_EXPORTER_OTLP_TIMEOUT": "3600"}
    command = [sys.executable, "-c", _END, endpoint]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100, check=True)
    return done.stdout.strip(), done.stderr


@pytest.fixture
def nobody() -> Iterator[str]:
    """An endpoint at which nobody listens, nor can."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_a_process_whose_collector_is_away_ends_at_once_and_says_nothing_about_it(nobody: str) -> None:
    assert ended(nobody) == ("", "")


def test_a_collector_that_is_there_gets_the_last_spans() -> None:
    heard = threading.Event()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            heard.set()
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nobody wants to know."""

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        told = ended(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert (heard.is_set(), told) == (True, ("all", ""))
