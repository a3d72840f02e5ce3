"""How long the reads of API and console take in a large database: `python benchmarks/console.py`.

It starts Postgres, fills a database with 1,000,000 events, 200,000 runs with their mutations and 5,000 open questions,
and calls each read several times over a pool of connections, after one call to warm up. It prints the median and the
slowest call of each, and ends with 1 if a median is above 200 ms. ``--events``, ``--runs`` and
``--questions`` choose other sizes.
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.table import Table
from sqlalchemy import text

from pipeline.admin import (
    attention,
    changes,
    events,
    graph,
    history,
    incidents,
    mutations,
    pages,
    runs,
    search,
    system,
    trace,
    workflows,
)
from pipeline.admin.audit import AuditFilter
from pipeline.admin.events import EventFilter
from pipeline.admin.ledger import LedgerFilter
from pipeline.admin.quarantine import QuarantineFilter
from pipeline.admin.resolutions import Resolutions
from pipeline.admin.runs import RunFilter
from pipeline.admin.sessions import SessionFilter
from pipeline.background.sweeps import PERIODS
from pipeline.bench import installation
from pipeline.config import Settings
from pipeline.domain.states import DeliveryStatus, MutationStatus, RunStatus
from pipeline.store.database import Database
from tests.factories import IN
from tests.support.large_database import WORKFLOW, Crowd

LIMIT = 0.2  #: seconds
_ROUNDS = 5
_PORTION = 50_000

#: Events that no run consumed: an operator skipped them, or they wait.
_MORE_EVENTS = """
WITH fresh AS (
  INSERT INTO pipeline.events (workflow, topic, message_id, key, payload)
  SELECT :workflow, :topic, 'more-' || gen_random_uuid(), 'customer ' || n % 1000, '{"order": 4711}'
  FROM generate_series(1, :count) AS n RETURNING id, key
)
INSERT INTO pipeline.deliveries (event_id, handler_id, topic, key, status)
SELECT id, :handler_id, :topic, key, CASE WHEN id % 100 = 0 THEN 'pending' WHEN id % 100 = 1 THEN 'quarantined'
  ELSE 'skipped' END FROM fresh
