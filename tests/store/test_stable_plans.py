"""The plans of statements that search for work and start it do not depend on what Postgres knows of the tables.

A statement is planned once per connection, perhaps before the first row exists. So its plan must be the same on empty
tables, on full ones that were never analysed, and on ones that have grown since.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import text

from pipeline.embedded import servers
from pipeline.store import facts, functions
from pipeline.store.connections import _compiled
from pipeline.store.database import Database
from pipeline.store.reads import attention, ledger, listings, pages, work
from pipeline.store.writes import events as event_store
from pipeline.store.writes import housekeeping as installation_store
from pipeline.store.writes import mutations as mutation_store
from pipeline.store.writes import runs as run_store
from tests.support import databases

STATEMENTS = {
    "facts": facts.handler_facts("CAST(:names AS text[])"),  # as the function runs it
    "facts of what may be due": work.DUE_FACTS.text,
    "start slices": run_store.INSERT_SLICED.text,
    "start a run that sees everything": run_store.INSERT_UNSLICED.text,
    "retry": run_store.INSERT_RETRIES.text,
    "redispatch": work.STALE_DISPATCHES.text,
    "maintenance": work._UNATTENDED_MAINTENANCE.text,
    "backfills": work._OPEN_BACKFILLS.text,
    "sample": installation_store.TAKE_SAMPLE.text,
    "high water": attention.HIGH_WATER.text,
    "open ledger": pages._OPEN_MUTATIONS.text,
    "ledger": pages._MUTATIONS.text,
    "events": pages._EVENTS.text,
    "runs": pages._RUNS.text,
    "quarantine": pages._QUARANTINE.text,
    "open questions": ledger._OPEN_BY_STATUS.text,
    "questions by id": ledger._MUTATIONS_BY_ID.text,
    "incidents": ledger._INCIDENTS.text,
    "mutations by id": listings._LEDGER.text,
    "approvals": listings._PENDING_APPROVALS.text,
    "claim for prepare": run_store.CLAIM_PREPARE.text,
    "claim for produce": run_store.CLAIM_PRODUCE.text,
    "claim for mutate": run_store.CLAIM_MUTATE.text,
    "claim for next": run_store.CLAIM_NEXT.text,
    "finish prepare": run_store.FINISH_PREPARE.text,
    "no mutation": run_store.NO_MUTATION.text,
    "heartbeat": run_store.HEARTBEAT.text,
    "hand back": run_store.HAND_BACK.text,
    "begin": mutation_store.BEGIN.text,
    "resend": mutation_store.RESEND.text,
    "apply": mutation_store.APPLY.text,
    "fail": mutation_store.FAIL.text,
    "doubt": mutation_store.DOUBT.text,
    "commit": event_store.COMMIT.text,
    "commit of a producer": event_store.COMMIT_PRODUCER.text,
    "publish": functions.INSERT_NEW,
    "lock to stop": run_store.LOCK_TO_STOP.text,
    "facts of runs": run_store.RUN_FACTS.text,
    "stop": run_store.STOP.text,
    "release inputs": event_store.RELEASE_INPUTS.text,
}
#: Indexes with nothing but what is open. A scan without a condition reads no more than that.
OPEN_ONLY = {
    "deliveries_unseen",
    "deliveries_pending",
    "runs_retry_pending",
    "runs_open",
    "workflows_maintenance",
    "maintenance_tasks_one_open",
    "subscriptions_backfill",
    "blocks_open_of_workflow",
    "deliveries_quarantined",
    "mutations_found_late",
    "mutations_open",
}
#: Tables that are small however long the history. Lists of operators join them as the planner likes.
SMALL = {"breakers", "cursors", "handlers", "workflows"}
#: Of which the newest row is read.
NEWEST = {("sample", "events_pk"), ("high water", "audit_pk")}
#: Of these, indexes on runs that are few at any time. Either way to a run is as good as its key.
FEW = {"runs_retry_pending", "runs_open", "runs_pk"}
_FILL = (
    "INSERT INTO pipeline.workflows (name, concurrency) SELECT 'w' || n, 10 FROM generate_series(1, 20) n",
    "INSERT INTO pipeline.handlers (workflow, name, kind) SELECT name, 'take', 'consumer' FROM pipeline.workflows",
    """
    INSERT INTO pipeline.deliveries (event_id, handler_id, topic)
    SELECT n, h.id, 'in' FROM generate_series(1, 500) n, pipeline.handlers h
    """,
    """
    INSERT INTO pipeline.runs (workflow, handler_id, session_id, phase, status, finished_at)
    SELECT h.workflow, h.id, gen_random_uuid(), 'committed', 'committed', now()
    FROM generate_series(1, 100), pipeline.handlers h
    """,
)
_GROW = """
INSERT INTO pipeline.deliveries (event_id, handler_id, topic, status, run_id)
SELECT n, h.id, 'in', 'consumed', gen_random_uuid() FROM generate_series(501, 2500) n, pipeline.handlers h
"""

#: What statistics of a moment without work look like.
_FINISH = (
    "UPDATE pipeline.deliveries SET status = 'consumed', run_id = gen_random_uuid() WHERE run_id IS NULL",
    "ANALYZE",
)

Scan = tuple[str, str, str]


@pytest.fixture
def db(embedded: servers.Servers) -> Iterator[Database]:
    """A database of which Postgres knows nothing yet, over connections as workers have them."""
    with databases.clone_database(embedded.database_url, f"plans_{os.getpid()}") as url:
        made = Database.connect(url)
        yield made
        made.dispose()


def scans(db: Database, sql: str) -> set[Scan]:
    """How the plan that is made once reads each table: the table, the index and its condition."""
    compiled = _compiled(sql)
    given = f"({', '.join(['NULL'] * len(compiled.names))})" if compiled.names else ""
    with db.engine.connect() as connection:
        connection.exec_driver_sql(f"PREPARE planned AS {compiled.numbered}".replace("%", "%%"))
        plan = connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) EXECUTE planned{given}").scalar_one()
        connection.exec_driver_sql("DEALLOCATE planned")
    return set(_scans(plan[0]["Plan"]))


def _scans(node: dict[str, Any]) -> Iterator[Scan]:
    if "Relation Name" in node and "Scan" in node["Node Type"]:
        index = node.get("Index Name", node["Node Type"]).removesuffix("_of_topic")  # as good with a topic as without
        yield node["Relation Name"], index, node.get("Index Cond", "")
    for child in node.get("Plans", ()):
        yield from _scans(child)


def test_plans_are_the_same_on_empty_fresh_and_aged_statistics(db: Database) -> None:
    plans = {"empty": {name: scans(db, sql) for name, sql in STATEMENTS.items()}}
    with db.engine.begin() as connection:
        for statement in _FILL:
            connection.execute(text(statement))
    plans["fresh"] = {name: scans(db, sql) for name, sql in STATEMENTS.items()}
    with db.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE"))
    with db.engine.begin() as connection:
        connection.execute(text(_GROW))
    plans["aged"] = {name: scans(db, sql) for name, sql in STATEMENTS.items()}
    with db.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for statement in _FINISH:
            connection.execute(text(statement))
    plans["done"] = {name: scans(db, sql) for name, sql in STATEMENTS.items()}
    indexes = {
        when: {
            name: {scan[:2] for scan in found if scan[1] not in FEW and scan[0] not in SMALL}
            for name, found in planned.items()
        }
        for when, planned in plans.items()
    }
    whole = {
        (name, table, index)
        for planned in plans.values()
        for name, found in planned.items()
        for table, index, condition in found
        if not condition and index not in OPEN_ONLY and table not in SMALL and (name, index) not in NEWEST
    }
    assert not whole, "these read a whole table:\n" + "\n".join(map(str, sorted(whole)))
    for when in ("fresh", "aged", "done"):
        differing = {
            name: found ^ indexes["empty"][name]
            for name, found in indexes[when].items()
            if found != indexes["empty"][name]
        }
        assert not differing, when
