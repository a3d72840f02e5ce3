"""How long API and console take in a large database: `python benchmarks/console.py`.

It starts Postgres and Redis, fills a database with 1,000,000 events, 200,000 runs with their mutations and 5,000 open
questions, and starts ``pipeline api``. Then it asks every page and every list and item of ``/v1`` over HTTP several
times, after one request to warm up. A question changes before each request, so no earlier answer helps. The time of an
answer is the one that the server names in ``Server-Timing``; it contains finding out who the caller is. The processor
time of the API and of Postgres stands beside it, because on a busy machine the rest of the time is waiting. At last it
calls each read several times in its own process.

It prints the median and the fastest of each, and ends with 1 if a median is above 200 ms or if an answer was not the
expected one. ``--events``, ``--runs`` and ``--questions`` choose other sizes; ``--write FILE`` puts the figures
over HTTP into a document.
"""

import argparse
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
from fastapi.routing import APIRoute
from rich.console import Console
from rich.table import Table
from sqlalchemy import text

from pipeline import PrepareResult, Workflow
from pipeline.admin import (
    attention,
    changes,
    events,
    mutations,
    pages,
    runs,
    search,
    system,
    throughput,
    trace,
    workflows,
)
from pipeline.admin.access import Access
from pipeline.admin.audit import AuditFilter
from pipeline.admin.bulk import BulkActs, MutationSelection
from pipeline.admin.events import EventFilter
from pipeline.admin.mutations import LedgerFilter
from pipeline.admin.quarantine import Quarantine, QuarantineFilter
from pipeline.admin.resolutions import MutationFilter, Resolutions
from pipeline.admin.runs import RunFilter, SessionFilter
from pipeline.api import console, v1
from pipeline.background.sweeps import PERIODS
from pipeline.bench import installation
from pipeline.bench.counters import cpu_seconds, postmaster_pid
from pipeline.config import Settings
from pipeline.domain.access import Rights, Role
from pipeline.domain.acts import BulkAct
from pipeline.domain.states import DeliveryStatus, MutationStatus, RunStatus
from pipeline.domain.values import Actor
from pipeline.store.database import Database
from tests.factories import IN, OUT
from tests.support.large_database import WORKFLOW, Crowd

LIMIT = 0.2  #: seconds
_ROUNDS = 5
_PORTION = 50_000
_WRITTEN = 12  #: rows of the table in a document

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
        "incidents": lambda: attention.open_incidents(resolutions),
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
        "topic graph": lambda: workflows.topic_graph(db, WORKFLOW),
        "history of an hour": lambda: throughput.workflow_history(db, WORKFLOW),
        "history of two weeks": lambda: throughput.all_histories(db, timedelta(days=14)),
        "system": lambda: system.system_report(db, Settings(), PERIODS),
        "health": lambda: system.health(db, PERIODS),
    }


#: The code behind the rows, which `pipeline api` needs to plan.
billing = Workflow(WORKFLOW, concurrency=1_000, on_uncertain="contain")
paid, receipts = billing.topic(IN), billing.topic(OUT)


@billing.consumer(subscribes=[paid], publishes=[receipts], name="send")
class Send:
    """Take one event, and ask for nothing."""

    def prepare(self, ctx: Any, state: Any) -> PrepareResult:
        """Take the oldest event."""
        del state
        pending = ctx.peek(paid, limit=1)
        return PrepareResult(reserve=pending, data=pending[0].payload) if pending else PrepareResult.nothing()

    def mutate(self, ctx: Any, prepared: Any) -> None:
        """Ask for nothing."""

    def next(self, ctx: Any, prepared: Any, result: Any) -> None:
        """Publish nothing."""


