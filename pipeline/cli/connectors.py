"""Commands ``pipeline connectors``, ``plan``, ``breakers`` and ``breaker``: operations, and what would be sent."""

import os
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

import typer
from sqlalchemy.exc import DBAPIError

from pipeline.admin import lookup
from pipeline.admin.plan import PlannedRun, Planner, request_counts
from pipeline.background.scheduler import dispatch_messages
from pipeline.cli import common, tables
from pipeline.config import Settings
from pipeline.connectors.sdk import Grade, Operation
from pipeline.domain.errors import InvalidInputError, PipelineError, SchemaVersionError, quantity
from pipeline.store.database import Database
from pipeline.store.reads import ledger, listings
from pipeline.store.rows import DispatchableRunRow, OpenBreakerRow
from pipeline.transitions import breakers as verbs
from pipeline.workflows.registry import Registry

_RUNS_PER_MESSAGE = 100  #: runs dispatched by one message
_GRADES: dict[object, str] = {
    Grade.A: "can reconcile, and a request that arrives twice counts once.",
    Grade.B: "can reconcile.",
    Grade.C: "an operator must resolve an unknown outcome; a request that arrives twice counts once.",
    Grade.D: "an operator must resolve an unknown outcome.",
}


class BreakerAction(StrEnum):
    """What an operator does to a circuit breaker."""

    OPEN = "open"
    CLOSE = "close"


def connectors(context: typer.Context, recent: common.Recent = 100_000, as_json: common.AsJson = False) -> None:
    """List operations with the grade of each; without the workflows' code, those of the ledger."""
    known = _registry_or_empty()
    rows: list[tuple[object, ...]] = [
        (connector.name, name, _grade(operation), operation.timeout, operation.settle if operation.is_mutation else "")
        for connector in known.connectors.values()
        for name, operation in sorted(type(connector).operations().items())
    ]
    others = [name for name in _operations_in_ledger(context.obj, known, recent) if known.operation(*name) is None]
    _warn_unknown_operations(others, known)
    columns = ("connector", "operation", "grade", "timeout", "settle")
    if as_json:
        rows += [(*name, None, None, None) for name in others]
        common.print_json([dict(zip(columns, row, strict=True)) for row in rows])
        return
    rows += [(*name, "not known here", "", "") for name in others]
    tables.print_table(quantity(len(rows), "operation"), columns, rows)
    seen = {row[2] for row in rows}
    common.print_lines(*(f"{grade}: {meaning}" for grade, meaning in _GRADES.items() if grade in seen))
    if seen & _GRADES.keys():
        common.print_lines(
            "A and C: a repeat of the same request for the same inputs has the same key, and happens once while the "
            "key is kept. B and D: a repeat of what had happened happens twice."
        )


def plan(
    context: typer.Context,
    workflow: Annotated[str, typer.Argument(help="Which workflow.")],
    limit: Annotated[int, typer.Option(min=1, help="Runs of each consumer at most.")] = 100,
    as_json: common.AsJson = False,
) -> None:
    """Show what a workflow would send now, and what its code renames. Nothing is reserved, sent or moved."""
    settings, known = Settings.load(os.environ), common.load_registry()
    if workflow not in known.workflows:
        _raise_code_missing(context.obj, workflow)
    planner = Planner(context.obj, known, step_limit=settings.step_time_limit)
    renames, planned = planner.renames(workflow), planner.plan(workflow, limit=limit)
    if as_json:
        listed = {"requests": [asdict(item) for item in planned], "counts": request_counts(planned)}
        common.print_json({"renames": [asdict(item) for item in renames], **listed})
        return
    for item in renames:
        typer.echo(
            f"The next worker renames the {item.kind} {item.former!r} to {item.name!r}; "
            f"{quantity(item.waiting, 'event')} {'waits' if item.waiting == 1 else 'wait'} there."
        )
    tables.print_table(
        quantity(len(planned), "run"),
        ("consumer", "events", "request", "details"),
        [
            (
                item.handler,
                ", ".join(item.message_ids),
                item.request,
                item.headline,
            )
            for item in planned
        ],
        [_note(item) for item in planned],
        note="note",
    )
    for request, count in request_counts(planned).items():
        typer.echo(f"{request}: {count}")


def breakers(context: typer.Context, as_json: common.AsJson = False) -> None:
    """List operations whose circuit breaker is open: they start no new mutation."""
    database: Database = context.obj
    with database.transaction() as tx:
        rows, now = ledger.open_breakers(tx), tx.clock()
    if as_json:
        columns = ("connector", "operation", "reason", "opened_by", "opened_at", "probe_at")
        common.print_json([{column: getattr(row, column) or "" for column in columns} for row in rows])
        return
    tables.print_table(
        f"{len(rows)} open",
        ("connector", "operation", "opened by", "age", "probe"),
        [
            (
                row.connector,
                row.operation,
                row.opened_by or "automatic",
                common.age(row.opened_at, now),
                _probe_text(row, now),
            )
            for row in rows
        ],
        [row.reason for row in rows],
        note="reason",
    )


