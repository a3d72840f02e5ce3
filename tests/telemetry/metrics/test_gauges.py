"""Gauges equal the state of the database."""

import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from pipeline import PrepareResult, Workflow
from pipeline.admin import attention, gauges
from pipeline.admin.gauges import AGE, UP, Gauges
from pipeline.admin.resolutions import Resolutions
from pipeline.domain.states import Phase
from pipeline.domain.values import HandlerSpec, NewEvent, TopicSpec, WorkflowSpec
from pipeline.domain.workflows import OnUncertain
from pipeline.store.connections import CallerConnection
from pipeline.store.database import Database, Statement, Transaction
from pipeline.store.reads import gauges as reads_gauges
from pipeline.telemetry import metrics_collector
from pipeline.telemetry.metrics import METRICS
from pipeline.testing import Inline
from pipeline.transitions import breakers, events, housekeeping, registration, starts, workflows
from pipeline.worker.crash_points import CrashPoint
from tests.cli import scenarios
from tests.factories import IN, OUT, SOMEBODY, a_run, a_workflow, some_events
from tests.support.scripted_consumers import Shop
from tests.support.statement_events import Listener, observed

HOUR = timedelta(hours=1)
Found = dict[str, dict[tuple[str, ...], float]]


def read(db: Database, later: timedelta = timedelta(0)) -> Found:
    """Read every gauge by its labels, in the order of the table."""
    found: Found = {}
    for name, labels, value in gauges.read(Database(db.engine, clock_offset=db.clock_offset + later)):
        assert tuple(labels) == METRICS[name].labels
        key = tuple(labels.values())
        assert key not in found.setdefault(name, {}), f"{name} {key} is exported twice"
        found[name][key] = float(value)
    return found


def test_an_empty_installation_has_no_attention_items(db: Database) -> None:
    found = read(db)
    assert found["pipeline.leases"] == {("held",): 0, ("lapsed",): 0}
    assert set(found["pipeline.attention"].values()) == {0}
    assert "pipeline.runs" not in found


def test_the_backlog_of_a_consumer_is_as_old_as_its_oldest_available_event(db: Database) -> None:
    a_workflow(db, consumers=("send", "file"))
    aside, *_ = some_events(db, "old", "new", "newer")
    found = read(db, HOUR)
    for consumer in ("send", "file"):
        assert found["pipeline.backlog.events"]["billing", IN, consumer] == 3
        assert 3600 <= found["pipeline.backlog.age"]["billing", IN, consumer] < 3700
    with Database(db.engine, clock_offset=HOUR).transaction() as tx:
        ids = [int(row.id) for row in tx.all(Statement[Any]("SELECT id FROM pipeline.events ORDER BY id"))]
        tx.execute(text("UPDATE pipeline.deliveries SET available_at = pipeline.clock() + interval '1 day'"))
        events.quarantine(tx, "billing", "send", aside, SOMEBODY)
    assert ids[0] == aside
    found = read(db, HOUR)
    assert found["pipeline.backlog.events"]["billing", IN, "send"] == 2
    assert found["pipeline.backlog.age"]["billing", IN, "send"] == 0


def test_a_consumer_of_several_topics_has_a_backlog_for_each(db: Database) -> None:
    both = HandlerSpec(name="both", subscribes=(IN, OUT))
    topics = (TopicSpec(name=IN), TopicSpec(name=OUT))
    with db.transaction() as tx:
        registration.register(tx, WorkflowSpec(name="billing", topics=topics, handlers=(both,)))
        events.publish(tx, "billing", [NewEvent(topic=IN, message_id=f"{n}", payload={}) for n in range(2)])
    found = read(db, HOUR)
    assert found["pipeline.backlog.events"] == {("billing", IN, "both"): 2, ("billing", OUT, "both"): 0}
    assert found["pipeline.backlog.age"]["billing", IN, "both"] >= 3600
    assert found["pipeline.backlog.age"]["billing", OUT, "both"] == 0


@pytest.mark.parametrize("topics", [1, 2])
def test_the_age_of_a_declined_event_is_measured(db: Database, topics: int) -> None:
    """It is not available, so the age of the backlog does not include it."""
    workflow = Workflow("shop", concurrency=4)
    subscribed = [workflow.topic(f"topic{n}") for n in range(topics)]

    class Picky:
        def prepare(self, ctx: Any, _: Any) -> PrepareResult:
            wanted = [event for event in ctx.peek(subscribed[0]) if event.payload["kind"] == "invoice"]
            return PrepareResult(reserve=wanted) if wanted else PrepareResult.nothing()

        def mutate(self, ctx: Any, prepared: Any) -> None: ...

        def next(self, ctx: Any, prepared: Any, result: Any) -> None: ...

    workflow.consumer(subscribes=subscribed)(Picky)
    run = Inline(db, [workflow])
    run.publish(subscribed[0], {"kind": "Invoice"})
    run.advance(HOUR)
    run.publish(subscribed[0], {"kind": "invoice"})
    run.run()
    assert [row.status for row in run.deliveries(subscribed[0])] == ["pending", "consumed"]
    found, of = read(run.db, HOUR), ("shop", "topic0", "Picky")
    assert found["pipeline.backlog.events"][of] == 1
    assert found["pipeline.backlog.age"][of] == 0
    assert 7200 <= found["pipeline.backlog.declined.age"][of] < 7300
    with run.db.transaction() as tx:
        workflows.pause(tx, "shop", SOMEBODY)
    assert read(run.db, HOUR)["pipeline.backlog.declined.age"][of] == 0


