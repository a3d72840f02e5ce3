"""`pipeline ingest` as a real process, and what Postgres says about what it did."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from pipeline.store.database import Database, Statement
from tests.factories import IN
from tests.ingest.redis_streams import STALE, Place
from tests.support import forked_python
from tests.support.wait import wait_for

PIPELINE = Path(sys.executable).parent / "pipeline"
_EVENTS = Statement[Any]("SELECT message_id FROM pipeline.events WHERE workflow = 'billing'")
_COUNT = Statement[Any]("SELECT count(*) FROM pipeline.events WHERE workflow = 'billing'")


@dataclass
class Program:
    """A process that was started, and its output."""

    process: "forked_python.ForkedProcess | subprocess.Popen[bytes]"
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait_until_reading(self) -> "Program":
        wait_for(lambda: " as " in self.output or self.process.poll() is not None, within=60, why=self.output)
        assert self.process.poll() is None, self.output
        return self

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self, number: int = 15) -> int:
        self.process.send_signal(number)
        return self.process.wait(40)


@dataclass
class Programs:
    """Starts programs against one stream and one database."""

    place: Place
    database_url: str
    home: Path
    started: list[Program]
    entry: str = "pipeline.cli.main:main"  #: what a fork calls; empty: the installed command is started

    def patient(self) -> "Programs":
        """The same, for programs that wait for their servers as long as it takes."""
        return replace(self, entry=f"{__name__}:wait_patiently")

    def installed(self) -> "Programs":
        """The same, for the command as it is installed: a new Python process, which imports everything again."""
        return replace(self, entry="")

    def ingest(self, *options: str, url: str | None = None, **environ: str) -> Program:
        """`pipeline ingest` into the workflow of the factories."""
        to = ("--stream", self.place.stream, "--workflow", "billing", "--topic", IN)
        return self.start("ingest", *to, "--block-ms", "300", *options, url=url, **environ)

    def recover(self, *options: str) -> str:
        """`pipeline ingest recover --once`, and its output."""
        to = ("--stream", self.place.stream, "--workflow", "billing", "--topic", IN)
        program = self.start("ingest", "recover", *to, "--once", "--claim-idle-ms", str(STALE // 2), *options)
        assert program.process.wait(60) == 0, program.output
        return program.output

    def start(self, *arguments: str, url: str | None = None, **more: str) -> Program:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PIPELINE_")}
        environ = {
            **clean,
            "PIPELINE_DATABASE_URL": self.database_url,
            "INGEST_REDIS_URL": url or self.place.url,
            "COLUMNS": "200",
            **more,
        }
        log = self.home / f"{len(self.started)}.log"
        process: forked_python.ForkedProcess | subprocess.Popen[bytes]
        if self.entry:
            process = forked_python.start(self.entry, arguments, environ=environ, output=log)
        else:
            with log.open("wb") as file:
                process = subprocess.Popen([PIPELINE, *arguments], env=environ, stdout=file, stderr=file)
        self.started.append(Program(process, log))
        return self.started[-1]


def wait_patiently() -> None:
    """Run the command so that it waits for locks and for a busy Redis until it gets them."""
    from pipeline.cli import main
    from pipeline.ingest import redis_client

    ingest: Any = import_module("pipeline.cli.ingest")
    redis_client.READ_MARGIN = 60.0
    ingest.Bridge = partial(ingest.Bridge, lock_wait=timedelta(hours=1))
    main.main()


@contextmanager
def programs(place: Place, database_url: str, home: Path) -> Iterator[Programs]:
    """Programs that are gone at the end."""
    found = Programs(place, database_url, home, [])
    try:
        yield found
    finally:
        for program in found.started:
            program.kill()


def published(db: Database) -> Counter[str]:
    """Message ids of the events that exist, and how often."""
    with db.transaction() as tx:
        return Counter(row.message_id for row in tx.all(_EVENTS))


def wait_until_published(db: Database, count: int, *, within: float = 60.0) -> None:
    def all_there() -> bool:
        with db.transaction() as tx:
            row = tx.first(_COUNT)
        assert row is not None
        assert row[0] >= count, f"{row[0]} of {count}"
        return True

    wait_for(all_there, within=within, every=0.05)
