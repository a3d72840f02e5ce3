"""pytest-celery's nodes as local processes: its classes stay, and only the Docker container below them is replaced.

``LocalContainer`` offers what pytest-celery asks of a container of docker-py: status, logs, kill,
restart. A suite that has a Docker engine gives the same classes a real container instead.
"""

import os
import signal
from collections.abc import Callable
from typing import Any

import docker  # type: ignore[import-untyped]
from pytest_celery import CeleryWorkerContainer, RedisContainer

from tests.support.installation import PROJECT, Installation, Node


class LocalContainer:
    """A process that looks like a container."""

    def __init__(self, start: Callable[[], Node]) -> None:
        self._start = start
        self.node = start()
        self.attrs: dict[str, Any] = {
            "NetworkSettings": {"Networks": {}, "Ports": {}},
            "HostConfig": {"PortBindings": {}},
            "Config": {"Hostname": "localhost", "Env": []},
        }

    @property
    def id(self) -> str:
        return f"{self.node.process.pid:012d}"

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def status(self) -> str:
        return "running" if self.node.process.poll() is None else "exited"

    def reload(self) -> None:
        """Nothing is cached."""

    def logs(self) -> bytes:
        """What the present process has said."""
        return self.node.log.read_bytes()

    def kill(self, name: str | int | None = None) -> None:
        """Signal the process; with SIGKILL it is gone on return."""
        number = signal.Signals[name] if isinstance(name, str) else signal.Signals(name or signal.SIGKILL)
        os.kill(self.node.process.pid, number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.node.process.wait(timeout=40)

    def restart(self, timeout: float = 10) -> None:
        """A new process in the place of the old one."""
        del timeout
        self.node.end()
        self.node = self._start()


def worker_container(installation: Installation) -> Any:
    """A worker's container: a real one of the image that PIPELINE_TEST_IMAGE names, else a process.

    The image must have our dependencies; the checkout is mounted into it, and it shares the host's network, so that
    it reaches the servers of the tests. Nobody has run this side yet: there was no Docker engine where it was written.
    """
    image = os.environ.get("PIPELINE_TEST_IMAGE")
    if not image:
        return LocalContainer(installation.worker)
    ours = {name: value for name, value in installation.environ.items() if name.startswith(("PIPELINE_", "SHOP_"))}
    return docker.from_env().containers.run(
        image,
        ["celery", "-A", "pipeline", "worker", "--loglevel=INFO", "--concurrency=2"],
        environment=ours,
        volumes={str(PROJECT): {"bind": "/checkout", "mode": "ro"}},
        working_dir="/checkout",
        network_mode="host",
        detach=True,
    )


class NoContainer:
    """A server that is reached under its address and that pytest-celery need not manage."""

    id = name = "embedded-redis"
    status = "running"

    def __init__(self, address: str) -> None:
        self.address = address

    def reload(self) -> None:
        """Nothing is cached."""


class LocalWorker(CeleryWorkerContainer):  # type: ignore[misc]
    """A worker of ours."""


class LocalRedis(RedisContainer):  # type: ignore[misc]
    """The Redis of an installation, under the address it already has."""

    @property
    def celeryconfig(self) -> dict[str, Any]:
        address = self._container.address
        return {"url": address, "host_url": address}

    def ready(self) -> bool:
        return bool(self.client.ping())
