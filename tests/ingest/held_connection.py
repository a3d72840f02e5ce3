"""A line to Redis that can be held: what is sent after a marker stays on the line and never arrives."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit


class Line:
    """Passes bytes on in both directions until a request holds the marker."""

    def __init__(self, url: str, marker: bytes) -> None:
        parts = urlsplit(url)
        assert parts.port is not None
        self._target, self._marker = (str(parts.hostname), parts.port), marker
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        self.url = url.replace(f":{parts.port}/", f":{port}/")
        self.is_held = threading.Event()  #: a request with the marker has been sent, and has not arrived
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        for each in self._sockets:
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._sockets += [near, far]
            threading.Thread(target=self._pass_on, args=(near, far, self._marker), daemon=True).start()
            threading.Thread(target=self._pass_on, args=(far, near, None), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, marker: bytes | None) -> None:
        try:
            while data := source.recv(65536):
                if marker is not None and marker in data:
                    self.is_held.set()
                    return
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return


@contextmanager
def held_at(url: str, marker: bytes) -> Iterator[Line]:
    """A line that lets nothing through from the first request with this marker on."""
    line = Line(url, marker)
    try:
        yield line
    finally:
        line.close()
