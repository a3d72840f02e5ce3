"""Commands ``pipeline runs`` and ``pipeline events``: list them, or show one in detail."""

from collections.abc import Sequence
from typing import Annotated

import typer

from pipeline.admin import events as event_client
from pipeline.admin import pages
from pipeline.admin import runs as client
from pipeline.admin.advice import Advice
from pipeline.admin.events import EventDetail, EventFilter, EventSummary
from pipeline.admin.runs import EventLine, RunDetail, RunFilter, RunSummary, SessionLine
from pipeline.admin.timeline import TimelineEntry
from pipeline.cli import common, tables
from pipeline.domain.errors import quantity
from pipeline.domain.states import DeliveryStatus, Phase, RunStatus
from pipeline.store.database import Database


def runs(  # noqa: PLR0913 - options of a command
    context: typer.Context,
    run: Annotated[list[str] | None, typer.Argument(help="Show this run, by its id or its first digits.")] = None,
    *,
    workflow: common.WorkflowOption = None,
    handler: Annotated[str | None, typer.Option(help="Only of this handler.")] = None,
    status: Annotated[RunStatus | None, typer.Option(help="Only of this status.")] = None,
    phase: Annotated[Phase | None, typer.Option(help="Only in this phase.")] = None,
    waiting: Annotated[
        bool,
        typer.Option("--waiting", help="Only runs that stopped and wait: for a retry, reconcile or an operator."),
    ] = False,
    limit: common.Limit = 50,
    recent: common.Recent = pages.WINDOW,
    as_json: common.AsJson = False,
) -> None:
    """List runs, newest first. With an id: its timeline, inputs, outputs, mutation, and what to do next."""
    database: Database = context.obj
    wanted = common.single_argument(run)
    if wanted is not None:
        detail = client.detail(database, wanted)
        common.print_json(detail) if as_json else _print_run(detail)
        return
    only = RunFilter(workflow=workflow, handler=handler, status=status, phase=phase, is_waiting=waiting)
    found = pages.run_page(database, only, limit=limit, window=recent)
    if as_json:
        common.print_json(found.items)
        return
    is_partial = found.is_partial(limit)
    _print_runs(found.items, database, is_more=found.next is not None and not is_partial)
    _print_partial_note("runs", recent, is_partial=is_partial)


def events(  # noqa: PLR0913 - options of a command
    context: typer.Context,
    event: Annotated[list[str] | None, typer.Argument(help="Show this event, by its id.")] = None,
    *,
    workflow: common.WorkflowOption = None,
    topic: Annotated[str | None, typer.Option(help="Only of this topic.")] = None,
    status: Annotated[DeliveryStatus | None, typer.Option(help="Only with a delivery of this status.")] = None,
    key: Annotated[str | None, typer.Option(help="Only of this key.")] = None,
    message_id: Annotated[str | None, typer.Option(help="Only of this message id.")] = None,
    payload: Annotated[
        bool, typer.Option("--payload", help="Show the payload too; it may hold personal data.")
    ] = False,
    limit: common.Limit = 50,
    recent: common.Recent = pages.WINDOW,
    as_json: common.AsJson = False,
) -> None:
    """List events, newest first. With an id: its deliveries, and what each caused."""
    database: Database = context.obj
    wanted = common.single_argument(event)
    if wanted is not None:
        detail = event_client.detail(database, wanted, with_payload=payload)
        common.print_json(detail) if as_json else _print_event(detail, payload=payload)
        return
    only = EventFilter(workflow=workflow, topic=topic, status=status, key=key, message_id=message_id)
    found = pages.event_page(database, only, limit=limit, window=recent)
    if as_json:
        common.print_json(found.items)
        return
    is_partial = found.is_partial(limit)
    _print_events(found.items, database, is_more=found.next is not None and not is_partial)
    _print_partial_note("events", recent, is_partial=is_partial)


def print_timeline(moments: tuple[TimelineEntry, ...]) -> None:
    """Print a timeline, oldest entry first; planned entries are marked."""
    rows = [
        (
            f"{each.at:%Y-%m-%d %H:%M:%S}.{each.at.microsecond // 1000:03}",
            ("(planned) " if each.is_planned else "") + each.description,
            each.by or "",
        )
        for each in moments
    ]
    tables.print_table("\ntimeline", ("at", "description", "by"), rows, [each.note for each in moments], note="note")


def print_advice(advice: Advice) -> None:
    """Print what to do next, with each command on its own line."""
    common.print_lines("", "\nnext", f"  {advice.text}", *(f"  {command}" for command in advice.commands))


