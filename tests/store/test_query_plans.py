"""The statements that search for work do not read finished work.

A table of finished work only grows. Each statement is explained as it is sent, with real parameters,
in databases that differ in nothing but how much is behind them: a sequential scan of a large table,
or more pages touched because more is done, is a statement that gets slower every day.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import TextClause, text

from pipeline.embedded import servers
from pipeline.store import facts, functions
from pipeline.store.database import Database, Statement, encode_rows
from pipeline.store.reads import attention, gauges, invariants, ledger, work
from pipeline.store.writes import breakers as breaker_store
from pipeline.store.writes import events as event_store
from pipeline.store.writes import handlers as handler_store
from pipeline.store.writes import mutations as mutation_store
from pipeline.store.writes import runs as run_store
from pipeline.store.writes import workflows as workflow_store
from tests.factories import IN, LEASE, OUT, held
from tests.support import databases
from tests.support.databases import copied
from tests.support.large_database import QUIET_EVENTS, WORKFLOW, Crowd

pytestmark = pytest.mark.timeout(300)

FEW, MANY = 2_000, 200_000
LARGE = frozenset({"events", "deliveries", "runs", "mutations"})

Asked = tuple[TextClause, Callable[[Crowd], dict[str, Any]]]


def ids(things: Any) -> list[str]:
    return [str(thing) for thing in things]


def loner(crowd: Crowd) -> dict[str, Any]:
    """A peek whose watermark does not help: one old open event holds it down."""
    return {"handler_id": crowd.handler_id, "topic": IN, "limit": 10, "low_watermark": 0}


def quiet(crowd: Crowd) -> dict[str, Any]:
    """A peek of a quiet topic that finds its last events behind whatever else waits."""
    return {**loner(crowd), "topic": OUT, "limit": QUIET_EVENTS + 1}


def sliced(crowd: Crowd, *, ordered: bool, window: int) -> dict[str, Any]:
    return {
        "workflow": WORKFLOW,
        "handler_id": crowd.handler_id,
        "count": 20,
        "batch": 1,
        "low_watermark": 0,
        "window": window,
        "ordered": ordered,
    }


def claim(run_ids: Any) -> dict[str, Any]:
    return {
        "ids": ids(run_ids),
        "lease": LEASE,
        "worker": "w",
        "known_handlers": [f"{WORKFLOW}\x1fsend", f"{WORKFLOW}\x1fpoll"],
        "known_topics": [f"{WORKFLOW}\x1f{IN}"],
    }


def selecting(crowd: Crowd, **extra: Any) -> dict[str, Any]:
    """Twenty runs whose worker is still choosing their inputs."""
    return {"rows": crowd.rows([held(run) for run in crowd.preparing[140:160]], **extra)}


#: A plan of a function does not show those of its statements.
_FACTS = text(facts.handler_facts("ARRAY[CAST(:workflow AS text)]"))
NOW = "2030-01-01T00:00:00Z"  #: of a host; a plan does not depend on it


def planned(crowd: Crowd) -> dict[str, Any]:
    rows: list[dict[str, Any]] = [
        {
            "run": run.id,
            "fence": run.fence,
            "events": run.offered,
            "topics": [IN] * len(run.offered or ()),
            "result": {},
        }
        for run in crowd.preparing[140:160]
    ]
    return {"rows": encode_rows(rows)}


def returned(crowd: Crowd) -> dict[str, Any]:
    rows = [
        {"run": run.id, "handler_id": crowd.handler_id, "events": run.offered, "counts": True, "suspect": False}
        for run in crowd.preparing[140:160]
    ]
    return {"rows": encode_rows(rows)}


def requested_plan(crowd: Crowd) -> dict[str, Any]:
    request = {"connector": "mail", "operation": "send", "params": {}, "request_hash": "a"}
    effect = {"effect_id": "0199c0de-0000-7000-8000-000000000000", "keyed": True}
    options = {"timeout": "20 s", "settle": "0 s", "reconcilable": True, "needs_approval": False, **effect}
    return {"rows": crowd.rows([held(run) for run in crowd.taken[90:]], **request, **options), "opened_at": NOW}


def verdicts(crowd: Crowd, **extra: Any) -> dict[str, Any]:
    told = {"evidence": "definite", "status": "indeterminate", "resolved_by": "call"}
    rows = [{"mutation_id": row.id, "fence": row.fence, **told} for row in crowd.mutating[80:]]
    return {"rows": encode_rows(rows), **extra}


def emitted(crowd: Crowd) -> str:
    return encode_rows(
        [
            {"n": n, "run": run.id, "topic": IN, "message_id": f"out-{n}", "payload": {}}
            for n, run in enumerate(crowd.emitting[10:])
        ]
    )


#: Statements that only read, with the parameters a sweep, the scheduler or a worker gives them.
READS: Mapping[str, Asked] = {
    "due facts": (_FACTS, lambda _: {"workflow": WORKFLOW}),
    "facts of what may be due": (work.DUE_FACTS, lambda _: {}),
    "peek": (work._PEEK, lambda crowd: {**loner(crowd), "ordered": False}),
    "peek in order": (work._PEEK, lambda crowd: {**loner(crowd), "ordered": True}),
    "peek of a quiet topic": (work._PEEK, lambda crowd: {**quiet(crowd), "ordered": False}),
    "peek of a quiet topic in order": (work._PEEK, lambda crowd: {**quiet(crowd), "ordered": True}),
    "peek of a slice": (work._PEEK_SLICE, lambda crowd: {"ids": ids(crowd.started[-20:])}),
    "workflow facts": (work._WORKFLOW_FACTS, lambda _: {"workflow": WORKFLOW}),
    "lapsed runs": (work._LAPSED, lambda _: {"limit": 100}),
    "unheld runs": (work.STALE_DISPATCHES, lambda _: {"redispatch_after": timedelta(0), "limit": 100}),
    "suspects": (work.SUSPECT_RUNS, lambda crowd: {"ids": ids(crowd.started[170:190])}),
    "unheard runs": (work.UNCLAIMED_RUNS, lambda _: {"patience": timedelta(0), "limit": 100}),
    "what people are told of": (attention._UNDELIVERED_NOTICES, lambda _: {"limit": 100, "skip": 0}),
    "due mutations": (ledger._DUE_MUTATIONS, lambda _: {"limit": 100}),
    "finishable sessions": (work._FINISHABLE, lambda _: {"limit": 100}),
    "blocking mutations": (work._BLOCKING_MUTATIONS, lambda _: {"workflow": WORKFLOW}),
    "standings": (
        run_store.RUN_FACTS,
        lambda crowd: {"rows": encode_rows([{"run": run, "culprits": [1, 2]} for run in crowd.prepared[:20]])},
    ),
    "gauge of runs": (gauges.RUNS, lambda _: {"limit": gauges.MAX_COUNT}),
    "gauge of leases": (gauges.LEASES, lambda _: {"limit": gauges.MAX_COUNT}),
    "gauge of mutations": (gauges.MUTATIONS, lambda _: {"limit": gauges.MAX_COUNT}),
    "gauge of attention": (gauges.ATTENTION, lambda _: {"limit": gauges.MAX_COUNT, "kinds": ["approval", "internal"]}),
    "gauge of backlog": (gauges.BACKLOG, lambda _: {"limit": gauges.MAX_COUNT}),
    "gauge of mixed backlog": (gauges.BACKLOG_MIXED, lambda _: {"limit": gauges.MAX_COUNT_MIXED}),
    "latency of a commit": (gauges.RUN_LATENCIES, lambda crowd: {"ids": ids(crowd.prepared[:20])}),
}

#: Statements that write, as the verbs send them for a cohort of about twenty.
WRITES: Mapping[str, Asked] = {
    "start slices": (run_store.INSERT_SLICED, lambda crowd: sliced(crowd, ordered=False, window=20)),
    "start slices in order": (run_store.INSERT_SLICED, lambda crowd: sliced(crowd, ordered=True, window=1020)),
    "start a run that sees everything": (
        run_store.INSERT_UNSLICED,
        lambda crowd: {
            "workflow": WORKFLOW,
            "handler_id": crowd.handler_id,
            "is_single": False,
            "slot": None,
        },
    ),
    "claim prepare": (run_store.CLAIM_PREPARE, lambda crowd: claim(crowd.started[170:190])),
    "claim produce": (run_store.CLAIM_PRODUCE, lambda crowd: claim(crowd.started[170:190])),
    "claim mutate": (run_store.CLAIM_MUTATE, lambda crowd: claim(crowd.prepared[110:130])),
    "claim next": (run_store.CLAIM_NEXT, lambda crowd: claim(crowd.mutated[40:60])),
    "rouse": (breaker_store.REDISPATCH_WAITING, lambda _: {"limit": 100}),
    "dispatched": (run_store.MARK_DISPATCHED, lambda crowd: {"ids": ids(crowd.started[170:190])}),
    "finish prepare": (run_store.FINISH_PREPARE, planned),
    "no mutation": (run_store.NO_MUTATION, selecting),
    "heartbeat": (run_store.HEARTBEAT, lambda crowd: {**selecting(crowd), "lease": LEASE, "fresh_for": LEASE / 8}),
    "shorten leases": (run_store.SHORTEN_LEASES, lambda _: {"limit": 100}),
    "release": (run_store.HAND_BACK, lambda crowd: selecting(crowd) | {"later": False}),
    "lock to stop": (run_store.LOCK_TO_STOP, selecting),
    "stop": (run_store.STOP, lambda crowd: selecting(crowd, status="crashed", retry_pending=False)),
    "carry forward": (
        run_store.INSERT_RETRIES,
        lambda crowd: {
            "ids": ids(crowd.carried),
            "workflow": WORKFLOW,
            "handler_id": crowd.handler_id,
            "count": 10,
        },
    ),
    "begin mutation": (mutation_store.BEGIN, requested_plan),
    "send": (mutation_store.SEND, requested_plan),
    "apply": (mutation_store.APPLY, verdicts),
    "fail": (mutation_store.FAIL, lambda crowd: verdicts(crowd, host_clock=NOW)),
    "doubt": (mutation_store.DOUBT, lambda crowd: verdicts(crowd, opened_at=NOW)),
    "book": (mutation_store.BOOK, lambda crowd: verdicts(crowd, deferred_until=None, host_clock=NOW)),
    "escalate": (
        mutation_store.ESCALATE,
        lambda crowd: {"ids": ids(row.id for row in crowd.mutating[60:80]), "reason": "asked"},
    ),
    "publish": (
        Statement[Any](functions.INSERT_NEW),
        lambda crowd: {
            "workflow": WORKFLOW,
            "topics": encode_rows([{"name": OUT, "schema_digest": ""}]),
            "rows": emitted(crowd),
        },
    ),
    "replace": (
        Statement[Any](functions.REPLACE_UNSEEN),
        lambda crowd: {"workflow": WORKFLOW, "rows": emitted(crowd), "fresh": []},
    ),
    "commit": (
        event_store.COMMIT,
        lambda crowd: {"rows": crowd.rows([held(run) for run in crowd.emitting[10:]]), "events": emitted(crowd)},
    ),
    "hand back": (event_store.RELEASE_INPUTS, returned),
    "skip inputs": (event_store.SKIP_INPUTS, lambda crowd: {"ids": ids(crowd.prepared[:20])}),
    "lock the workflows of runs": (
        workflow_store.LOCK_WORKFLOWS_OF_RUNS,
        lambda crowd: {"ids": ids(crowd.prepared[:20])},
    ),
    "raise watermarks": (handler_store.RAISE_WATERMARKS, lambda _: {}),
}


def checked(rule: invariants.Invariant) -> Asked:
    recent = {"recent": 1_000} if ":recent" in rule.query.text else {}
    return rule.query, lambda _: {"limit": 100, **recent}


#: What a person asks while the house is on fire.
CHECKS: Mapping[str, Asked] = {rule.name: checked(rule) for rule in invariants.INVARIANTS}

#: Statements that look through what is pending: they must stay cheap however much that is.
UNDER_BACKLOG = (
    "due facts",
    "facts of what may be due",
    "peek",
    "peek in order",
    "peek of a quiet topic",
    "peek of a quiet topic in order",
    "peek of a slice",
    "start slices",
    "start slices in order",
)
#: With a backlog there are a thousand events in the window of an ordered consumer: four pages for each.
WINDOW_PAGES = {"start slices in order": 4 * 1020}

EVERYTHING = {**READS, **WRITES, **CHECKS}


@pytest.fixture(scope="module")
def crowds(embedded: servers.Servers) -> Iterator[Callable[[str], Crowd]]:
    """Databases by name, each made when first asked for: a short history, a long one, a long one and a backlog."""
    made: dict[str, Crowd] = {}
    sizes = {"short": FEW, "long": MANY}
    server = embedded.database_url
    with ExitStack() as stack:

        def make(name: str) -> Crowd:
            own = f"{name}_{os.getpid()}"
            if name in sizes:
                return Crowd(
                    Database.connect_unpooled(stack.enter_context(databases.clone_database(server, own))),
                    done=sizes[name],
                )
            long = get("long")
            url = stack.enter_context(copied(server, f"long_{os.getpid()}", own))
            return long.behind(Database.connect_unpooled(url), waiting=MANY)

        def get(name: str) -> Crowd:
            if name not in made:
                made[name] = make(name)
            return made[name]

        yield get


def explained(crowd: Crowd, asked: Asked, *, options: str = "") -> dict[str, Any]:
    """The plan of the statement that a transition sends; whatever running it would change is rolled back."""
    statement, params = asked
    with crowd.db.engine.connect() as connection:
        connection.execute(text("SET LOCAL session_replication_role = replica"))  # plans, not what triggers refuse
        plan = connection.scalar(text(f"EXPLAIN (FORMAT JSON{options}) {statement.text}"), params(crowd))
    root: dict[str, Any] = plan[0]["Plan"]
    return root


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


def scanned(plan: dict[str, Any]) -> list[str]:
    """Large tables of which the plan reads every row."""
    return [
        f"{node['Relation Name']} ({node['Plan Rows']} rows expected)"
        for node in nodes(plan)
        if node["Node Type"] == "Seq Scan" and node["Relation Name"] in LARGE
    ]


def measured(crowd: Crowd, asked: Asked) -> tuple[int, int]:
    """The rows that a statement returns, and the pages it touches once earlier readers have marked what is dead."""
    plans = [explained(crowd, asked, options=", ANALYZE, BUFFERS") for _ in range(3)]
    return int(plans[0]["Actual Rows"]), min(
        int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]) for plan in plans
    )


def pages(short: Crowd, long: Crowd, asked: Asked) -> tuple[int, int]:
    """The pages that a statement touches behind two histories. Only the history differs: it finds the same work."""
    (rows, fewer), (rows_too, more) = measured(short, asked), measured(long, asked)
    assert rows == rows_too
    return fewer, more


@pytest.mark.parametrize("name", EVERYTHING)
def test_no_statement_scans_a_large_table_behind_a_long_history(crowds: Callable[[str], Crowd], name: str) -> None:
    assert scanned(explained(crowds("long"), EVERYTHING[name])) == []


@pytest.mark.parametrize("name", UNDER_BACKLOG)
def test_no_search_for_work_scans_a_large_table_when_much_is_pending(crowds: Callable[[str], Crowd], name: str) -> None:
    assert scanned(explained(crowds("backlog"), EVERYTHING[name])) == []


@pytest.mark.parametrize("name", READS)
def test_a_hundred_times_the_history_does_not_make_a_read_touch_three_times_the_pages(
    crowds: Callable[[str], Crowd], name: str
) -> None:
    short, long = pages(crowds("short"), crowds("long"), READS[name])
    assert long < 3 * max(short, 10), f"{short} pages behind {FEW} finished runs, {long} behind {MANY}"


@pytest.mark.parametrize("name", WRITES)
def test_a_hundred_times_the_history_makes_a_write_touch_deeper_indexes_and_nothing_else(
    crowds: Callable[[str], Crowd], name: str
) -> None:
    short, long = pages(crowds("short"), crowds("long"), WRITES[name])
    assert long < 10 * max(short, 10), f"{short} pages behind {FEW} finished runs, {long} behind {MANY}"


@pytest.mark.parametrize("name", UNDER_BACKLOG)
def test_a_large_backlog_does_not_make_a_search_for_work_touch_three_times_the_pages(
    crowds: Callable[[str], Crowd], name: str
) -> None:
    (_, idle), (_, busy) = (measured(crowds(history), EVERYTHING[name]) for history in ("short", "backlog"))
    assert busy < 3 * max(idle, WINDOW_PAGES.get(name, 10)), (
        f"{idle} pages with a hundred events pending, {busy} with {MANY}"
    )


def test_the_databases_of_these_tests_are_consistent(crowds: Callable[[str], Crowd]) -> None:
    for name in ("short", "long", "backlog"):
        with crowds(name).db.transaction() as tx:
            assert invariants.findings(tx, recent=500) == []
