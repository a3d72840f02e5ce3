"""The trace of a run: its spans, parents and links."""

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import StatusCode

from pipeline import PrepareResult, TransientError
from pipeline.admin.given_results import NO_RESULT
from pipeline.admin.resolutions import ResolutionKind, Resolutions
from pipeline.client.publishing import publish
from pipeline.domain.errors import PipelineError
from pipeline.domain.policies import Backoff, MutationRetryPolicy
from pipeline.domain.states import RunStatus
from pipeline.store.database import Database
from pipeline.telemetry import spans, spans_export
from pipeline.testing import Does, scripted
from pipeline.testing.inline import TESTER
from pipeline.worker.crash_points import CrashPoint
from tests.support.mutations_in_doubt import a_shop, the_mutation
from tests.support.recorded_spans import Seen, about, linked, span_id, trace_of
from tests.support.scripted_consumers import Shop, at_once

OUTSIDE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OUTER_TRACE, OUTER_SPAN = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
LOWER_HALF = 2**64 - 1


def publish_from(db: Database, shop: Shop, n: int, traceparent: str | None = OUTSIDE) -> None:
    with db.transaction() as tx:
        event = {"topic": "orders", "message_id": f"order {n}", "payload": {"n": n}, "traceparent": traceparent}
        publish(tx, "shop", [event])


def test_a_run_of_an_untraced_event_is_one_trace_named_by_its_id(db: Database, seen: Seen) -> None:
    run = Shop().started(db)
    run.run()
    (row,) = [row for row in run.runs() if row.event_ids]
    trace = [span for span in seen.all() if trace_of(span) == row.id.int]
    roots = {span_id(span): span.name for span in trace}
    assert sorted((span.name, span.parent and roots[span.parent.span_id]) for span in trace) == [
        ("mail.send", "mutate"),
        ("mutate", "run"),
        ("next", "run"),
        ("prepare", "run"),
        ("run", None),
    ]
    (root,) = [span for span in trace if span.name == "run"]
    assert span_id(root) == row.id.int & LOWER_HALF
    assert about(root, "run.id", "handler", "run.status", "run.attempt", "mutation.outcome") == (
        str(row.id),
        "shop.Send",
        "committed",
        None,
        "success",
    )


def test_a_phase_and_a_call_have_their_attributes(db: Database, seen: Seen) -> None:
    run = Shop().started(db)
    run.run()
    call = seen.one("mail.send")
    assert about(call, "mutation.id", "call.attempt", "call.verdict") == (str(the_mutation(run).id), 1, "applied")
    phase = seen.one("mutate")
    assert about(phase, "handler") == ("shop.Send",)
    assert about(phase, "handler.seconds")[0] >= 0
    assert phase.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("concurrency", [1, 8], ids=["a run that sees everything", "runs with slices"])
def test_a_run_of_an_event_from_outside_is_in_the_trace_of_its_publisher(
    db: Database, seen: Seen, concurrency: int
) -> None:
    shop = Shop(concurrency=concurrency)
    run = shop.inline(db)
    publish_from(db, shop, 1)
    run.run()
    for name in ("run", "prepare", "mutate", "mail.send", "next"):
        assert OUTER_TRACE in {trace_of(span) for span in seen.named(name)}
    (root,) = [span for span in seen.named("run") if trace_of(span) == OUTER_TRACE]
    assert root.parent is not None
    assert root.parent.span_id == OUTER_SPAN


def test_an_event_published_inside_a_span_belongs_to_its_trace(db: Database, seen: Seen) -> None:
    shop = Shop()
    run = shop.inline(db)
    with seen.tracer.start_as_current_span("checkout") as checkout:
        publish_from(db, shop, 1, traceparent=None)
    run.run()
    (event,) = run.events(shop.orders)
    assert event.traceparent == spans.format_traceparent(checkout.get_span_context())
    assert ("run", "checkout") in seen.shape()


def test_a_run_whose_event_a_run_published_begins_a_trace_and_is_linked_to_its_publisher(
    db: Database, seen: Seen
) -> None:
    shop = Shop()
    follow = scripted("crm", mutations=("note",))
    shop.workflow.effect(shop.receipts)(_noted)
    run = shop.inline(db, connectors=[follow])
    publish_from(db, shop, 1)
    run.run()
    (publisher,) = [span for span in seen.named("next") if trace_of(span) == OUTER_TRACE]
    (downstream,) = [row for row in run.runs() if row.handler == "_noted" and row.event_ids]
    prepare, root = (
        next(span for span in seen.named(name) if trace_of(span) == downstream.id.int) for name in ("prepare", "run")
    )
    assert root.parent is None
    assert linked(prepare) == {(OUTER_TRACE, span_id(publisher))}


