"""Ports that are chosen now and bound later, by a process that a test starts."""

import secrets
import socket

#: Below those that Linux gives to outgoing connections: nobody gets one of them without asking for it.
_PORTS = range(20_000, 32_000)
_taken: list[socket.socket] = []  #: each has the name of a port, which is ours until this process ends


def free_port() -> int:
    """A port that nobody has, and that no other process of the tests is given as long as this one lives."""
    while True:
        port = secrets.choice(_PORTS)
        mark = socket.socket(socket.AF_UNIX)
        try:
            mark.bind(f"\0port {port} of the tests")
            with socket.socket() as probe:
                probe.bind(("", port))
        except OSError:
            mark.close()
        else:
            _taken.append(mark)
            return port