def addresses(db: Database) -> list[str]:
    """Return every address that answers with a page, a list or an item, and filters that find few or old rows.

    They come from the routes, so that a new page is measured too.
    """
    resolutions = Resolutions(db)
    (run, *_) = pages.run_page(db, RunFilter(status=RunStatus.COMMITTED), limit=1).items
    (event, *_) = pages.event_page(db, EventFilter(message_id="done-7")).items
    (question, *_) = pages.mutation_page(db, LedgerFilter(statuses=(MutationStatus.INDETERMINATE,)), limit=1).items
    preview = BulkActs(resolutions, Quarantine(db)).preview_mutations(
        BulkAct.SKIP, MutationSelection(only=MutationFilter(workflow=WORKFLOW)), "bench"
    )
    item = next(each for each in attention.items(resolutions, limit=50, recent=None) if each.mutation_id is None)
    values = {"workflow": WORKFLOW, "name": WORKFLOW, "handler": "send", "topic": IN, "event_id": event.id}
    values |= {"run_id": run.id, "session_id": _session(db, run.id), "mutation_id": question.id}
    values |= {"preview_id": preview.id, "item_id": item.id}
    texts = {"/m/": question.id, "/r/": run.id, "/e/": event.id}
    found = []
    for path in _get_paths():
        known = {**values, "text": next((value for begin, value in texts.items() if path.startswith(begin)), "")}
        filled = re.sub(r"{(\w+)(:path)?}", lambda part, known=known: quote(str(known[part[1]]), safe=""), path)
        found.append(filled + _QUERIES.get(path, ""))
    second = pages.event_page(db, EventFilter(), limit=50).next
    return [*found, f"/events?after={second}", *_FILTERED]


def _get_paths() -> Iterator[str]:
    for prefix, routers in (("/v1", v1.ROUTERS), ("", console.ROUTERS)):
        for route in (route for router in routers for route in router.routes if isinstance(route, APIRoute)):
            if "GET" in route.methods and prefix + route.path not in _NOT_MEASURED:
                yield prefix + route.path


#: The stream, and the doctor: it reads whole tables, when an operator asks for it.
_NOT_MEASURED = ("/v1/attention/stream", "/v1/doctor")
_CHANGE = """
UPDATE pipeline.mutations SET reconcile_attempts = reconcile_attempts + 1
WHERE id = (SELECT m.id FROM pipeline.mutations m WHERE m.status = 'indeterminate' ORDER BY m.id LIMIT 1)
"""
_QUERIES = {"/v1/search": "?q=done-4711", "/search": "?q=done-4711"}
_FILTERED = (
    *(
        "/?q=order+7",
        "/?kind=indeterminate",
        "/ledger?status=indeterminate",
        "/ledger?error=KeyError",
        "/ledger?status=failed",
    ),
    *("/runs?status=crashed", "/runs?waiting=1", "/events?key=no+such+key", "/events?status=consumed"),
    *("/events?status=pending&key=no+such+key", "/audit?actor=bob", "/w/billing?span=7d", "/search?q=ch_1"),
    *("/v1/runs?status=crashed", "/v1/runs?is_waiting=true", "/v1/events?key=no+such+key"),
    *("/v1/mutations?status=indeterminate", "/v1/mutations?error_type=KeyError", "/v1/audit?actor=bob"),
    *("/v1/attention?limit=1000", "/v1/runs?limit=1000", "/v1/workflows/billing/history?span=1209600"),
)


