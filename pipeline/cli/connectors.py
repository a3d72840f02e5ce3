"""``pipeline connectors``, ``pipeline breakers`` and ``pipeline plan``: what would be sent, and through what."""

import os
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

import typer
from sqlalchemy import Row
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
from pipeline.transitions import breakers as verbs
from pipeline.workflows.registry import Registry

_RUNS_PER_MESSAGE = 100  #: runs for which one message rings
_GRADES: dict[object, str] = {
    Grade.A: "it can be asked what became of a request, and one that arrives twice counts as one.",
    Grade.B: "it can be asked what became of a request.",
    Grade.C: "an unknown outcome is a question for a person; one request that arrives twice counts as one.",
    Grade.D: "an unknown outcome is a question for a person.",
}


class BreakerAction(StrEnum):
    """What a person does to a breaker."""

    OPEN = "open"
    CLOSE = "close"


def connectors(context: typer.Context, recent: common.Recent = 100_000, as_json: common.AsJson = False) -> None:
    """List operations, and how well the outcome of each can be known; without their code, those of the ledger."""
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
    common.print_lines(*(f"{grade}: {words}" for grade, words in _GRADES.items() if grade in seen))
    if seen & _GRADES.keys():
        common.print_lines("Whatever the grade, a new run sends under a new key: what it does again happens again.")


def plan(
    context: typer.Context,
    workflow: Annotated[str, typer.Argument(help="Which workflow.")],
    limit: Annotated[int, typer.Option(min=1, help="Runs of each consumer at most.")] = 100,
    as_json: common.AsJson = False,
) -> None:
    """Show which requests a workflow would send for what was not sent yet. Nothing is reserved and nothing is sent."""
    settings, known = Settings.load(os.environ), common.load_registry()
    if workflow not in known.workflows:
        _raise_code_missing(context.obj, workflow)
    planner = Planner(context.obj, known, step_limit=settings.step_time_limit)
    planned = planner.plan(workflow, limit=limit)
    if as_json:
        common.print_json({"requests": [asdict(item) for item in planned], "counts": request_counts(planned)})
        return
    tables.print_table(
        quantity(len(planned), "run"),
        ("consumer", "events", "request", "details"),
        [
            (
                item.handler,
                ", ".join(item.message_ids),
                item.request,
                item.title,
            )
            for item in planned
        ],
        [_note(item) for item in planned],
        note="note",
    )
    for request, count in request_counts(planned).items():
        typer.echo(f"{request}: {count}")


def breakers(context: typer.Context, as_json: common.AsJson = False) -> None:
    """List operations that start no new mutation."""
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
    action: Annotated[BreakerAction, typer.Argument(help="open: start none. close: go on.")],
    operation: Annotated[str, typer.Argument(help="connector.operation")],
    reason: common.OptionalReason = "",
    by: common.By = "",
    as_json: common.AsJson = False,
) -> None:
    """Stop new mutations of an operation, or let them go on."""
    connector, name = _parse_operation(operation)
    wake_ups, who, changed = common.WakeUps(), common.actor(by, reason), True
    roused: Sequence[Row[Any]] = ()
    with context.obj.transaction() as tx:
        if action is BreakerAction.OPEN:
            verbs.open_by_operator(tx, (connector, name), who)
        elif changed := verbs.close_by_operator(tx, (connector, name), who):
            roused = verbs.redispatch_waiting(tx)
    for first in range(0, len(roused), _RUNS_PER_MESSAGE):
        wake_ups.dispatch(dispatch_messages(roused[first : first + _RUNS_PER_MESSAGE], context.obj))
    if as_json:
        common.print_json(
            {"operation": operation, "act": action, "is_changed": changed, "is_notified": wake_ups.is_notified}
        )
        return
    rung = f"It rings for {quantity(len(roused), 'run')} that may have waited behind it." if roused else ""
    common.print_lines(f"{operation}: {action}" if changed else f"{operation} was not open", rung, wake_ups.text())


def _parse_operation(operation: str) -> tuple[str, str]:
    """Connector and operation as they were typed; refused when the code here knows better."""
    connector, _, name = operation.partition(".")
    if not connector or not name:
        raise InvalidInputError(f"{operation!r} names no operation; expected connector.operation, such as mail.send.")
    known = common.load_registry()
    if known.connectors and known.operation(connector, name) is None:
        operations = [f"{each.name}.{op}" for each in known.connectors.values() for op in type(each).operations()]
        raise InvalidInputError(
            f"Nobody knows the operation {operation!r}; known are: {', '.join(sorted(operations))}."
        )
    if not known.connectors:
        typer.echo(
            f"Without PIPELINE_WORKFLOWS nobody here knows whether {operation} exists: mind its spelling.", err=True
        )
    return connector, name


def _registry_or_empty() -> Registry:
    """The code that is here; none when it cannot be imported, and then why."""
    try:
        return common.load_registry()
    except PipelineError as error:
        typer.echo(str(error), err=True)
        return Registry()


def _operations_in_ledger(database: Database, known: Registry, recent: int) -> list[tuple[str, str]]:
    """What the ledger and the breakers name. With code here, a list of what it has needs no database."""
    try:
        with database.transaction() as tx:
            found, is_partial = ledger.operation_names(tx, recent=recent), listings.has_older(tx, "mutations", recent)
    except (DBAPIError, SchemaVersionError) as error:
        if not known.connectors:
            raise
        said = str(error.orig if isinstance(error, DBAPIError) else error).strip()
        typer.echo(f"The ledger cannot be asked; only what the code here has is listed. {said}", err=True)
        return []
    if is_partial:
        looked = quantity(recent, "row")
        typer.echo(
            f"Only the newest {looked} of the ledger were looked through; --recent looks further back.", err=True
        )
    return found


def _warn_unknown_operations(others: Sequence[tuple[str, str]], known: Registry) -> None:
    """Say whose code is not here: whoever stops everything must know that the list may lack something."""
    is_here = bool(known.connectors or known.workflows)
    if not is_here and not others:
        raise InvalidInputError(
            "No workflow's code is here, and the ledger knows no operation. Ask where PIPELINE_WORKFLOWS names it."
        )
    if not is_here:
        typer.echo(
            "No workflow's code is here (PIPELINE_WORKFLOWS): these are the operations of the ledger and of breakers. "
            "One that was never used is not among them.",
            err=True,
        )
    elif others:
        spelt = ", ".join(".".join(name) for name in others)
        typer.echo(f"The code here does not have {spelt}; the ledger or a breaker does.", err=True)


def _raise_code_missing(database: Database, workflow: str) -> None:
    """Say that the code is not here, if there is such a workflow; a name that nobody knows is refused as such."""
    with database.transaction() as tx:
        lookup.require_workflow(tx, workflow)
    raise InvalidInputError(
        f"The code of workflow {workflow!r} is not here, and a plan runs it. Plan where PIPELINE_WORKFLOWS names its "
        "module, as for a worker that runs it."
    )


def _probe_text(breaker: Row[Any], now: datetime) -> str:
    """When one mutation is let through, to see whether an answer comes back."""
    if breaker.probe_at is None:
        return "none"
    return "due" if breaker.is_due else f"in {common.age(now, breaker.probe_at)}"


def _note(item: PlannedRun) -> str:
    waits = "its run exists and has not sent it yet" if item.is_waiting else ""
    asks = "asks for approval" if item.needs_approval else ""
    return "; ".join(words for words in (item.problem or asks, waits) if words)


def _grade(operation: Operation[Any]) -> str:
    return operation.grade if operation.is_mutation else "read"