def test_events_offered_to_a_run_wait_but_are_not_available(db: Database) -> None:
    a_workflow(db, concurrency=4)
    some_events(db, "a", "b")
    with db.transaction() as tx:
        assert len(starts.start(tx, "billing", "send", count=2).runs) == 2
    found = read(db, HOUR)
    assert found["pipeline.backlog.events"]["billing", IN, "send"] == 2
    assert found["pipeline.backlog.age"]["billing", IN, "send"] == 0
    assert found["pipeline.runs"] == {("billing", "pending", "active"): 2}


def test_a_lease_is_held_until_it_lapses(db: Database) -> None:
    a_workflow(db)
    some_events(db, "order")
    a_run(db, Phase.PREPARING)
    assert read(db)["pipeline.leases"] == {("held",): 1, ("lapsed",): 0}
    assert read(db, HOUR)["pipeline.leases"] == {("held",): 0, ("lapsed",): 1}


def test_an_unresolved_mutation_is_as_old_as_its_doubt_and_its_run_is_not_over(db: Database) -> None:
    a_workflow(db)
    scenarios.an_indeterminate_mutation(db)
    found = read(db, HOUR)
    what = ("mail", "send", "indeterminate")
    assert found["pipeline.mutations.open"] == {what: 1}
    assert 3600 <= found["pipeline.mutations.oldest"][what] < 3700
    assert found["pipeline.runs"] == {("billing", "mutating", "paused:reconciliation"): 1}
    assert found["pipeline.attention"]["indeterminate",] == 1


def test_a_breaker_is_open_until_an_operator_closes_it(db: Database) -> None:
    with db.transaction() as tx:
        breakers.open_by_operator(tx, ("mail", "send"), SOMEBODY)
    assert read(db)["pipeline.breakers.open"] == {("mail", "send"): 1}
    with db.transaction() as tx:
        breakers.close_by_operator(tx, ("mail", "send"), SOMEBODY)
    assert read(db)["pipeline.breakers.open"] == {("mail", "send"): 0}


def test_a_workflow_has_one_status_and_maintenance_beside_it(db: Database) -> None:
    for name in ("calm", "paused", "mended"):
        a_workflow(db, name)
    a_workflow(db)
    scenarios.a_blocked_workflow(db)
    with db.transaction() as tx:
        workflows.pause(tx, "paused", SOMEBODY)
        workflows.enter_maintenance(tx, "mended", "wrong code")
    found = read(db)["pipeline.workflows"]
    assert {key for key, value in found.items() if value} == {
        ("calm", "active"),
        ("paused", "paused"),
        ("mended", "active"),
        ("mended", "maintenance"),
        ("billing", "error"),
    }
    assert len(found) == 16


def test_the_age_of_a_sweep_that_does_not_run_grows(db: Database) -> None:
    with db.transaction() as tx:
        assert housekeeping.take_slot(tx, "tick", timedelta(seconds=5))
    assert read(db)["pipeline.sweeps.age"]["tick",] < 60
    assert 3600 <= read(db, HOUR)["pipeline.sweeps.age"]["tick",] < 3700


def test_the_doctors_last_findings_are_exported_by_invariant_with_zeros(db: Database) -> None:
    run = Shop().started(db)
    with run.crash_at(CrashPoint.PREPARE_CLAIMED):
        run.run()
    run.advance(HOUR)
    run.sweeps.run("doctor")
    found = {key: value for key, value in read(db)["pipeline.findings"].items() if value}
    assert found
    assert {severity for _, severity in found} == {"overdue"}
    run.start_worker()
    run.run_until_idle()
    run.advance(HOUR)
    run.sweeps.run("doctor")
    healthy = read(db)["pipeline.findings"]
    assert set(healthy.values()) == {0}
    assert set(found) < set(healthy)


@pytest.mark.broken_on_purpose  # an effect that surfaced late is a finding until a person has seen to it
def test_the_attention_gauge_counts_what_the_command_line_lists(db: Database) -> None:
    for name in ("billing", "mended", "gone"):
        a_workflow(db, name, concurrency=8, on_uncertain=OnUncertain.CONTAIN)
    scenarios.a_late_effect(db, "late")
    scenarios.a_quarantined_event(db, "aside")
    scenarios.a_pending_approval(db, "letter")
    scenarios.an_indeterminate_mutation(db, "question")
    scenarios.a_blocked_workflow(db, "blocked")
    some_events(db, "left", workflow="gone")
    scenarios.without_handlers(db, "gone")
    with db.transaction() as tx:
        workflows.enter_maintenance(tx, "mended", "wrong code")
        breakers.open_by_operator(tx, ("mail", "send"), SOMEBODY)
    listed = Counter(item.kind for item in attention.items(Resolutions(db)))
    gauges_by_kind = {kind: value for (kind,), value in read(db)["pipeline.attention"].items() if value}
    assert gauges_by_kind == dict(listed)
    assert len(gauges_by_kind) == 8