def _noted(ctx: Any, event: Any) -> Any:
    return ctx.crm.note(n=event.payload["n"])


def test_a_run_of_several_events_is_linked_to_the_publishers_of_the_others(db: Database, seen: Seen) -> None:
    shop = Shop(prepare=lambda ctx, _: _all(ctx, shop), mutate=lambda ctx, prepared: None)
    run = shop.inline(db)
    others = [f"00-{n:032x}-{n:016x}-01" for n in (7, 8)]
    for n, traceparent in enumerate([OUTSIDE, *others, OUTSIDE]):
        publish_from(db, shop, n, traceparent)
    run.run()
    (prepare,) = [span for span in seen.named("prepare") if trace_of(span) == OUTER_TRACE]
    assert linked(prepare) == {(7, 7), (8, 8)}


def _all(ctx: Any, shop: Shop) -> Any:
    pending = ctx.peek(shop.orders)
    return PrepareResult(reserve=pending, data={"n": 0}) if pending else PrepareResult.nothing()


def test_runs_of_one_cohort_stay_in_their_own_traces_and_the_task_is_linked(db: Database, seen: Seen) -> None:
    shop = Shop(concurrency=8)
    run = shop.started(db, orders=3)
    run.scheduler.schedule(["shop"])
    with seen.tracer.start_as_current_span("task") as task:
        run.run()
    roots = [span for span in seen.named("run") if about(span, "mutation.outcome") == ("success",)]
    assert len({trace_of(span) for span in roots}) == 3
    own = {(trace_of(span), span_id(span)) for span in roots}
    assert own <= linked(seen.one("task"))
    assert about(seen.one("task"), "cohort.size") == (3,)
    here = task.get_span_context()
    for phase in ("prepare", "mutate", "next"):
        of_runs = [span for span in seen.named(phase) if trace_of(span) in {trace for trace, _ in own}]
        assert len(of_runs) == 3
        assert all((here.trace_id, here.span_id) in linked(span) for span in of_runs)


def test_a_retry_is_in_the_trace_of_the_run_it_retries(db: Database, seen: Seen) -> None:
    failures = iter([TransientError("not yet")])

    def flaky(ctx: Any, prepared: Any, result: Any) -> None:
        for error in failures:
            raise error

    shop = Shop(next=flaky, failures=at_once())
    run = shop.inline(db)
    publish_from(db, shop, 1)
    run.run()
    run.run_until_idle()
    first, second = [span for span in seen.named("run") if trace_of(span) == OUTER_TRACE]
    assert second.parent is not None
    assert second.parent.span_id == span_id(first)
    assert about(first, "run.status") == (str(RunStatus.PAUSED_TRANSIENT),)
    assert about(second, "run.status", "run.attempt", "run.retry_of") == ("committed", 2, about(first, "run.id")[0])
    assert first.status.status_code is StatusCode.ERROR
    assert about(first, "failure.kind") == ("transient",)
    assert (first.attributes or {})["exception.type"] == "TransientError"


def test_a_retry_of_a_run_that_began_its_trace_stays_in_it_too(db: Database, seen: Seen) -> None:
    failures = iter([TransientError("not yet")])

    def flaky(ctx: Any, prepared: Any, result: Any) -> None:
        for error in failures:
            raise error

    run = Shop(next=flaky, failures=at_once()).started(db)
    run.run()
    run.run_until_idle()
    rows = [row for row in run.runs() if row.event_ids]
    assert [row.attempt for row in rows] == [1, 2]
    roots = [span for span in seen.named("run") if about(span, "run.id")[0] in {str(row.id) for row in rows}]
    assert {trace_of(span) for span in roots} == {rows[0].id.int}