@contextmanager
def served(urls: Any) -> Iterator[tuple[str, int]]:
    """Run ``pipeline api`` until the block is left; yield its address and its process."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PIPELINE_")}
    given = {"PIPELINE_DATABASE_URL": urls.database_url, "PIPELINE_BROKER_URL": urls.broker_url}
    process = subprocess.Popen(
        [sys.executable, "-c", "from pipeline.cli.main import main; main()", "api", "--port", "0"],
        env={**environ, **given, "PIPELINE_WORKFLOWS": "benchmarks.console"},
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.terminate()
        process.wait(30)


def measure_answers(
    db: Database, url: str, secret: str, paths: list[str], processes: tuple[int, ...]
) -> tuple[dict[str, tuple[float, ...]], list[str]]:
    """Return median, fastest and processor time of each path, and the answers that were not expected."""
    taken, wrong = dict[str, tuple[float, ...]](), list[str]()
    headers = {"Authorization": f"Bearer {secret}"}
    with httpx.Client(base_url=url, headers=headers, timeout=120) as client:
        for path in paths:
            accept = "application/json" if path.startswith("/v1") else "text/html"
            client.get(path, headers={"Accept": accept})
            answers, spent = [], 0.0
            for _ in range(_ROUNDS):
                _write(db, _CHANGE)
                before = cpu_seconds(*processes)
                answers.append(client.get(path, headers={"Accept": accept}))
                spent += cpu_seconds(*processes) - before
            wrong += [f"{path}: {answers[-1].status_code}"] if answers[-1].status_code not in (200, 303) else []
            times = [float(answer.headers["Server-Timing"].partition("dur=")[2]) / 1000 for answer in answers]
            taken[path] = median(times), min(times), spent / _ROUNDS
    return taken, wrong


def _session(db: Database, run_id: Any) -> Any:
    found = runs.detail(db, str(run_id)).session
    return found.id if found is not None else None


def measure(read: Callable[[], object]) -> tuple[float, float]:
    """Return the median and the fastest of some calls in seconds, after one that warms up."""
    read()
    taken = []
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        read()
        taken.append(time.perf_counter() - begun)
    return median(taken), min(taken)


def main() -> int:
    """Fill, measure and print. Return 1 if something took too long."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("events", 1_000_000), ("runs", 200_000), ("questions", 5_000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--write", type=Path, help="document whose marked block gets the figures")
    given = vars(parser.parse_args())
    document = given.pop("write")
    terminal = Console(highlight=False, soft_wrap=True)
    with installation.embedded() as site:
        url, begun = site.urls.database_url, time.monotonic()
        fill(Database.connect_unpooled(url), **given)
        terminal.print(f"{given} filled in {time.monotonic() - begun:.0f} s")
        db = Database.connect(url)
        token = Access(db).create_token("bench", Rights(role=Role.ADMIN, can_see_payloads=True), Actor(name="bench"))
        before = os.getloadavg()[0]
        with served(site.urls) as (address, process), db.engine.connect() as connection:
            backend = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
            processes = (process, postmaster_pid(backend) or process)
            answers, wrong = measure_answers(db, address, token.secret, addresses(db), processes)
        calls = {name: measure(read) for name, read in reads(db).items()}
        machine = _machine(before, db)
        db.dispose()
    terminal.print(machine)
    for title, found in _titled(answers, calls):
        table = Table(
            title,
            *("median", "fastest", "processors")[: len(next(iter(found.values())))],
            title=f"{_ROUNDS} each, ms; expected a median of at most {LIMIT * 1000:.0f}",
        )
        for name, row in _slowest_first(found):
            table.add_row(name, *row)
        terminal.print(table)
    terminal.print(*(f"not the expected answer: {each}" for each in wrong), sep="\n")
    if document is not None:
        _write_figures(document, machine, answers)
    return 1 if wrong or max(each[0] for each in (*answers.values(), *calls.values())) > LIMIT else 0


def _titled(*found: Mapping[str, tuple[float, ...]]) -> Iterator[tuple[str, Mapping[str, tuple[float, ...]]]]:
    yield from zip(("answer over HTTP, server time", "read in this process"), found, strict=True)


def _slowest_first(found: Mapping[str, tuple[float, ...]]) -> list[tuple[str, list[str]]]:
    ordered = sorted(found.items(), key=lambda each: each[1], reverse=True)
    return [(_named(name), [f"{seconds * 1000:.0f}" for seconds in taken]) for name, taken in ordered]


def _named(path: str) -> str:
    """Return a path without ids and cursors, which differ from run to run."""
    path = re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}", "ID", path)
    return re.sub(r"(?<=/)\d{4,}", "ID", re.sub(r"after=[\w-]+", "after=CURSOR", path))


def _machine(before: float, db: Database) -> str:
    with db.engine.connect() as connection:
        version = connection.execute(text("SHOW server_version")).scalar_one().split()[0]
    loads = f"load {min(before, os.getloadavg()[0]):.1f} to {max(before, os.getloadavg()[0]):.1f}"
    system_name, python = f"{platform.system()} {platform.machine()}", platform.python_version()
    return f"{os.cpu_count()} cores, {loads}, {system_name}, Python {python}, Postgres {version}."


def _write_figures(document: Path, machine: str, answers: Mapping[str, tuple[float, ...]]) -> None:
    """Write the slowest answers, and how many there were, between the marks of a document."""
    begin, end = "<!-- begin: python benchmarks/console.py -->", "<!-- end -->"
    before, _, rest = document.read_text().partition(begin)
    _, _, after = rest.partition(end)
    ordered = _slowest_first(answers)
    shown, left = ordered[:_WRITTEN], ordered[_WRITTEN:]
    most = [str(max(int(times[column]) for _, times in left)) for column in range(3)]
    rows = [f"| `{name}` | {' | '.join(times)} |" for name, times in shown]
    rows += [f"| {len(left)} others, each at most | {' | '.join(most)} |"]
    block = [machine, "", "| address | median ms | fastest ms | processors ms |", "|---|---|---|---|", *rows]
    document.write_text("\n".join([before + begin, "", *block, "", end + after]))


if __name__ == "__main__":
    sys.exit(main())