def _print_runs(found: Sequence[RunSummary], database: Database, *, is_more: bool) -> None:
    with database.transaction() as tx:
        now = tx.clock()
    tables.print_table(
        tables.count_text(quantity(len(found), "run"), "newest", is_more=is_more) if found else "No such run.",
        ("id", "status", "age", "handler"),
        [(each.id, each.status, common.age(each.created_at, now), f"{each.workflow}/{each.handler}") for each in found],
        [_run_note(each) for each in found],
        note="details",
    )


def _print_events(found: Sequence[EventSummary], database: Database, *, is_more: bool) -> None:
    with database.transaction() as tx:
        now = tx.clock()
    tables.print_table(
        tables.count_text(quantity(len(found), "event"), "newest", is_more=is_more) if found else "No such event.",
        ("id", "message id", "topic", "age"),
        [
            (each.id, each.message_id, f"{each.workflow}/{each.topic}", common.age(each.created_at, now))
            for each in found
        ],
        [", ".join(each.deliveries) or "no consumer" for each in found],
        note="deliveries",
    )


def _run_note(run: RunSummary) -> str:
    """Describe a run by what became of it, its phase unless it is committed, and its error or title."""
    text = run.error or run.title or ""
    if run.status == RunStatus.COMMITTED:
        return text
    place = ", ".join(part for part in (client.sequel_text(run), run.phase) if part)
    return f"{place}: {text}" if text else place


def _print_run(found: RunDetail) -> None:
    run, mutation = found.run, found.mutation
    tables.print_fields(
        ("run", run.id),
        ("of", f"{run.workflow}/{run.handler}"),
        ("title", run.title),
        ("phase", run.phase),
        ("status", run.status),
        ("attempt", run.attempt),
        ("error", run.error),
        ("worker", found.worker),
        ("retry of", found.retry_of),
        ("sequel", client.sequel_text(run)),
        ("cost", run.cost),
        ("session", _session_text(found.session)),
        ("mutation", mutation.id if mutation else None),
        ("  operation", mutation.operation if mutation else None),
        ("  status", mutation.status if mutation else None),
        ("  key", mutation.idempotency_key if mutation else None),
        ("  error", mutation.error if mutation else None),
    )
    _print_event_lines("inputs", found.inputs)
    if missing := run.input_count - len(found.inputs):
        common.print_lines(f"\n{quantity(missing, 'input')} no longer kept, or not shown.")
    _print_event_lines("outputs", found.outputs)
    print_timeline(found.timeline)
    print_advice(found.advice)


def _session_text(session: SessionLine | None) -> str:
    """Describe a session that has a cost; without one there is nothing to tell."""
    if session is None or session.cost is None:
        return ""
    return f"{session.id}, {session.result or 'open'}, cost {session.cost}"


def _print_event(found: EventDetail, *, payload: bool) -> None:
    event = found.event
    tables.print_fields(
        ("event", event.id),
        ("topic", f"{event.workflow}/{event.topic}"),
        ("message id", event.message_id),
        ("key", event.key),
        ("title", event.title),
        ("published", common.format_time(event.created_at)),
        ("by run", event.created_by_run_id),
        ("caused by", ", ".join(f"event {id_}" for id_ in found.caused_by)),
    )
    for delivery in found.deliveries:
        gone = " (no longer in the code)" if delivery.is_retired else ""
        error = f": {delivery.error}" if delivery.error else ""
        later = f", not before {common.format_time(delivery.available_at)}" if delivery.available_at else ""
        since = f" since {common.format_time(delivery.failing_since)}" if delivery.failing_since else ""
        later += f", {quantity(delivery.failures, 'failure')}{since}" if delivery.failures else ""
        tables.print_table(
            f"\n{delivery.handler}{gone}: {delivery.status}{later}{error}",
            ("run", "status", "phase"),
            [(run.id, run.status, run.phase) for run in delivery.runs],
            [
                ": ".join(part for part in (client.sequel_text(run), run.error or run.title) if part)
                for run in delivery.runs
            ],
            note="details",
        )
        _print_event_lines("  caused", delivery.outputs)
    if not found.deliveries:
        common.print_lines("\nNo consumer subscribes to its topic.")
    if found.acts:
        print_timeline(found.acts)
    if payload:
        common.print_lines("\npayload")
        common.print_json(found.payload)


def _print_event_lines(title: str, events: tuple[EventLine, ...]) -> None:
    if events:
        rows = [(each.id, each.message_id, each.topic) for each in events]
        notes = [", ".join(each.deliveries) or "no consumer" for each in events]
        tables.print_table(f"\n{title}", ("event", "message id", "topic"), rows, notes, note="deliveries")


def _print_partial_note(what: str, recent: int, *, is_partial: bool) -> None:
    if is_partial:
        common.print_lines(f"Only the newest {recent} {what} were searched; --recent searches more.")
