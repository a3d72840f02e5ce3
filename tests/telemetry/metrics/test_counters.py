"""Counters and histograms: each transition is counted once."""

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from pipeline import LogicError, ReconcilePolicy
from pipeline.admin.given_results import NO_RESULT
from pipeline.admin.resolutions import ResolutionKind, Resolutions
from pipeline.background.messages import DispatchMessage
from pipeline.domain.states import CONSUMER_TASKS, PhaseTask
from pipeline.domain.values import Actor, NewEvent
from pipeline.store.database import Database
from pipeline.tasks import dead_letter
from pipeline.telemetry import metrics
from pipeline.telemetry.metrics import COUNTER, GAUGE, HISTOGRAM, METRICS
from pipeline.testing import Does, scripted
from pipeline.transitions import events
from pipeline.worker.crash_points import CrashPoint
from tests.support.mutations_in_doubt import a_shop
from tests.support.recorded_metrics import Counted, counting
from tests.support.scripted_consumers import Shop, at_once

ADA = Actor(name="ada", reason="looked it up")


@pytest.fixture
def counted() -> Iterator[Counted]:
    with counting() as found:
        yield found


def transitions(counted: Counted, *names: str) -> list[float]:
    return [counted.one("pipeline.transitions", transition=name, workflow="shop") for name in names]


def test_a_run_is_counted_once_at_each_stage(db: Database, counted: Counted) -> None:
    run = Shop().started(db, 3)
    run.run()
    with_inputs = [row for row in run.runs() if row.event_ids]
    every = len(run.runs())
    assert len(with_inputs) == 3
    assert transitions(counted, "run.started", "run.committed", "run.stopped") == [every, every, 0]
    assert transitions(counted, "run.mutating", "mutation.applied") == [3, 3]
    assert transitions(counted, "event.published") == [6], "three orders, and the receipt of each"
    assert counted.by("pipeline.run.latency", "workflow", "handler") == {("shop", "Send"): 3}
    assert counted.by("pipeline.phase.duration", "phase", "result") == {
        ("prepare", "done"): every,
        ("mutate", "done"): 3,
        ("next", "done"): every,
    }
    assert counted.by("pipeline.mutation.duration", "connector", "operation", "outcome") == {
        ("mail", "send", "applied"): 3
    }
    assert counted.one("pipeline.cohort.size", phase="mutate") == 3


def test_the_latency_of_a_run_is_the_age_of_its_oldest_input(db: Database, counted: Counted) -> None:
    run = Shop().started(db, 1)
    with db.transaction() as tx:
        tx.execute(text("UPDATE pipeline.events SET created_at = created_at - interval '10 minutes'"))
    run.run()
    (row,) = [row for row in counted.rows() if row.name == "pipeline.run.latency"]
    assert isinstance(row.value, tuple)
    assert 600 <= row.value[1] < 700
    assert dict(zip((*row.bounds, None), row.value[2], strict=True))[900.0] == 1


def test_several_events_of_one_publish_are_several(db: Database, counted: Counted) -> None:
    Shop().inline(db)
    new = [NewEvent(topic="orders", message_id=str(n), payload={"n": n}) for n in range(5)]
    for _ in range(2):
        with db.transaction() as tx:
            events.publish(tx, "shop", new)
    assert transitions(counted, "event.published") == [5]


def test_transitions_that_are_rolled_back_are_not_counted(db: Database, counted: Counted) -> None:
    Shop().inline(db)
    new = [NewEvent(topic="orders", message_id="1", payload={"n": 1})]

    def publish_and_fail() -> None:
        with db.transaction() as tx:
            events.publish(tx, "shop", new)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        publish_and_fail()
    assert transitions(counted, "event.published") == [0]


def test_a_run_that_stops_is_counted_by_status_and_its_phase_has_failed(db: Database, counted: Counted) -> None:
    def fail(_ctx: Any, _prepared: Any) -> Any:
        raise LogicError("wrong")

    Shop(mutate=fail).started(db).run()
    assert counted.by("pipeline.runs.stopped", "workflow", "handler", "status") == {("shop", "Send", "failed:logic"): 1}
    assert counted.by("pipeline.phase.duration", "phase", "result")["mutate", "failed"] == 1


def test_each_attempt_of_a_call_is_timed_by_its_outcome(db: Database, counted: Counted) -> None:
    shop = Shop(failures=at_once())
    shop.mail.will(Does.FAILS, Does.APPLIES)
    run = shop.started(db)
    run.run_until_idle()
    outcomes = counted.by("pipeline.mutation.duration", "outcome")
    assert outcomes["applied",] == 1
    assert sum(outcomes.values()) == 2
    assert transitions(counted, "mutation.applied") == [1]


