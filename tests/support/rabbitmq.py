"""A RabbitMQ of our own: its node, its port mapper, its data and its cookie belong to nobody else.

It is the Debian package ``rabbitmq-server``, started without its service. Where it is not installed,
the tests that need it are skipped and say so.
"""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.ports import free_port
from tests.support.wait import wait_for

BINARIES = Path("/usr/lib/rabbitmq/bin")
MISSING = "needs RabbitMQ: install the Debian package rabbitmq-server"


def is_installed() -> bool:
    return (BINARIES / "rabbitmq-server").exists()


@dataclass
class Rabbit:
    """One node, which may be killed and started again on the same data."""

    home: Path
    port: int
    environ: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    mapper: subprocess.Popen[bytes] | None = None  #: tells nodes of each other; started by a node, it would outlive it

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    def start(self) -> None:
        with (self.home / "output.log").open("ab") as log:
            if self.mapper is None:
                self.mapper = subprocess.Popen(["epmd"], env=self.environ, stdout=log, stderr=log)
            self.process = subprocess.Popen(
                [BINARIES / "rabbitmq-server"], env=self.environ, stdout=log, stderr=log, start_new_session=True
            )
        wait_for(self._answers, within=120, every=0.2, why=f"RabbitMQ up; see {self.home}")

    def kill(self) -> None:
        """End it as a power cut would."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def freeze(self) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGCONT)

    def tell(self, *words: str) -> str:
        """What the node's own command answers."""
        done = subprocess.run(
            [BINARIES / "rabbitmqctl", "--quiet", "--no-table-headers", *words],
            env=self.environ,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return done.stdout

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.home / "output.log").read_text()[-2000:]
        try:
            return self._is_amqp()
        except OSError:
            return False

    def _is_amqp(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
            connection.sendall(b"AMQP\x00\x00\x09\x01")
            return connection.recv(1) == b"\x01"


@contextmanager
def running(home: Path) -> Iterator[Rabbit]:
    """A node that is up, and nothing of it left afterwards."""
    home.mkdir(parents=True, exist_ok=True)
    port = free_port()
    (home / "enabled_plugins").write_text("[].\n")
    (home / "rabbitmq.conf").write_text(
        f"listeners.tcp.1 = 127.0.0.1:{port}\nvm_memory_high_watermark.relative = 0.2\n"
    )
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),  # the cookie of the node
        "ERL_EPMD_PORT": str(free_port()),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODENAME": f"test{port}@localhost",
        "RABBITMQ_CONFIG_FILE": str(home / "rabbitmq"),
        "RABBITMQ_MNESIA_BASE": str(home / "data"),
        "RABBITMQ_LOG_BASE": str(home / "logs"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "enabled_plugins"),
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 2:2 +sbwt none -start_epmd false",
    }
    rabbit = Rabbit(home, port, environ)
    try:
        rabbit.start()
        yield rabbit
    finally:
        if rabbit.process is not None and rabbit.process.poll() is None:
            rabbit.kill()
        if rabbit.mapper is not None:
            rabbit.mapper.kill()
            rabbit.mapper.wait()
        shutil.rmtree(home, ignore_errors=True)
