"""A shop with a real worker, a beat and a console that a browser can open, for one test module."""

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request

from pipeline.api import Person, Role, create
from pipeline.api.app import StreamingServer
from pipeline.api.context import Services
from pipeline.background.sweeps import periods
from pipeline.config import Settings
from pipeline.domain.values import NewEvent
from pipeline.store.database import Database
from pipeline.transitions import events
from pipeline.workflows.registry import Registry
from tests.support.console_workflow import CARD, SECRET
from tests.support.installation import PROJECT, Installation, alone
from tests.support.wait import wait_for

PREFIX = "/ops/x"  #: under which a FastAPI app of another team mounts the console
WORKFLOWS = "tests.support.console_workflow"
PEOPLE = {
    "ada": Person(name="ada", role=Role.ADMIN, can_see_payloads=True),
    "bob": Person(name="bob", role=Role.OPERATOR),
    "vera": Person(name="vera", role=Role.VIEWER),
}


class Leaks:
    """Pass requests on to an app, and keep the paths of answers that hold a secret."""

    def __init__(self, app: Any, secrets: tuple[str, ...]) -> None:
        self.app, self.secrets = app, tuple(each.encode() for each in secrets)
        self.paths: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        last = b""

        async def watched(message: Any) -> None:
            nonlocal last
            body = last + message.get("body", b"")
            if any(secret in body for secret in self.secrets):
                self.paths.append(scope["path"])
            last = body[-100:]
            await send(message)

        await self.app(scope, receive, watched)


@dataclass
class ConsoleShop:
    """The installation, the address of the console, and what the provider saw."""

    installation: Installation
    url: str  #: of the console on its own
    mounted_url: str  #: of the same console under a prefix
    provider: Path
    leaks: Leaks
    process_url: str  #: of ``pipeline api``, which has the broker and the code of the workflows

    def publish(self, topic: str, *message_ids: str, workflow: str = "shop", **payload: Any) -> None:
        """Publish events; the order in each payload is its message id."""
        new = [NewEvent(topic=topic, message_id=each, payload={"order": each, **payload}) for each in message_ids]
        with self.installation.db.transaction() as tx:
            events.publish(tx, workflow, new)

    def order(self, message_id: str, amount: str = "99.01") -> None:
        """Publish an order whose charge is not answered."""
        self.publish("orders.placed", message_id, amount=amount)

    def mutation(self, message_id: str) -> Any:
        """Return the newest row of the ledger for a message."""
        query = "SELECT * FROM pipeline.mutations WHERE :message = ANY(message_ids) ORDER BY id DESC LIMIT 1"
        return next(iter(self.installation.ask(query, message=message_id)), None)

    def question(self, message_id: str, amount: str = "99.01") -> str:
        """Publish an order whose charge is not answered; return the path of its question."""
        self.order(message_id, amount)
        return f"/m/{self.wait_for_status(message_id, 'indeterminate').id}"

    def wait_for_status(self, message_id: str, status: str) -> Any:
        """Wait until the newest mutation of a message has a status; return it."""
        wait_for(
            lambda: (row := self.mutation(message_id)) is not None and row.status == status,
            within=60,
            why=f"the mutation of {message_id} {status}",
        )
        return self.mutation(message_id)

    def event_id(self, message_id: str) -> int:
        """Return the id of the event of a message."""
        found = self.installation.ask("SELECT id FROM pipeline.events WHERE message_id = :message", message=message_id)
        return int(found[0].id)

    def sent(self, message_id: str) -> int:
        """Return how many requests for a message arrived."""
        file = self.provider / "sent"
        return sum(message_id in line.split() for line in file.read_text().splitlines()) if file.exists() else 0

    def acts(self, *names: str) -> list[tuple[str, str]]:
        """Return who did these acts and why, in order."""
        query = "SELECT actor, reason FROM pipeline.audit WHERE act = ANY(:names) ORDER BY id"
        return [(row.actor, row.reason) for row in self.installation.ask(query, names=list(names))]

    def tell(self, message_id: str, what: str) -> None:
        """Let the provider answer, or find, what a message is about."""
        self.provider.mkdir(exist_ok=True)
        (self.provider / f"{message_id}.{what}").touch()


def identify(request: Request) -> Person | None:
    """Return the person that the browser's cookie names, as a login of another application would."""
    return PEOPLE.get(request.cookies.get("person", ""))


@contextmanager
def console_shop(server_url: str, home: Path) -> Iterator[ConsoleShop]:
    """Run a worker, a beat and a console until the block is left."""
    provider = home / "provider"
    with alone(server_url, home) as installation:
        environ = {"PIPELINE_WORKFLOWS": WORKFLOWS, "CONSOLE_PROVIDER": str(provider), "CONSOLE_SETTLE": "3600"}
        installation.worker(**environ)
        installation.beat(**environ)
        with _served(installation) as (url, leaks), _api_process(installation, environ) as process_url:
            yield ConsoleShop(installation, url, url + PREFIX, provider, leaks, process_url)


@contextmanager
def _api_process(installation: Installation, environ: Mapping[str, str]) -> Iterator[str]:
    """Run ``pipeline api`` behind a proxy that names the person; yield its address."""
    proxied = {
        "PIPELINE_API_TRUSTED_PROXIES": "127.0.0.1",
        "PIPELINE_API_IDENTITY_HEADER": "X-User",
        "PIPELINE_API_ROLES": "*=admin+payloads",
    }
    with (installation.home / "api.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", "from pipeline.cli.main import main; main()", "api", "--port", "0"],
            env={**installation.environ, **environ, **proxied},
            cwd=PROJECT,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
            process.communicate(timeout=30)


@contextmanager
def _served(installation: Installation) -> Iterator[tuple[str, Leaks]]:
    """Serve the console alone and under a prefix, in a thread of this process."""
    settings = Settings(database_url=installation.database_url, broker_url=installation.broker_url)
    database = Database.connect(installation.database_url, pool_size=8)
    services = Services.connect(
        settings, database, operations=Registry.load([WORKFLOWS]), sweep_periods=periods(settings.tick)
    )
    console = create(services=services, identify=identify)
    other = FastAPI()
    other.mount(PREFIX, create(services=services, identify=identify))
    other.mount("/", console)
    listener = socket.create_server(("127.0.0.1", 0))
    leaks = Leaks(other, (SECRET, CARD))
    config = uvicorn.Config(leaks, log_level="warning", timeout_graceful_shutdown=1)
    server = StreamingServer(config, services.broadcaster)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        wait_for(lambda: server.started, why="the console listens")
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", leaks
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
        database.dispose()
