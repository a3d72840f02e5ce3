"""Apps in this process, on the real database."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from starlette.testclient import TestClient

from pipeline.api import Person, Role, create
from pipeline.config import Settings
from pipeline.store.database import Database

ADA = Person(name="ada", role=Role.ADMIN, can_see_payloads=True, is_ambient=False)
ORIGIN = "https://pipeline.test"
ClientOf = Callable[..., TestClient]


@pytest.fixture
def client_of(db: Database, database_url: str) -> Iterator[ClientOf]:
    """Make a client of an app whose every caller is one person; None: callers must authenticate themselves."""
    with ExitStack() as stack:

        def make(person: Person | None = ADA, *, peer: str = "127.0.0.1", **settings: Any) -> TestClient:
            identify = None if person is None else lambda _: person
            app = create(Settings(database_url=database_url, **settings), database=db, identify=identify)
            client = TestClient(
                app, base_url=ORIGIN, raise_server_exceptions=False, follow_redirects=False, client=(peer, 50_000)
            )
            return stack.enter_context(client)

        yield make


@pytest.fixture
def client(client_of: ClientOf) -> TestClient:
    """A client whose caller is an admin with all rights."""
    return client_of()