"""
_QUESTIONS = (
    """
    CREATE TEMP TABLE asked ON COMMIT DROP AS
    SELECT n, pipeline.next_event_id() AS event, pipeline.uuid7() AS run, pipeline.uuid7() AS mutation
    FROM generate_series(1, :count) AS n
    """,
    """
    INSERT INTO pipeline.sessions (id, workflow, finished_at, result)
    VALUES (md5('questions')::uuid, :workflow, pipeline.clock(), 'failed')
    """,
    """
    INSERT INTO pipeline.events (id, workflow, topic, message_id, payload)
    SELECT event, :workflow, :topic, 'unknown-' || n, '{"order": 4711}' FROM asked
    """,
    """
    INSERT INTO pipeline.runs (id, workflow, handler_id, session_id, phase, status, mutation_id, offered, event_ids,
      prepare_result, fence, started_at, finished_at, retry_pending, error, error_type)
    SELECT run, :workflow, :handler_id, md5('questions')::uuid, 'mutating', 'paused:reconciliation', mutation,
      ARRAY[event], ARRAY[event], '{"data": null}', 2, pipeline.clock(), pipeline.clock(), true, 'no answer in 5 s',
      'TimeoutError' FROM asked
    """,
    """
    INSERT INTO pipeline.mutations (id, run_id, workflow, connector, operation, params, request_hash, effect_id,
      idempotency_key, status, reconcilable, settle, timeout, attempts, sent_at, send_deadline, quiet_until, doubted_at,
      error, headline, message_ids, message_count)
    SELECT mutation, run, :workflow, 'pay', 'charge', '{"cents": 9901}', 'abc', run, run || '\\:0', 'indeterminate',
      false, '0', '5 s', 1, pipeline.clock(), pipeline.clock(), pipeline.clock(), pipeline.clock(), 'no answer in 5 s',
      'Charge 99.01 EUR for order ' || n, ARRAY['unknown-' || n], 1 FROM asked
    """,
    """
    INSERT INTO pipeline.deliveries (event_id, handler_id, topic, status, run_id)
    SELECT event, :handler_id, :topic, 'reserved', run FROM asked
    """,
)
_REST = (
    """
    INSERT INTO pipeline.audit (actor, act, workflow, reason)
    SELECT 'ada', 'workflow.pause', :workflow, 'load' FROM generate_series(1, 20000)
    """,
    """
    INSERT INTO pipeline.samples (workflow, at, span, published, committed, stopped, mutated, uncertain, backlog,
      unresolved)
    SELECT :workflow, pipeline.clock() - n * interval '1 minute', '1 minute', 60, 50, 1, 50, 1, 100, 5
    FROM generate_series(1, 20160) AS n
    """,
)


def fill(db: Database, *, events: int, runs: int, questions: int) -> Crowd:
    """Fill a migrated database."""
    crowd = Crowd(db, done=runs)
    given = {"workflow": WORKFLOW, "topic": IN, "handler_id": crowd.handler_id}
    for first in range(0, max(0, events - runs), _PORTION):
        _write(db, _MORE_EVENTS, **given, count=min(_PORTION, events - runs - first))
    _write(db, *_QUESTIONS, **given, count=questions)
    _write(db, *_REST, **given)
    with db.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM (ANALYZE, INDEX_CLEANUP ON)"))
        connection.execute(text("CHECKPOINT"))
    return crowd


def _write(db: Database, *statements: str, **given: Any) -> None:
    with db.engine.begin() as connection:
        for statement in statements:
            named = {name: value for name, value in given.items() if f":{name}" in statement}
            connection.execute(text(statement), named)


def reads(db: Database) -> Mapping[str, Callable[[], object]]:
    """Return every read of API and console, by what it shows."""
    resolutions = Resolutions(db)
    (run, *_) = pages.run_page(db, RunFilter(status=RunStatus.COMMITTED), limit=1).items
    (event, *_) = pages.event_page(db, EventFilter(message_id="done-7")).items
    (question, *_) = pages.mutation_page(db, LedgerFilter(statuses=(MutationStatus.INDETERMINATE,)), limit=1).items
    mark = changes.changes_since(db).mark
    past = event.created_at + timedelta(seconds=1)
    second = pages.event_page(db, EventFilter(), limit=50).next
    return {
        "inbox": lambda: attention.items(resolutions, limit=50, recent=None),
        "incidents": lambda: incidents.open_incidents(resolutions),
        "question": lambda: mutations.detail(resolutions, str(question.id)),
        "changes, nothing new": lambda: changes.changes_since(db, mark),
        "changes, first": lambda: changes.changes_since(db),
        "events": lambda: pages.event_page(db, EventFilter()),
        "events, second page": lambda: pages.event_page(db, EventFilter(), after=second),
        "events of a rare key": lambda: pages.event_page(db, EventFilter(key="no such key")),
        "events that were skipped": lambda: pages.event_page(db, EventFilter(status=DeliveryStatus.SKIPPED)),
        "events that were consumed": lambda: pages.event_page(db, EventFilter(status=DeliveryStatus.CONSUMED)),
        "events that wait": lambda: pages.event_page(db, EventFilter(status=DeliveryStatus.PENDING)),
        "events that wait, rare key": lambda: pages.event_page(
            db, EventFilter(status=DeliveryStatus.PENDING, key="no such key")
        ),
        "events until": lambda: pages.event_page(db, EventFilter(until=past)),
        "event": lambda: events.detail(db, str(event.id)),
        "runs": lambda: pages.run_page(db, RunFilter()),
        "runs of a rare status": lambda: pages.run_page(db, RunFilter(status=RunStatus.CRASHED)),
        "runs that wait": lambda: pages.run_page(db, RunFilter(is_waiting=True)),
        "runs of a session": lambda: pages.run_page(db, RunFilter(session_id=_session(db, run.id))),
        "run": lambda: runs.detail(db, str(run.id)),
        "sessions": lambda: pages.session_page(db, SessionFilter()),
        "ledger": lambda: pages.mutation_page(db, LedgerFilter()),
        "ledger, open": lambda: pages.mutation_page(db, LedgerFilter(statuses=(MutationStatus.INDETERMINATE,))),
        "ledger, rare error": lambda: pages.mutation_page(db, LedgerFilter(error_type="KeyError")),
        "ledger, failed": lambda: pages.mutation_page(db, LedgerFilter(statuses=(MutationStatus.FAILED,))),
        "audit": lambda: pages.audit_page(db, AuditFilter()),
        "audit of a workflow": lambda: pages.audit_page(db, AuditFilter(workflow=WORKFLOW)),
        "audit of a rare actor": lambda: pages.audit_page(db, AuditFilter(actor="bob")),
        "quarantine": lambda: pages.quarantine_page(db, QuarantineFilter()),
        "search, message": lambda: search.search(db, "done-4711"),
        "search, run": lambda: search.search(db, str(run.id)),
        "search, outside id": lambda: search.search(db, "ch_1"),
        "trace": lambda: trace.trace(db, f"event:{event.id}"),
        "workflows": lambda: workflows.list_workflows(db),
        "workflow": lambda: workflows.detail(db, WORKFLOW),
        "topic graph": lambda: graph.topic_graph(db, WORKFLOW),
        "history of an hour": lambda: history.workflow_history(db, WORKFLOW),
        "history of two weeks": lambda: history.all_histories(db, timedelta(days=14)),
        "system": lambda: system.system_report(db, Settings(), PERIODS),
        "health": lambda: system.health(db, PERIODS),
    }


def _session(db: Database, run_id: Any) -> Any:
    found = runs.detail(db, str(run_id)).session
    return found.id if found is not None else None


def measure(read: Callable[[], object]) -> tuple[float, float]:
    """Return the median and the slowest of some calls in seconds, after one that warms up."""
    read()
    taken = []
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        read()
        taken.append(time.perf_counter() - begun)
    return median(taken), max(taken)


def main() -> int:
    """Fill, measure and print. Return 1 if a read took too long."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("events", 1_000_000), ("runs", 200_000), ("questions", 5_000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    sizes = vars(parser.parse_args())
    console = Console(highlight=False, soft_wrap=True)
    load, python = os.getloadavg()[0], platform.python_version()
    console.print(f"{os.cpu_count()} cores, load {load:.1f}, {platform.platform()}, Python {python}")
    with installation.embedded() as site:
        url = site.urls.database_url
        begun = time.monotonic()
        fill(Database.connect_unpooled(url), **sizes)
        console.print(f"{sizes} filled in {time.monotonic() - begun:.0f} s")
        db = Database.connect(url)
        found = {name: measure(read) for name, read in reads(db).items()}
        db.dispose()
    title = f"{_ROUNDS} calls, ms; expected a median of at most {LIMIT * 1000:.0f}"
    table = Table("read", "median", "slowest", title=title)
    for name, taken in sorted(found.items(), key=lambda each: each[1], reverse=True):
        table.add_row(name, *(f"{seconds * 1000:.1f}" for seconds in taken))
    console.print(table)
    return 1 if max(found.values())[0] > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
