"""The benchmark refuses a database that is in use, and copies finished runs that break no invariant."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import redis

from pipeline.bench import installation
from pipeline.bench.installation import Installation, NotEmptyError, refuse_broker, refuse_workflows
from pipeline.bench.workflow import NAMES
from pipeline.domain.states import Phase
from pipeline.domain.values import NewEvent
from pipeline.embedded.servers import Servers
from pipeline.store.database import Database, identity
from pipeline.tasks.broker_owner import owner_key
from tests.factories import OUT, a_run, a_workflow, applied, committed, some_events
from tests.support.databases import invariant_findings


@pytest.fixture
def site(db: Database, database_url: str, embedded: Servers, tmp_path: Path) -> Iterator[Installation]:
    del db
    urls = Servers(database_url=database_url, broker_url=f"{embedded.broker_url.rpartition('/')[0]}/14")
    with closing(Installation(urls, tmp_path, log=None)) as found:
        yield found


@pytest.fixture
def client(site: Installation) -> Iterator[redis.Redis]:
    """The Redis number of the site, empty before and after."""
    with redis.Redis.from_url(site.urls.broker_url) as found:
        found.flushdb()
        yield found
        found.flushdb()


def test_a_database_without_workflows_is_accepted(site: Installation) -> None:
    refuse_workflows(site)


def test_a_database_with_workflows_is_refused_and_left_alone(site: Installation) -> None:
    site.register()
    with pytest.raises(NotEmptyError, match=r"holds workflows \(batched, many, one\), and the benchmark removes every"):
        refuse_workflows(site)
    assert site.query("SELECT count(*) FROM pipeline.workflows") == [(len(NAMES),)]
    site.clear()
    refuse_workflows(site)


def test_rows_stay_if_another_program_registered_a_workflow_meanwhile(site: Installation, db: Database) -> None:
    site.register()
    a_workflow(db)
    with pytest.raises(NotEmptyError, match=r"holds workflows \(billing\)"):
        site.clear()
    assert site.query("SELECT count(*) FROM pipeline.workflows") == [(len(NAMES) + 1,)]


def test_a_broker_of_this_database_without_messages_is_accepted(
    site: Installation, db: Database, client: redis.Redis
) -> None:
    refuse_broker(site)
    with db.transaction() as tx:
        client.set(owner_key(), identity(tx))
    refuse_broker(site)


def test_a_broker_of_another_database_is_refused(site: Installation, client: redis.Redis) -> None:
    client.set(owner_key(), "7/staging")
    with pytest.raises(NotEmptyError, match="belongs to another database, 7/staging"):
        refuse_broker(site)


def test_a_broker_with_messages_is_refused_until_it_is_empty(site: Installation, client: redis.Redis) -> None:
    client.rpush("pipeline.schedule", "{}")
    client.hset("unacked", "a", "{}")
    with pytest.raises(NotEmptyError, match=r"has messages in queues \(pipeline.schedule, unacked\)"):
        refuse_broker(site)
    installation.empty_queues(site.urls.broker_url)
    refuse_broker(site)


def test_copies_of_a_finished_run_break_no_invariant(site: Installation, db: Database) -> None:
    a_workflow(db)
    some_events(db, "order-1")
    run = applied(db, a_run(db, Phase.MUTATING))
    committed(db, run, published=[NewEvent(topic=OUT, message_id="order-1", payload={})])
    site.copy_finished_run("billing", 20)
    for table, number in {"runs": 21, "mutations": 21, "deliveries": 21, "events": 42}.items():
        assert site.query(f"SELECT count(*) FROM pipeline.{table}") == [(number,)]
    with db.transaction() as tx:
        assert invariant_findings(tx) == []
