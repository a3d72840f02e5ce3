"""The embedded Redis: durable like production (append-only file, synced each second), password required."""

import json
import secrets
import signal
import socket
from pathlib import Path

from pipeline.embedded import processes
from pipeline.embedded.locks import read_or_create, write_private
from pipeline.embedded.processes import EmbeddedServer

CONFIG = """\
bind 127.0.0.1
port {port}
requirepass {password}
dir {directory}
pidfile {pid_file}
daemonize no
appendonly yes
appendfsync everysec
save ""
"""


class EmbeddedRedis(EmbeddedServer):
    """Redis or Valkey; the password is in a file only we can read, never on a command line."""

    name = "redis"
    stop_signal = signal.SIGTERM

    def __init__(self, home: Path, program: Path) -> None:
        super().__init__(home)
        self._program = program
        self._directory = home / "redis"
        self._pid_file = self._directory / "redis.pid"
        self._password = ""

    @property
    def url(self) -> str:
        return f"redis://:{self._password}@127.0.0.1:{self.port}/0"

    def prepare(self) -> None:
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._password = read_or_create(self._directory / "password", lambda: secrets.token_urlsafe(24))
        if (orphan := processes.read_pid(self._pid_file)) is not None:
            processes.stop_orphan(orphan, self._directory, self.stop_signal, within=30)

    def command(self) -> list[str | Path]:
        config = self._directory / "redis.conf"
        values = {"directory": _quote(self._directory), "pid_file": _quote(self._pid_file)}
        write_private(config, CONFIG.format(port=self.port, password=self._password, **values))
        return [self._program, config]

    def is_ready(self) -> bool:
        """Whether it takes the password and has read its data back; asked by hand, no client needed."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=2) as connection:
                connection.sendall(f"AUTH {self._password}\r\nPING\r\n".encode())
                with connection.makefile("rb") as replies:
                    return (replies.readline(), replies.readline()) == (b"+OK\r\n", b"+PONG\r\n")
        except OSError:
            return False


def _quote(path: Path) -> str:
    """A path as the configuration file wants it, whatever characters it has."""
    return json.dumps(str(path), ensure_ascii=False)
