"""The benchmark refuses a database that is in use, and copies finished runs that break no invariant."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pipeline.bench.installation import Installation, NotEmptyError, refuse_workflows
from pipeline.domain.states import Phase
from pipeline.domain.values import NewEvent
from pipeline.embedded.servers import Servers
from pipeline.store.database import Database
from tests.factories import OUT, a_run, a_workflow, applied, committed, some_events
from tests.support.databases import invariant_findings


@pytest.fixture
def site(db: Database, database_url: str, embedded: Servers, tmp_path: Path) -> Iterator[Installation]:
    del db
    urls = Servers(database_url=database_url, broker_url=embedded.broker_url)
    with closing(Installation(urls, tmp_path, log=None)) as found:
        yield found


def test_a_database_without_workflows_is_accepted(site: Installation) -> None:
    refuse_workflows(site)


def test_a_database_with_workflows_is_refused_and_left_alone(site: Installation) -> None:
    site.register()
    with pytest.raises(NotEmptyError, match=r"holds workflows \(batched, many, one\), and the benchmark removes every"):
        refuse_workflows(site)
    assert site.query("SELECT count(*) FROM pipeline.workflows") == [(4,)]
    site.clear()
    refuse_workflows(site)


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