def test_reconcile_attempts_are_counted_until_the_mutation_is_resolved(db: Database, counted: Counted) -> None:
    shop = a_shop()
    shop.mail.will(Does.TIMES_OUT_AFTER)
    shop.mail.cannot_tell(2)  # the immediate reconcile attempt, and the first in the background
    run = shop.started(db)
    run.run()
    run.run_until_idle()
    attempts = counted.by("pipeline.reconcile.attempts", "connector", "operation", "verdict")
    assert attempts == {("mail", "send", "retry"): 2, ("mail", "send", "applied"): 1}
    assert counted.by("pipeline.mutation.duration", "outcome") == {("unknown",): 1}
    assert counted.by("pipeline.mutation.time_to_resolution", "verdict") == {("applied",): 1}
    assert transitions(counted, "mutation.doubted", "mutation.applied") == [1, 1]


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [(ResolutionKind.HAPPENED, "applied"), (ResolutionKind.DID_NOT_HAPPEN, "failed"), (ResolutionKind.SKIP, "skipped")],
)
def test_the_time_from_doubt_to_resolution_is_measured_for_every_resolver(
    db: Database, counted: Counted, answer: ResolutionKind, verdict: str
) -> None:
    shop = Shop(on_uncertain="contain")
    shop.mail = scripted("mail", can_reconcile=False, timeout=timedelta(seconds=30))
    shop.mail.will(Does.TIMES_OUT_AFTER if answer is ResolutionKind.HAPPENED else Does.TIMES_OUT_BEFORE)
    run = shop.started(db)
    run.run()
    run.advance(timedelta(hours=2))
    desk = Resolutions(db, run.registry)
    (question,) = desk.unresolved_mutations()
    desk.resolve(question.id, answer, ADA, result=NO_RESULT if answer is ResolutionKind.HAPPENED else None)
    (row,) = [row for row in counted.rows() if row.name == "pipeline.mutation.time_to_resolution"]
    assert dict(row.labels) == {"connector": "mail", "operation": "send", "verdict": verdict}
    assert isinstance(row.value, tuple)
    assert 7200 <= row.value[1] < 7300
    run.run_until_idle()


def test_a_redelivered_message_counts_the_runs_it_cannot_claim(db: Database, counted: Counted) -> None:
    run = Shop().started(db)
    run.run()
    (done,) = [row for row in run.runs() if row.event_ids]
    ignored = counted.by("pipeline.deliveries.ignored", "task")
    for task in CONSUMER_TASKS:
        run.deliver(DispatchMessage(task=task, run_ids=(str(done.id),)))
    now = counted.by("pipeline.deliveries.ignored", "task")
    assert ignored == {}, "runs that found nothing to do are no redeliveries"
    assert set(now) == {("pipeline.prepare",), ("pipeline.mutate",), ("pipeline.next",)}
    assert run.runs()[0].status == "committed"


def test_a_run_that_lost_its_worker_is_a_rescue(db: Database, counted: Counted) -> None:
    run = Shop().started(db)
    with run.crash_at(CrashPoint.PREPARE_RAN):
        run.run()
    run.start_worker()
    run.advance(timedelta(minutes=5))
    run.sweeps.run("rescue")
    assert counted.by("pipeline.rescues", "workflow") == {("shop",): 1}
    assert counted.by("pipeline.runs.stopped", "status") == {("crashed",): 1}
    assert counted.one("pipeline.sweep.duration", sweep="rescue") == 1
    run.run_until_idle()


def everything(db: Database) -> None:
    """Make each metric of runs have a value."""
    policy = ReconcilePolicy(max_attempts=3)
    shop = Shop(concurrency=8, on_uncertain="contain", on_logic_error="quarantine")
    shop.mail = scripted("mail", policy=policy, timeout=timedelta(seconds=30))
    shop.mail.will(Does.TIMES_OUT_AFTER, Does.REFUSES, Does.TIMES_OUT_BEFORE)
    shop.mail.cannot_tell(2)
    run = shop.started(db, 6)
    with run.crash_at(CrashPoint.NEXT_CLAIMED):
        run.run()
    run.start_worker()
    run.run_until_idle()
    for _ in range(8):
        run.advance(timedelta(minutes=20))
        for sweep in ("rescue", "reconcile", "tick"):
            run.sweeps.run(sweep)
        run.run_until_idle()
    (done, *_) = [row for row in run.runs() if row.status == "committed"]
    run.deliver(DispatchMessage(task=PhaseTask.NEXT, run_ids=(str(done.id),)))
    for kind in dead_letter.DeadLetterKind:
        dead_letter.count_dead_letter(kind)


def test_every_metric_of_runs_is_counted_with_the_labels_of_the_table(db: Database, counted: Counted) -> None:
    everything(db)
    rows = counted.rows()
    ours = {each for each in METRICS.values() if each.kind in (COUNTER, HISTOGRAM) and _is_of_runs(each.name)}
    assert {each.name for each in ours} == {row.name for row in rows}
    for row in rows:
        about = METRICS[row.name]
        assert {label for label, _ in row.labels} == set(about.labels)
        assert (row.unit, row.description) == (about.unit, about.description)
        assert row.bounds == about.bounds


def test_no_label_has_an_id_a_key_or_anything_of_a_payload(db: Database, counted: Counted) -> None:
    everything(db)
    values = {value for row in counted.rows() for _, value in row.labels} - {""}  # a transition of no workflow
    assert values
    for value in values:
        assert re.fullmatch(r"([A-Za-z][\w.: ]{0,40})?", value), value
        assert not re.search(r"\d|m1|order", value), value


def test_names_for_prometheus_carry_their_unit_and_kind() -> None:
    names = {name: about.prometheus for name, about in METRICS.items()}
    assert len(set(names.values())) == len(names)
    assert names["pipeline.transitions"] == "pipeline_transitions_total"
    assert names["pipeline.backlog.age"] == "pipeline_backlog_age_seconds"
    assert names["pipeline.database.up"] == "pipeline_database_up"
    for name, about in METRICS.items():
        assert (about.kind == HISTOGRAM) == bool(about.bounds), name
        assert list(about.bounds) == sorted(about.bounds)
        assert names[name].endswith("_total") == (about.kind == COUNTER)
        assert ("_seconds" in names[name]) == (about.unit == "s")
        assert about.kind == GAUGE or about.labels


def test_without_a_provider_nothing_is_counted(db: Database) -> None:
    assert not metrics.is_on()
    with db.transaction() as tx:
        tx.count_on_commit("pipeline.rescues", {"workflow": "shop"})
        assert tx._counts == []


def _is_of_runs(name: str) -> bool:
    return not name.startswith(("pipeline.consumer_engine.", "pipeline.queue."))
