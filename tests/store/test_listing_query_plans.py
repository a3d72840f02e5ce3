"""Listings stay quick however long the history: no list scans a large table, none reads more of it.

The same listing is explained in a database with a short history and in one with a long one.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import TextClause

from pipeline.domain.states import DeliveryStatus
from pipeline.embedded import servers
from pipeline.store.connections import _compiled, _values
from pipeline.store.database import Database, Statement
from pipeline.store.reads import attention, gauges, ledger, listings, pages, traces
from pipeline.store.reads.pages import FIRST_UUID, LAST_UUID
from pipeline.store.writes import housekeeping as installation_store
from tests.factories import IN
from tests.support import databases
from tests.support.large_database import WORKFLOW, Crowd

pytestmark = pytest.mark.timeout(300)

FEW, MANY = 1_000, 40_000
LARGE = frozenset({"events", "deliveries", "runs", "mutations"})
#: Bound so that the window, and not the size of the history, says how much is read.
RECENT = 500

Asked = tuple[TextClause, Callable[[Crowd], dict[str, Any]]]


NO_TIMES = {"since": None, "until": None}


def events(**only: Any) -> dict[str, Any]:
    none = {"workflows": None, "topic": None, "key": None, "status": None, **NO_TIMES}
    return {**none, "before": 2**63 - 1, "low": 0, "limit": 50, **only}


def in_window(crowd: Crowd, **only: Any) -> dict[str, Any]:
    """The events of a window, as the caller finds its end."""
    return events(low=newest(crowd, "events"), **only)


def uuids(**only: Any) -> dict[str, Any]:
    return {"workflows": None, "before": LAST_UUID, "low": FIRST_UUID, "limit": 50, **NO_TIMES, **only}


def runs(**only: Any) -> dict[str, Any]:
    none = {"handler": None, "status": None, "phase": None, "session_id": None, "window": RECENT}
    return uuids(**{**none, **only})


def ledger_rows(**only: Any) -> dict[str, Any]:
    none = ("connector", "operation", "resolved_by", "older_than", "error_type")
    return uuids(**{**dict.fromkeys(none), "statuses": None, **only})


def acts(**only: Any) -> dict[str, Any]:
    none = {"workflows": None, "actor": None, "act": None, "subject": None, **NO_TIMES}
    return {**none, "before": 2**63 - 1, "low": 0, "limit": 50, **only}


def newest(crowd: Crowd, table: str) -> Any:
    """The last id of a window of the newest rows."""
    with crowd.db.transaction() as tx:
        sql = f"SELECT id FROM pipeline.{table} ORDER BY id DESC OFFSET {RECENT} LIMIT 1"
        return tx.one(Statement[Any](sql)).id


def some(crowd: Crowd, table: str) -> list[str]:
    with crowd.db.transaction() as tx:
        return [str(row.id) for row in tx.all(Statement[Any](f"SELECT id FROM pipeline.{table} ORDER BY id LIMIT 5"))]


def spanned(crowd: Crowd) -> dict[str, Any]:
    (low, *_, high) = some(crowd, "runs")
    return {"low": low, "high": high, "limit": 6}


LOOKS: Mapping[str, Asked] = {
    "workflows": (listings._WORKFLOWS, lambda _: {"workflow": None}),
    "handlers": (listings._HANDLERS, lambda _: {"workflow": None, "limit": 1_000}),
    "places": (listings._CAPACITY_HOLDERS, lambda _: {"workflow": None, "limit": 1_000}),
    "blocks": (listings._BLOCKS, lambda _: {"workflow": WORKFLOW, "limit": 100}),
    "newest events": (pages._EVENTS, lambda _: events(workflows=[WORKFLOW], topic=IN)),
    "end of the newest events": (pages._EVENTS_END, lambda _: events(window=RECENT)),
    "events of a key": (pages._EVENTS, lambda crowd: in_window(crowd, key="nobody")),
    "consumed events": (pages._EVENTS, lambda crowd: in_window(crowd, status="consumed")),
    "skipped events": (pages._EVENTS, lambda crowd: in_window(crowd, status="skipped")),
    "pending events": (pages._OPEN_EVENTS["pending"], lambda _: events(status="pending")),
    "end of the pending events": (pages._OPEN_EVENTS_END["pending"], lambda _: events(window=RECENT)),
    "events of a message id": (pages._EVENTS_BY_MESSAGE, lambda _: events(message_id="done-7")),
    "events by message": (listings._EVENTS_BY_MESSAGE, lambda _: {"message_id": "done-7", "limit": 20}),
    "the first event of an instant": (pages._FIRST_AT["events"], lambda _: {"moment": "2026-01-01"}),
    "ledger": (pages._MUTATIONS, lambda _: ledger_rows()),
    "ledger of an error": (
        pages._MUTATIONS,
        lambda crowd: ledger_rows(low=newest(crowd, "mutations"), error_type="TimeoutError"),
    ),
    "end of the ledger": (pages._MUTATIONS_END, lambda _: uuids(window=RECENT)),
    "open questions": (pages._OPEN_MUTATIONS, lambda _: ledger_rows(statuses=["indeterminate"])),
    "end of the open questions": (pages._OPEN_MUTATIONS_END, lambda _: uuids(window=RECENT)),
    "sessions": (
        pages._SESSIONS,
        lambda _: uuids(result=None, is_open=None, cost_rows=1_000),
    ),
    "acts": (pages._AUDIT[""], lambda _: acts()),
    "acts of a workflow": (pages._AUDIT["workflow"], lambda _: acts(subject=WORKFLOW)),
    "quarantine": (
        pages._QUARANTINE,
        lambda _: {"before": 2**63 - 1, "before_handler": 0, "workflows": None, "handler": None, "limit": 50},
    ),
    "events by id": (listings._EVENTS_BY_ID, lambda crowd: {"ids": some(crowd, "events")}),
    "deliveries": (listings._DELIVERIES, lambda crowd: {"ids": some(crowd, "events"), "limit": 100}),
    "set aside": (
        listings._DELIVERIES_BY_STATUS[DeliveryStatus.QUARANTINED],
        lambda _: {"workflow": WORKFLOW, "handler": None, "limit": 100},
    ),
    "newest runs": (pages._RUNS, lambda _: runs(workflows=[WORKFLOW])),
    "end of the newest runs": (pages._RUNS_END, lambda _: runs()),
    "runs of a rare status": (pages._RUNS, lambda crowd: runs(low=newest(crowd, "runs"), status="crashed")),
    "active runs": (pages._ACTIVE_RUNS, lambda _: runs(status="active")),
    "waiting runs": (pages._WAITING_RUNS, lambda _: runs()),
    "session": (listings._SESSION, lambda crowd: {"id": some(crowd, "sessions")[0], "limit": 1_000}),
    "runs by id": (listings._RUNS_BY_ID, lambda crowd: {"ids": some(crowd, "runs")}),
    "carried by": (listings._RETRIES_OF, lambda crowd: {"ids": some(crowd, "runs")}),
    "outputs": (listings._OUTPUTS, lambda crowd: {"ids": some(crowd, "runs"), "limit": 100}),
    "mutations by id": (listings._LEDGER, lambda crowd: {"ids": some(crowd, "mutations")}),
    "failed mutations": (
        listings._RECENT_MUTATIONS,
        lambda _: {"status": "failed", "workflow": None, "recent": RECENT, "limit": 50},
    ),
    "approvals": (listings._PENDING_APPROVALS, lambda _: {"workflow": None, "limit": 100}),
    "unsent": (
        listings._UNSENT_RUNS,
        lambda crowd: {"workflow": WORKFLOW, "handler_id": crowd.handler_id, "limit": 100},
    ),
    "surfaced": (listings._LATE_EFFECTS, lambda _: {"limit": 100}),
    "operations": (ledger._OPERATION_NAMES, lambda _: {"recent": RECENT}),
    "newest known by": (
        ledger._PARAMETER_VALUES,
        lambda _: {"name": "to", "connector": "mail", "below": UUID(int=2**128 - 1), "limit": RECENT},
    ),
    "oldest known by": (
        ledger._PARAMETER_VALUES,
        lambda crowd: {"name": "to", "connector": None, "below": some(crowd, "mutations")[-1], "limit": RECENT},
    ),
    "questions": (
        ledger._OPEN_BY_STATUS,
        lambda _: {
            "statuses": ["indeterminate"],
            "limit": 100,
            "workflow": None,
            "connector": None,
            "operation": None,
            "older_than": None,
        },
    ),
    "questions by id": (
        ledger._MUTATIONS_BY_ID,
        lambda crowd: {"statuses": ["applied"], "ids": some(crowd, "mutations"), "limit": 100},
    ),
    "incidents": (ledger._INCIDENTS, lambda _: {"workflow": None, "limit": 100, "with_ids": True}),
    "called operations": (listings._CALLED_OPERATIONS, lambda _: {"workflow": WORKFLOW, "recent": RECENT}),
    "high water": (attention.HIGH_WATER, lambda _: {"limit": 100}),
    "waiting counts": (attention._WAITING_COUNTS, lambda _: {"limit": 100}),
    "plan of a run": (listings._RUN_RECORD, lambda crowd: {"id": some(crowd, "runs")[0]}),
    "watched items": (attention._WATCHED_ITEMS, lambda _: {"limit": 100}),
    "sample": (installation_store.TAKE_SAMPLE, lambda _: {"limit": 1_000, "counted": RECENT}),
    "last act": (gauges._LAST_ACT, lambda _: {}),
    "audit": (
        listings._AUDIT,
        lambda crowd: {"run_id": some(crowd, "runs")[0], "mutation_id": None, "event_id": 1, "limit": 100},
    ),
    "audit of a workflow": (
        listings._AUDIT_OF_WORKFLOW,
        lambda _: {"workflow": WORKFLOW, "limit": 10},
    ),
    "blocks of a run": (listings._BLOCKS_OF_RUN, lambda crowd: {"run_id": some(crowd, "runs")[0], "limit": 100}),
    "older events": (listings._HAS_OLDER["events"], lambda _: {"recent": RECENT}),
    "ids by how they begin": (traces._IDS_BETWEEN["runs"], spanned),
    "by key": (traces._BY_KEY, lambda _: {"key": "run:none", "limit": 20}),
    "by result": (
        traces._BY_RESULT_VALUE,
        lambda _: {"value": '{"text": "ch_1", "number": 1}', "recent": RECENT, "limit": 20},
    ),
    "runs that tried": (
        traces._RUNS_WITH_INPUTS,
        lambda crowd: {"events": [1, 2], "since": some(crowd, "runs")[0], "recent": RECENT, "limit": 100},
    ),
    "pace": (traces._RUN_THROUGHPUT, lambda _: {"span": "1 minute", "recent": RECENT}),
    "arrivals": (traces._EVENT_THROUGHPUT, lambda _: {"span": "1 minute", "recent": RECENT}),
}


@pytest.fixture(scope="module")
def crowds(embedded: servers.Servers) -> Iterator[Callable[[str], Crowd]]:
    """A short history and a long one, each made when first asked for."""
    made: dict[str, Crowd] = {}
    sizes = {"short": FEW, "long": MANY}
    with ExitStack() as stack:

        def get(name: str) -> Crowd:
            if name not in made:
                url = stack.enter_context(
                    databases.clone_database(embedded.database_url, f"looks_{name}_{os.getpid()}")
                )
                made[name] = Crowd(Database.connect_unpooled(url), done=sizes[name])
            return made[name]

        yield get


def explained(crowd: Crowd, asked: Asked) -> dict[str, Any]:
    """The plan of a statement as a pooled connection runs it: prepared, and planned without its values."""
    statement, params = asked
    compiled, given = _compiled(statement.text), params(crowd)
    with crowd.db.engine.connect() as connection:
        cursor: Any = connection.connection.cursor()
        cursor.execute("SET LOCAL plan_cache_mode = force_generic_plan")
        cursor.execute(f"PREPARE asked AS {compiled.numbered}")
        values = f"({', '.join(['%s'] * len(compiled.names))})" if compiled.names else ""
        cursor.execute(
            f"EXPLAIN (FORMAT JSON, ANALYZE, BUFFERS) EXECUTE asked {values}", _values(compiled.names, given)
        )
        ((plan,),) = cursor.fetchall()
        cursor.execute("DEALLOCATE asked")
    root: dict[str, Any] = plan[0]["Plan"]
    return root


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


@pytest.mark.parametrize("name", LOOKS)
def test_a_listing_reads_no_large_table_whole_and_no_more_of_it_as_history_grows(
    crowds: Callable[[str], Crowd], name: str
) -> None:
    short, long = (explained(crowds(history), LOOKS[name]) for history in ("short", "long"))
    scanned = [node["Relation Name"] for node in nodes(long) if node["Node Type"] == "Seq Scan"]
    assert set(scanned) & LARGE == set()
    # two hundred runs are in the air, each perhaps on a page of its own
    before, now = (plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] for plan in (short, long))
    assert now < 3 * max(before, 100), f"{before} pages behind {FEW} finished runs, {now} behind {MANY}"
