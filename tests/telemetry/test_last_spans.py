"""The last spans of a process: sent when a collector is there, and waited for by nobody when it is away."""

import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

_END = """
import sys, time
from pipeline.telemetry import setup
provider = setup.begin(sys.argv[1], process_wide=False)
provider.get_tracer("test").start_span("act").end()
began = time.monotonic()
setup.end()
print(time.monotonic() - began)
"""


def ended(endpoint: str) -> tuple[float, str]:
    """Seconds that the end of a traced process took, and what it said to whoever started it."""
    done = subprocess.run(
        [sys.executable, "-c", _END, endpoint], capture_output=True, text=True, timeout=60, check=True
    )
    return float(done.stdout), done.stderr


def nobody() -> str:
    """An endpoint at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_process_whose_collector_is_away_ends_at_once_and_says_nothing_about_it() -> None:
    seconds, said = ended(nobody())
    assert (seconds < 2, said) == (True, "")


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
        _, said = ended(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert (heard.is_set(), said) == (True, "")
