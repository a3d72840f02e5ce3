"""The grants of the guide are enough for a service with a role of its own, and no more."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.pool import NullPool

from pipeline.client.publishing import EventInput, publish
from pipeline.store.database import Database
from tests.factories import IN, a_workflow


@pytest.fixture
def role(db: Database) -> Iterator[str]:
    """A role that may log in and nothing else."""
    name = f"shop_{os.getpid()}"
    with db.transaction() as tx:
        tx.execute(text(f"CREATE ROLE {name} LOGIN PASSWORD 'secret'"))
    yield name
    with db.transaction() as tx:
        tx.execute(text(f"DROP OWNED BY {name}; DROP ROLE {name}"))


@pytest.fixture
def service(db: Database, role: str) -> Iterator[Engine]:
    """The same database, as that role."""
    engine = create_engine(db.engine.url.set(username=role, password="secret"), poolclass=NullPool)
    yield engine
    engine.dispose()


def grants(project: Path, role: str) -> list[str]:
    page = (project / "docs/guides/publish-events.md").read_text(encoding="utf-8")
    return [block.replace(" TO shop", f" TO {role}") for block in re.findall(r"```sql\n(.*?)```", page, re.DOTALL)]


def test_the_grants_of_the_guide_are_what_a_service_needs(
    db: Database, role: str, service: Engine, project: Path
) -> None:
    a_workflow(db)
    to_publish, to_replace = grants(project, role)
    paid = [EventInput(topic=IN, message_id="order:1", payload={"n": 1})]
    with db.transaction() as tx:
        tx.execute(text(to_publish))
    with service.begin() as connection:
        assert publish(connection, "billing", paid).new == ("order:1",)
    with service.begin() as connection:
        assert publish(connection, "billing", paid).repeated == ("order:1",)
    with service.connect() as connection, pytest.raises(ProgrammingError, match="permission denied"):
        publish(connection, "billing", paid, replace=True)
    for statement in ("DELETE FROM pipeline.events", "SELECT FROM pipeline.mutations"):
        with service.connect() as connection, pytest.raises(ProgrammingError, match="permission denied"):
            connection.execute(text(statement))
    with db.transaction() as tx:
        tx.execute(text(to_replace))
    with service.begin() as connection:
        assert publish(connection, "billing", paid, replace=True).replaced == ("order:1",)


def test_each_of_the_grants_to_publish_is_needed(db: Database, role: str, service: Engine, project: Path) -> None:
    a_workflow(db)
    lines = grants(project, role)[0].strip().splitlines()
    for number, line in enumerate(lines):
        with db.transaction() as tx:
            tx.execute(text("\n".join(lines)))
            tx.execute(text(line.replace("GRANT", "REVOKE", 1).replace(" TO ", " FROM ")))
        with service.connect() as connection, pytest.raises(ProgrammingError, match="permission denied"):
            publish(connection, "billing", [EventInput(topic=IN, message_id=f"order:{number}", payload={"n": 1})])
