"""Redis behind Sentinel: the primary is killed, a replica takes over, and every order is done once all the same."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis

from pipeline.config import EXIT_RESTART
from pipeline.embedded import binaries, servers
from tests.support import databases
from tests.support.installation import Installation, installed
from tests.support.ports import free_port
from tests.support.wait import wait_for

PRIMARY = {"PIPELINE_BROKER_PRIMARY": "orders"}
#: Milliseconds of silence after which the Sentinel takes a primary for dead: one that is only slow never is.
SOON, NEVER = 1000, 3_600_000


@dataclass
class Watched:
    """A primary, a replica, and a Sentinel that watches them."""

    home: Path
    ports: dict[str, int] = field(default_factory=lambda: {n: free_port() for n in ("primary", "replica", "sentinel")})
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"sentinel://127.0.0.1:{self.ports['sentinel']}/0"

    def start(self) -> None:
        one, two = self.ports["primary"], self.ports["replica"]
        self._begin("primary", "--appendonly", "yes")
        self._begin("replica", "--appendonly", "yes", "--replicaof", "127.0.0.1", str(one))
        wait_for(lambda: self._asked("replica", "ROLE")[3] == b"connected", within=60, every=0.1, why=f"{two} in step")
        conf = self.home / "sentinel.conf"
        conf.write_text(
            f"sentinel monitor orders 127.0.0.1 {one} 1\n"
            f"sentinel down-after-milliseconds orders {NEVER}\nsentinel failover-timeout orders 3000\n"
        )
        self._begin("sentinel", str(conf), "--sentinel")
        wait_for(lambda: bool(self._asked("sentinel", "SENTINEL REPLICAS", "orders")), within=60, every=0.1)

    def kill_primary(self) -> None:
        """Without warning; it does not come back."""
        self.processes["primary"].kill()
        self.processes["primary"].wait()
        self._takes_for_dead_after(SOON)
        wait_for(self._has_taken_over, within=120, every=0.2, why="the replica taking over")
        self._takes_for_dead_after(NEVER)

    def _takes_for_dead_after(self, milliseconds: int) -> None:
        self._asked("sentinel", "SENTINEL SET", "orders", "down-after-milliseconds", str(milliseconds))

    def _has_taken_over(self) -> bool:
        """The replica reports that it is the primary, and the Sentinel names it."""
        _, port = self._asked("sentinel", "SENTINEL GET-MASTER-ADDR-BY-NAME", "orders")
        return self._asked("replica", "ROLE")[0] == b"master" and int(port) == self.ports["replica"]

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def _begin(self, name: str, *options: str) -> None:
        place = self.home / name
        place.mkdir()
        first = [option for option in options if option.endswith(".conf")]
        rest = [option for option in options if option not in first]
        command = [str(binaries.find_redis(os.environ)), *first, "--port", str(self.ports[name]), "--dir", str(place)]
        with (place / "log").open("wb") as log:
            self.processes[name] = subprocess.Popen([*command, *rest], stdout=log, stderr=log)
        wait_for(lambda: self._asked(name, "PING") is not None, within=60, every=0.1, why=f"{name} listening")

    def _asked(self, name: str, *words: str) -> list[bytes]:
        with redis.Redis(port=self.ports[name], protocol=2) as client:
            try:
                found: list[bytes] = client.execute_command(*words)
            except redis.ConnectionError as error:
                raise AssertionError(str(error)) from error
        return found


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    found = Watched(tmp_path)
    try:
        found.start()
        yield found
    finally:
        found.end()


@pytest.fixture
def shop(
    watched: Watched, embedded: servers.Servers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    """A worker and a beat that know only the Sentinel."""
    home = tmp_path_factory.mktemp("sentinel")
    with ExitStack() as stack:
        database_url = stack.enter_context(databases.clone_database(embedded.database_url, f"sentinel_{os.getpid()}"))
        found = stack.enter_context(installed(home, database_url, watched.url))
        found.worker(**PRIMARY)
        found.beat(**PRIMARY)
        yield found


def test_a_primary_that_is_killed_costs_time_and_nothing_else(shop: Installation, watched: Watched) -> None:
    shop.publish(20)
    shop.all_done_once()
    shop.publish(20)
    watched.kill_primary()
    worker = shop.nodes[0].process
    wait_for(lambda: worker.poll() is not None or shop.is_consumed(), within=120, every=0.1, why="done or deaf")
    if worker.poll() is not None:
        # Rarely Celery's consumer does not come back, and the worker ends itself; or kombu falls over an
        # acknowledgement in the middle of the failover, and Celery ends it. A supervisor starts it again either way.
        assert worker.returncode == EXIT_RESTART
        shop.worker(**PRIMARY)
    shop.all_done_once()
