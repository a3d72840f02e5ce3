"""An installation in which nothing is due costs a few statements, however many workflows it has."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import TextClause, text

from pipeline.background.sweeps import DUTIES, PERIODS
from pipeline.store.connections import PooledConnection
from pipeline.store.database import Database
from pipeline.store.reads import ledger, work
from pipeline.store.writes import housekeeping as installation_store
from pipeline.store.writes import runs as run_store
from pipeline.testing import Inline
from tests.support.scripted_consumers import Shop
from tests.support.statement_events import Listener, observed
from tests.support.table_reads import rows

FEW, MANY = 100, 10_000
#: Each with an idle consumer and a producer whose slot is tomorrow.
_IDLE_WORKFLOWS = text("""
WITH made AS (
  INSERT INTO pipeline.workflows (name)
  SELECT CAST(:prefix AS text) || n FROM generate_series(1, :count) n RETURNING name
),
topics AS (INSERT INTO pipeline.topics (workflow, name) SELECT name, 'in' FROM made),
polls AS (
  INSERT INTO pipeline.handlers (workflow, name, kind, schedule, next_run_at)
  SELECT name, 'poll', 'producer', 'daily', now() + interval '1 day' FROM made
), takes AS (
  INSERT INTO pipeline.handlers (workflow, name, kind, idle_snapshot, idle_at)
  SELECT name, 'take', 'consumer', pg_current_snapshot(), now() FROM made RETURNING workflow, id
)
INSERT INTO pipeline.subscriptions (workflow, topic, handler_id) SELECT workflow, 'in', id FROM takes
""")

#: What the sweeps ask when nothing is to be done.
ASKED: Mapping[str, tuple[TextClause, dict[str, Any]]] = {
    "tick": (work.DUE_FACTS, {}),
    "redispatch": (work.STALE_DISPATCHES, {"redispatch_after": "1 minute", "limit": 100}),
    "unclaimed": (work.UNCLAIMED_RUNS, {"patience": "1 minute", "limit": 100}),
    "rescue": (work._LAPSED, {"limit": 100}),
    "leases": (run_store.SHORTEN_LEASES, {"limit": 100}),
    "reconcile": (ledger._DUE_MUTATIONS, {"limit": 100}),
    "sessions": (work._FINISHABLE, {"limit": 100}),
    "maintenance": (work._UNATTENDED_MAINTENANCE, {}),
    "backfill": (work._OPEN_BACKFILLS, {"workflow": None}),
    "samples": (installation_store.TAKE_SAMPLE, {"limit": 1_000, "counted": 1_000}),
}


@contextmanager
def counted_commands(db: Database) -> Iterator[list[str]]:
    """Everything that is sent to Postgres, BEGIN and COMMIT included."""
    sent: list[str] = []
    begun: set[int] = set()

    def before(connection: PooledConnection, statement: str) -> None:
        if not connection.is_autocommit and id(connection) not in begun:
            begun.add(id(connection))
            sent.extend(("BEGIN", "COMMIT"))
        sent.append(statement)

    with observed(db, Listener(before=before, closed=lambda connection: begun.discard(id(connection)))):
        yield sent


def idle_commands(run: Inline) -> dict[str, int]:
    """How many commands each duty takes that has found nothing before and finds nothing now."""
    found: dict[str, int] = {}
    for name in DUTIES:
        for _ in range(2):
            with run.db.engine.begin() as connection:
                connection.execute(text("UPDATE pipeline.sweeps SET last_run_at = last_run_at - interval '1 hour'"))
            with counted_commands(run.db) as sent:
                assert run.sweeps.run(name) is not None
        found[name] = len(sent)
    return found


def test_the_sweeps_of_an_idle_installation_send_less_than_five_commands_a_second(db: Database) -> None:
    run = Shop().started(db)
    run.run()
    run.sweeps.sessions()
    commands = idle_commands(run)
    assert sum(commands[name] / PERIODS[name].total_seconds() for name in DUTIES) < 4, commands
    assert commands["reconcile"] == commands["backfill"] == 2, "its slot, and a read that finds nothing"
    assert commands["tick"] == 4, "its slot and three reads"


def test_more_workflows_send_no_more_commands(db: Database) -> None:
    run = Shop().started(db)
    run.run()
    run.sweeps.sessions()
    before = idle_commands(run)
    with db.transaction() as tx:
        tx.execute(_IDLE_WORKFLOWS, count=FEW, prefix="idle ")
    assert idle_commands(run) == before


def pages(db: Database, name: str) -> int:
    """The pages that a statement touches."""
    statement, given = ASKED[name]
    with db.engine.connect() as connection:
        connection.execute(text("SET LOCAL enable_seqscan = off"))
        found = [
            connection.scalar(text(f"EXPLAIN (FORMAT JSON, ANALYZE, BUFFERS) {statement.text}"), given)[0]["Plan"]
            for _ in range(3)
        ]
    return min(int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]) for plan in found)


@pytest.mark.parametrize("analysed", ["never", "empty", "with many"])
def test_a_hundred_times_the_workflows_do_not_make_an_idle_sweep_read_more(db: Database, analysed: str) -> None:
    with db.transaction() as tx:
        if analysed == "empty":
            tx.execute(text("ANALYZE"))
        tx.execute(_IDLE_WORKFLOWS, count=FEW, prefix="idle ")
    few = {name: pages(db, name) for name in ASKED}
    with db.transaction() as tx:
        tx.execute(_IDLE_WORKFLOWS, count=MANY, prefix="more ")
        if analysed == "with many":
            tx.execute(text("ANALYZE"))
    many = {name: pages(db, name) for name in ASKED}
    grown = {name: (few[name], many[name]) for name in ASKED if many[name] > 3 * max(few[name], 5)}
    assert not grown, "pages with few and with many workflows"


@pytest.mark.parametrize("is_due", [True, False])
def test_the_tick_finds_what_is_due_among_many_idle_workflows(db: Database, is_due: bool) -> None:
    shop = Shop(concurrency=2)
    run = shop.started(db, 3 if is_due else 0)
    with db.transaction() as tx:
        tx.execute(_IDLE_WORKFLOWS, count=MANY, prefix="idle ")
    run.sweeps.tick()
    assert sum(len(message.run_ids) for message in run.messages) == (2 if is_due else 0)


def test_watermarks_are_not_written_while_no_event_is_published(db: Database) -> None:
    run = Shop().started(db, 1)
    run.run()
    for _ in range(3):
        run.sweeps.retention()
    before = rows(db, "SELECT id, xmin, low_watermark FROM pipeline.handlers ORDER BY id")
    run.sweeps.retention()
    assert rows(db, "SELECT id, xmin, low_watermark FROM pipeline.handlers ORDER BY id") == before


def test_a_report_is_saved_when_it_changes(db: Database) -> None:
    run = Shop().started(db, 1)
    reports = []
    for _ in range(3):
        with db.engine.begin() as connection:
            connection.execute(text("UPDATE pipeline.sweeps SET last_run_at = last_run_at - interval '1 hour'"))
        run.sweeps.run("tick")
        reports += [row.report for row in rows(db, "SELECT report FROM pipeline.sweeps WHERE name = 'tick'")]
    assert reports == [{"runs": 1}, {}, {}]
