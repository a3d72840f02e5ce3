"""Two installations on one broker would take each other's events: the second one logs an error."""

import logging
from collections.abc import Iterator

import pytest
import redis
from celery import Celery
from sqlalchemy import text

from pipeline.embedded import servers
from pipeline.store.database import Database, identity
from pipeline.tasks import broker_owner


@pytest.fixture
def broker(embedded: servers.Servers, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Redis number that nothing else of this test run uses, as the broker of this process."""
    url = f"{embedded.broker_url.rpartition('/')[0]}/13"
    with redis.Redis.from_url(url) as client, Celery(broker=url, set_as_current=False) as app:
        client.delete(broker_owner.owner_key())
        monkeypatch.setattr(broker_owner, "app", app)
        yield url
        client.delete(broker_owner.owner_key())


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def test_workers_of_one_database_share_a_broker_without_a_warning(
    db: Database, broker: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        broker_owner.check_broker_owner(db)
    assert errors(caplog) == []
    with redis.Redis.from_url(broker) as client, db.transaction() as tx:
        assert client.get(broker_owner.owner_key()) == identity(tx).encode()


def test_a_worker_of_another_database_logs_what_it_found_and_what_to_do(
    db: Database, broker: str, caplog: pytest.LogCaptureFixture
) -> None:
    with redis.Redis.from_url(broker) as client:
        client.set(broker_owner.owner_key(), "7/staging")
    broker_owner.check_broker_owner(db)
    (logged,) = errors(caplog)
    assert "found 7/staging" in logged
    assert "PIPELINE_BROKER_URL" in logged
    assert f"delete the key {broker_owner.owner_key()}" in logged


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "amqp://127.0.0.1:1//"])
def test_an_unreachable_broker_is_no_error_of_the_mark(
    db: Database, url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Celery(broker=url, set_as_current=False) as app:
        monkeypatch.setattr(broker_owner, "app", app)
        broker_owner.check_broker_owner(db)
    assert errors(caplog) == []


def test_a_role_without_privileges_can_read_the_identity_of_its_database(db: Database) -> None:
    with db.transaction() as tx:
        expected = identity(tx)
        tx.execute(text("CREATE ROLE nobody_at_all"))
        tx.execute(text("SET LOCAL ROLE nobody_at_all"))
        assert identity(tx) == expected
        tx.execute(text("RESET ROLE"))
        tx.execute(text("DROP ROLE nobody_at_all"))
