"""Commands ``pipeline connectors``, ``plan``, ``breakers`` and ``breaker``: operations, and what would be sent."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from enum import StrEnum
from typing import Annotated
from uuid import UUID

import typer
from sqlalchemy.exc import DBAPIError

from pipeline.admin import lookup
from pipeline.admin.operations import (
    OpenBreaker,
    RegisteredOperation,
    close_breaker,
    grade_of,
    open_breaker,
    open_breakers,
    operation_name,
    registered_operations,
)
from pipeline.admin.plan import PlannedRun, Planner, request_counts
from pipeline.cli import common, tables
from pipeline.config import Settings
from pipeline.domain.errors import InvalidInputError, PipelineError, SchemaVersionError, quantity
from pipeline.domain.operations import Grade, OperationSpec
from pipeline.store.database import Database
from pipeline.store.reads import ledger, listings
from pipeline.workflows.registry import Registry, operation_specs

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
    """List the operations that workers have registered, with the grade of each."""
    declared = {(spec.connector, spec.operation): spec for spec in operation_specs(_registry_or_empty())}
    registered, used = _stored_operations(context.obj, recent, is_optional=bool(declared))
    known: dict[tuple[str, str], OperationSpec] = {**declared, **registered}
    others = sorted(set(used) - known.keys())
    _warn_unregistered(known, registered, others)
    columns = ("connector", "operation", "grade", "timeout", "settle")
    rows: list[tuple[object, ...]] = [
        (*name, grade_of(spec) or "read", spec.timeout, spec.settle if spec.is_mutation else "")
        for name, spec in sorted(known.items())
    ]
    if as_json:
        rows += [(*name, None, None, None) for name in others]
        common.print_json([dict(zip(columns, row, strict=True)) for row in rows])
        return
    rows += [(*name, "not registered", "", "") for name in others]
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
    rows = open_breakers(database)
    if as_json:
        common.print_json([{name: value or "" for name, value in asdict(row).items()} for row in rows])
        return
    with database.transaction() as tx:
        now = tx.clock()
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
    _require_known(context.obj, operation)
    wake_ups, who, changed = common.WakeUps(), common.actor(by, reason), True
    waiting: list[UUID] = []
    if action is BreakerAction.OPEN:
        open_breaker(context.obj, operation, who)
    else:
        changed = close_breaker(context.obj, operation, who, waiting.append)
    for first in range(0, len(waiting), _RUNS_PER_MESSAGE):
        wake_ups.dispatch_runs(waiting[first : first + _RUNS_PER_MESSAGE])
    if as_json:
        common.print_json(
            {"operation": operation, "act": action, "is_changed": changed, "is_notified": wake_ups.is_notified}
        )
        return
    sent = f"{quantity(len(waiting), 'run')} that may have waited for it dispatched again." if waiting else ""
    common.print_lines(f"{operation}: {action}" if changed else f"{operation} was not open", sent, wake_ups.text())


def _require_known(database: Database, operation: str) -> None:
    """Refuse an operation that neither a worker has registered nor the loaded code has."""
    operation_name(operation)
    known = {spec.name for spec in (*registered_operations(database), *operation_specs(_registry_or_empty()))}
    if known and operation not in known:
        raise InvalidInputError(f"The operation {operation!r} is unknown; known are: {', '.join(sorted(known))}.")
    if not known:
        typer.echo(f"No worker has registered an operation: check the spelling of {operation}.", err=True)


def _registry_or_empty() -> Registry:
    """Load the registry; empty, and the reason printed, if it cannot be imported."""
    try:
        return common.load_registry()
    except PipelineError as error:
        typer.echo(str(error), err=True)
        return Registry()


def _stored_operations(
    database: Database, recent: int, *, is_optional: bool
) -> tuple[dict[tuple[str, str], RegisteredOperation], list[tuple[str, str]]]:
    """Return registered operations, and the names in ledger and breakers. Optional: without a database it warns."""
    try:
        registered = registered_operations(database)
        with database.transaction() as tx:
            used, is_partial = ledger.operation_names(tx, recent=recent), listings.has_older(tx, "mutations", recent)
    except (DBAPIError, SchemaVersionError) as error:
        if not is_optional:
            raise
        message = str(error.orig if isinstance(error, DBAPIError) else error).strip()
        typer.echo(f"The ledger cannot be read; only operations of the loaded code are listed. {message}", err=True)
        return {}, []
    if is_partial:
        rows = quantity(recent, "row")
        typer.echo(f"Only the newest {rows} of the ledger were searched; --recent searches more.", err=True)
    return {(each.connector, each.operation): each for each in registered}, used


def _warn_unregistered(
    known: Mapping[tuple[str, str], OperationSpec],
    registered: Mapping[tuple[str, str], OperationSpec],
    others: Sequence[tuple[str, str]],
) -> None:
    """Warn of operations that no worker has registered: an operator may want to open all breakers."""
    if not known and not others:
        raise InvalidInputError("No worker has registered an operation, and no workflow's code is here.")
    missing = [spec.name for name, spec in sorted(known.items()) if name not in registered]
    if registered and missing:
        typer.echo(f"No worker has registered {', '.join(missing)} yet; the code here has it.", err=True)
    if others:
        names = ", ".join(".".join(name) for name in others)
        typer.echo(f"No worker has registered {names}; the ledger or a breaker has it.", err=True)


def _raise_code_missing(database: Database, workflow: str) -> None:
    """Refuse a workflow whose code is not here; an unknown name is refused as unknown."""
    with database.transaction() as tx:
        lookup.require_workflow(tx, workflow)
    raise InvalidInputError(
        f"The code of workflow {workflow!r} is not here, and a plan runs it. Expected its module in "
        "PIPELINE_WORKFLOWS, as for a worker."
    )


def _probe_text(breaker: OpenBreaker, now: datetime) -> str:
    """Format when the next probe mutation is let through."""
    if breaker.probe_at is None:
        return "none"
    return "due" if breaker.probe_at <= now else f"in {common.age(now, breaker.probe_at)}"


def _note(item: PlannedRun) -> str:
    waits = "its run exists and has not sent it yet" if item.is_waiting else ""
    asks = "needs approval" if item.needs_approval else ""
    return "; ".join(part for part in (item.problem or asks, waits) if part)