def test_background_reconcile_attempts_are_in_the_trace_of_their_run(db: Database, seen: Seen) -> None:
    shop = a_shop()
    shop.mail.will(Does.TIMES_OUT_AFTER)
    shop.mail.cannot_tell(2)
    run = shop.inline(db)
    publish_from(db, shop, 1)
    run.run()
    run.run_until_idle()
    assert about(seen.one("mail.send"), "call.verdict") == ("reconcile",)
    assert about(seen.one("mail.send.reconcile"), "call.verdict") == ("doubt",)
    attempts = seen.named("reconcile")
    assert [about(attempt, "call.verdict", "reconcile.attempt") for attempt in attempts] == [
        ("retry", 1),
        ("applied", 2),
    ]
    stopped, carried = [span for span in seen.named("run") if trace_of(span) == OUTER_TRACE]
    assert {trace_of(attempt) for attempt in attempts} == {OUTER_TRACE}
    assert {attempt.parent and attempt.parent.span_id for attempt in attempts} == {span_id(stopped)}
    assert about(carried, "run.status", "mutation.outcome") == ("committed", "success")


def test_a_rescue_is_in_the_trace_of_the_run_and_ends_its_root(db: Database, seen: Seen) -> None:
    shop = Shop()
    run = shop.inline(db)
    publish_from(db, shop, 1)
    with run.crash_at(CrashPoint.NEXT_RAN):
        run.run()
    run.run_until_idle()
    rescue = seen.one("rescue")
    crashed = next(span for span in seen.named("run") if about(span, "run.status") == ("crashed",))
    assert trace_of(rescue) == trace_of(crashed) == OUTER_TRACE
    assert rescue.parent is not None
    assert rescue.parent.span_id == span_id(crashed)
    assert about(rescue, "mutation.side", "run.phase") == ("after", "emitting")
    assert [about(span, "run.status") for span in seen.named("run")[:2]] == [("crashed",), ("committed",)]


def test_a_run_whose_worker_died_before_its_mutation_leaves_its_event_in_its_trace(db: Database, seen: Seen) -> None:
    shop = Shop()
    run = shop.inline(db)
    publish_from(db, shop, 1)
    with run.crash_at(CrashPoint.PREPARE_RAN):
        run.run()
    run.run_until_idle()
    roots = [about(span, "run.status") for span in seen.named("run") if trace_of(span) == OUTER_TRACE]
    assert roots == [("crashed",), ("committed",)]


def test_reads_of_a_handler_are_under_its_phase(db: Database, seen: Seen) -> None:
    def prepare(ctx: Any, _: Any) -> Any:
        ctx.mail.find(n=5)
        return _all(ctx, shop)

    shop = Shop(prepare=prepare, mutate=lambda ctx, prepared: None)
    shop.started(db).run()
    assert ("mail.find.read", "prepare") in seen.shape()


def test_a_failed_phase_shows_the_kind_of_its_failure_and_not_its_message(db: Database, seen: Seen) -> None:
    def prepare(ctx: Any, _: Any) -> Any:
        raise TransientError("card 4242 4242")

    shop = Shop(prepare=prepare, failures=at_once(max_failures=1))
    shop.started(db).run()
    phase = seen.named("prepare")[0]
    assert phase.status.status_code is StatusCode.ERROR
    assert about(phase, "failure.kind") == ("transient",)
    assert "4242" not in seen.text()


def test_each_attempt_of_a_mutation_is_a_call_span(db: Database, seen: Seen) -> None:
    shop = a_shop(retry=MutationRetryPolicy(max_attempts=2, backoff=Backoff(base=timedelta(0), cap=timedelta(0))))
    shop.mail.will(Does.FAILS)
    shop.started(db).run()
    calls = [about(call, "call.attempt", "call.verdict") for call in seen.named("mail.send")]
    assert calls == [(1, "retry"), (2, "applied")]


def test_no_payload_parameter_result_or_plan_is_on_any_span(db: Database, seen: Seen) -> None:
    shop = Shop(mutate=lambda ctx, prepared: ctx.mail.send(n=prepared.data["n"], card="hush-param"))
    run = shop.inline(db)
    run.publish(shop.orders, {"n": 1, "card": "hush-payload"})
    run.run()
    assert len(shop.mail.effects) == 1
    assert "hush" not in seen.text()


def test_a_trace_that_its_caller_did_not_sample_is_not_recorded(db: Database, seen: Seen) -> None:
    shop = Shop()
    run = shop.inline(db)
    publish_from(db, shop, 1, OUTSIDE.removesuffix("01") + "00")
    run.run()
    assert OUTER_TRACE not in seen.traces()