def breaker(
    context: typer.Context,
    action: Annotated[BreakerAction, typer.Argument(help="open: start no mutation. close: start them again.")],
    operation: Annotated[str, typer.Argument(help="connector.operation")],
    reason: common.OptionalReason = "",
    by: common.By = "",
    as_json: common.AsJson = False,
) -> None:
    """Open the circuit breaker of an operation, or close it."""
    connector, name = _parse_operation(operation)
    wake_ups, who, changed = common.WakeUps(), common.actor(by, reason), True
    waiting: Sequence[DispatchableRunRow] = ()
    with context.obj.transaction() as tx:
        if action is BreakerAction.OPEN:
            verbs.open_by_operator(tx, (connector, name), who)
        elif changed := verbs.close_by_operator(tx, (connector, name), who):
            waiting = verbs.redispatch_waiting(tx)
    for first in range(0, len(waiting), _RUNS_PER_MESSAGE):
        wake_ups.dispatch(dispatch_messages(waiting[first : first + _RUNS_PER_MESSAGE]))
    if as_json:
        common.print_json(
            {"operation": operation, "act": action, "is_changed": changed, "is_notified": wake_ups.is_notified}
        )
        return
    sent = f"{quantity(len(waiting), 'run')} that may have waited for it dispatched again." if waiting else ""
    common.print_lines(f"{operation}: {action}" if changed else f"{operation} was not open", sent, wake_ups.text())


def _parse_operation(operation: str) -> tuple[str, str]:
    """Split connector and operation; refuse an operation that the loaded code does not have."""
    connector, _, name = operation.partition(".")
    if not connector or not name:
        raise InvalidInputError(f"{operation!r} names no operation; expected connector.operation, such as mail.send.")
    known = common.load_registry()
    if known.connectors and known.operation(connector, name) is None:
        operations = [f"{each.name}.{op}" for each in known.connectors.values() for op in type(each).operations()]
        raise InvalidInputError(f"The operation {operation!r} is unknown; known are: {', '.join(sorted(operations))}.")
    if not known.connectors:
        typer.echo(
            f"Without PIPELINE_WORKFLOWS it is unknown whether {operation} exists: check its spelling.", err=True
        )
    return connector, name


def _registry_or_empty() -> Registry:
    """Load the registry; empty, and the reason printed, if it cannot be imported."""
    try:
        return common.load_registry()
    except PipelineError as error:
        typer.echo(str(error), err=True)
        return Registry()


def _operations_in_ledger(database: Database, known: Registry, recent: int) -> list[tuple[str, str]]:
    """List the operations of ledger and breakers. With the code here, a missing database is only a warning."""
    try:
        with database.transaction() as tx:
            found, is_partial = ledger.operation_names(tx, recent=recent), listings.has_older(tx, "mutations", recent)
    except (DBAPIError, SchemaVersionError) as error:
        if not known.connectors:
            raise
        message = str(error.orig if isinstance(error, DBAPIError) else error).strip()
        typer.echo(f"The ledger cannot be read; only operations of the loaded code are listed. {message}", err=True)
        return []
    if is_partial:
        rows = quantity(recent, "row")
        typer.echo(f"Only the newest {rows} of the ledger were searched; --recent searches more.", err=True)
    return found


def _warn_unknown_operations(others: Sequence[tuple[str, str]], known: Registry) -> None:
    """Warn of missing code: the list may be incomplete for an operator who opens all breakers."""
    is_here = bool(known.connectors or known.workflows)
    if not is_here and not others:
        raise InvalidInputError(
            "No workflow's code is here, and the ledger has no operation. Run this where PIPELINE_WORKFLOWS is set."
        )
    if not is_here:
        typer.echo(
            "No workflow's code is here (PIPELINE_WORKFLOWS): these are the operations of the ledger and of breakers. "
            "Operations that were never used are missing.",
            err=True,
        )
    elif others:
        names = ", ".join(".".join(name) for name in others)
        typer.echo(f"The code here does not have {names}; the ledger or a breaker does.", err=True)


def _raise_code_missing(database: Database, workflow: str) -> None:
    """Refuse a workflow whose code is not here; an unknown name is refused as unknown."""
    with database.transaction() as tx:
        lookup.require_workflow(tx, workflow)
    raise InvalidInputError(
        f"The code of workflow {workflow!r} is not here, and a plan runs it. Expected its module in "
        "PIPELINE_WORKFLOWS, as for a worker."
    )


def _probe_text(breaker: OpenBreakerRow, now: datetime) -> str:
    """Format when the next probe mutation is let through."""
    if breaker.probe_at is None:
        return "none"
    return "due" if breaker.is_due else f"in {common.age(now, breaker.probe_at)}"


def _note(item: PlannedRun) -> str:
    waits = "its run exists and has not sent it yet" if item.is_waiting else ""
    asks = "needs approval" if item.needs_approval else ""
    return "; ".join(part for part in (item.problem or asks, waits) if part)


def _grade(operation: Operation[Any]) -> str:
    return operation.grade if operation.is_mutation else "read"