def test_gauges_are_read_in_a_read_only_transaction(db: Database) -> None:
    with db.engine.begin() as connection:
        tx = Transaction(CallerConnection(connection))
        reads_gauges.limit_reads(tx)
        with pytest.raises(DBAPIError, match="read-only transaction"):
            breakers.open_by_operator(tx, ("mail", "send"), SOMEBODY)


def test_the_database_is_read_at_most_once_per_period(db: Database) -> None:
    begun: list[object] = []

    asked = Gauges(db, max_age=600, timeout=60)
    with observed(db, Listener(opened=begun.append)):
        threads = [threading.Thread(target=asked.snapshot) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [each.value for each in asked.snapshot()[UP]] == [1]
    assert len(begun) == 1


@pytest.fixture
def silence() -> Iterator[int]:
    """Open a port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]
    for thread in threading.enumerate():  # their connections are closed now, which they log
        if thread.name == "pipeline-gauges":
            thread.join(30)


def test_a_scrape_does_not_wait_for_a_database_that_is_down_or_silent(silence: int) -> None:
    for port in (1, silence):
        away = Gauges(Database.connect_unpooled(f"postgresql+psycopg2://127.0.0.1:{port}/none"), timeout=0.3)
        found = away.snapshot()
        assert {name: [each.value for each in values] for name, values in found.items()} == {UP: [0]}


def test_a_scrape_waits_for_a_silent_database_once_and_not_for_each_gauge(silence: int) -> None:
    away = Gauges(
        Database.connect_unpooled(f"postgresql+psycopg2://127.0.0.1:{silence}/none"), max_age=600, timeout=0.3
    )
    waits: list[float] = []
    for _ in gauges.GAUGE_NAMES:
        begun = time.monotonic()
        assert list(away.snapshot()) == [UP]
        waits.append(time.monotonic() - begun)
    assert waits[0] >= 0.29
    assert sum(wait >= 0.29 for wait in waits) < len(waits) / 2


def test_while_tables_are_locked_the_last_values_are_reused(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    a_workflow(db)
    asked = Gauges(db, max_age=0.0)
    asked._refresh()
    before = asked._values
    monkeypatch.setattr(reads_gauges, "STATEMENT_TIMEOUT", timedelta(milliseconds=200))
    with db.transaction() as tx:
        tx.execute(text("LOCK TABLE pipeline.subscriptions, pipeline.workflows IN ACCESS EXCLUSIVE MODE"))
        asked._refresh()
    assert [each.value for each in asked._values[UP]] == [1]
    assert asked._values["pipeline.workflows"] == before["pipeline.workflows"]


def test_the_age_of_gauges_grows_while_they_cannot_be_read(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Postgres answers, so it is up; only the age shows that no other alert over gauges can fire."""
    minute = [0.0]
    monkeypatch.setattr(gauges, "time", SimpleNamespace(monotonic=lambda: minute[0] * 60.0))
    asked = Gauges(db, max_age=0.0)
    minute[0] = 5.0
    assert asked.age() == 300, "never read"
    asked._refresh()
    assert asked.age() == 0
    with monkeypatch.context() as hurried, db.transaction() as tx:
        hurried.setattr(reads_gauges, "STATEMENT_TIMEOUT", timedelta(milliseconds=200))
        tx.execute(text("LOCK TABLE pipeline.runs IN ACCESS EXCLUSIVE MODE"))
        minute[0] = 8.0
        asked._refresh()
    assert {name: [each.value for each in values] for name, values in asked._values.items()} == {UP: [1]}
    assert asked.age() == 180
    asked._refresh()
    assert asked.age() == 0


def test_the_age_of_gauges_is_served_also_when_the_database_is_down(silence: int) -> None:
    reader = metrics_collector.pull_reader()
    provider = metrics_collector.meter_provider([reader])
    away = Gauges(Database.connect_unpooled(f"postgresql+psycopg2://127.0.0.1:{silence}/none"), timeout=0.3)
    away.register(provider.get_meter("pipeline"))
    _, found = metrics_collector.points_of(reader.get_metrics_data())
    assert {series.name for series, _ in found} == {UP, AGE}
    provider.shutdown()


def test_gauges_read_before_a_timeout_are_exported(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    a_workflow(db)
    slow = text("SELECT pg_sleep(60), :limit")
    monkeypatch.setattr(reads_gauges, "BACKLOG", slow)
    monkeypatch.setattr(reads_gauges, "STATEMENT_TIMEOUT", timedelta(seconds=5))
    found = Gauges(db, timeout=60).snapshot()
    assert [each.value for each in found[UP]] == [1], "it is slow, and not away"
    assert "pipeline.workflows" in found
    assert "pipeline.backlog.events" not in found