@pytest.mark.parametrize("junk", ["not one", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", OUTSIDE.upper()])
def test_a_malformed_traceparent_is_stored_and_ignored(db: Database, seen: Seen, junk: str) -> None:
    shop = Shop()
    run = shop.inline(db)
    publish_from(db, shop, 1, junk)
    run.run()
    assert OUTER_TRACE not in seen.traces()
    assert any(about(span, "mutation.outcome") == ("success",) for span in seen.named("run"))


def test_log_lines_about_a_run_name_its_trace(db: Database, seen: Seen, caplog: pytest.LogCaptureFixture) -> None:
    shop = Shop()
    run = shop.inline(db)
    publish_from(db, shop, 1)
    with caplog.at_level(logging.INFO, logger="pipeline"):
        run.run()
    about_run = {vars(row)["transition"]: vars(row).get("trace_id") for row in caplog.records if hasattr(row, "run_id")}
    for name in ("run.started", "run.claimed", "run.prepared", "run.mutating", "mutation.applied", "run.committed"):
        assert about_run[name] is not None, name
    first = next(row for row in caplog.records if vars(row).get("transition") == "run.prepared")
    assert vars(first)["trace_id"] == f"{OUTER_TRACE:032x}"


def test_an_operators_resolution_is_in_the_trace_of_the_run(db: Database, seen: Seen) -> None:
    shop = a_shop()
    shop.mail.will(Does.TIMES_OUT_AFTER)
    shop.mail.cannot_tell(100)
    run = shop.inline(db)
    publish_from(db, shop, 1)
    run.run()
    run.run_until_idle()
    desk = Resolutions(db, run.registry)
    desk.resolve(the_mutation(run).id, ResolutionKind.HAPPENED, TESTER, result=NO_RESULT)
    with pytest.raises(PipelineError):
        desk.resolve(the_mutation(run).id, ResolutionKind.HAPPENED, TESTER, result=NO_RESULT)
    run.run()
    taken, refused = seen.named("resolve")
    stopped, carried = [span for span in seen.named("run") if trace_of(span) == OUTER_TRACE]
    for answer in (taken, refused):
        assert answer.parent is not None
        assert (trace_of(answer), answer.parent.span_id) == (OUTER_TRACE, span_id(stopped))
    assert about(taken, "actor", "resolution") == ("tester", "happened")
    assert (taken.status.status_code, refused.status.status_code) == (StatusCode.UNSET, StatusCode.ERROR)
    assert about(carried, "run.status") == ("committed",)


def test_every_span_and_attribute_is_documented(db: Database, seen: Seen) -> None:
    shop = a_shop()
    shop.mail.will(Does.TIMES_OUT_AFTER)
    run = shop.started(db)
    with run.crash_at(CrashPoint.NEXT_RAN):
        run.run()
    run.run_until_idle()
    for span in seen.all():
        name = span.name.replace("mail.send", "{connector}.{operation}")
        _, _, attributes = spans.SPANS[name]
        assert set(span.attributes or {}) <= set(attributes), name


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
def test_a_ratio_of_runs_is_sampled_although_their_ids_are_not_evenly_spread(ratio: float) -> None:
    found = Seen()
    found.provider.sampler = spans_export.rotated_id_sampler(ParentBasedTraceIdRatio(ratio))
    spans.use_provider(found.provider)
    try:
        ids = [uuid4().int for _ in range(2000)]  # as in a run's id, the first two bits of the lower half are fixed
        sampled = sum(bool(spans.trace_flags(number, "run").sampled) for number in ids) / len(ids)
    finally:
        spans.use_provider(None)
    assert abs(sampled - ratio) < 0.06


class Broken(SpanProcessor):
    """A span processor of the user that always fails."""

    def on_start(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("no room")

    def on_end(self, _: Any) -> None:
        raise RuntimeError("no room")


def theirs(processor: Any) -> TracerProvider:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return provider


@pytest.mark.parametrize("made", [spans_export.tracer_provider, theirs], ids=["ours", "theirs"])
def test_a_failing_span_processor_does_not_fail_a_run(db: Database, made: Callable[[Any], Any]) -> None:
    run = Shop().started(db, orders=2)
    spans.use_provider(made(Broken()))
    try:
        run.run()
    finally:
        spans.use_provider(None)
    assert [(row.phase, row.status) for row in run.runs()] == [("committed", "committed")] * len(run.runs())
    assert [row.status for row in run.ledger()] == ["applied"] * 2
