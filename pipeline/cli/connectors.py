"""``pipeline connectors``, ``pipeline breakers`` and ``pipeline plan``: what would be sent, and through what."""

import os
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any

import typer

from pipeline.cli import lists, shown
from pipeline.client import names
from pipeline.config import Settings
from pipeline.connectors.sdk import Operation
from pipeline.domain.errors import InvalidInputError
from pipeline.execution import breakers as verbs
from pipeline.runtime.plan import Planner, counts
from pipeline.store import ledger
from pipeline.store.database import Database


class Switch(StrEnum):
    """What a person does to a breaker."""

    OPEN = "open"
    CLOSE = "close"


def connectors(as_json: shown.AsJson = False) -> None:
    """List connectors with their operations, and how well the outcome of each can be known."""
    rows = [
        (connector.name, name, _kind(operation), operation.timeout, operation.settle if operation.is_mutation else "")
        for connector in shown.registry().connectors.values()
        for name, operation in sorted(type(connector).operations().items())
    ]
    columns = ("connector", "operation", "grade", "timeout", "settle")
    if as_json:
        shown.as_json([dict(zip(columns, row, strict=True)) for row in rows])
        return
    lists.listed(names.many(len(rows), "operation"), columns, rows)


def plan(
    context: typer.Context,
    workflow: Annotated[str, typer.Argument(help="Which workflow.")],
    most: Annotated[int, typer.Option(min=1, help="Runs of each consumer at most.")] = 100,
    as_json: shown.AsJson = False,
) -> None:
    """Show which requests a workflow would send for what is pending. Nothing is reserved and nothing is sent."""
    settings = Settings.load(os.environ)
    planner = Planner(context.obj, shown.registry(), step_limit=settings.step_time_limit)
    planned = planner.plan(workflow, most=most)
    if as_json:
        shown.as_json({"requests": [asdict(item) for item in planned], "counts": counts(planned)})
        return
    lists.listed(
        names.many(len(planned), "run"),
        ("consumer", "events", "request", "what"),
        [
            (
                item.handler,
                ", ".join(item.message_ids),
                item.request,
                item.title,
            )
            for item in planned
        ],
        [item.problem or ("asks for approval" if item.needs_approval else "") for item in planned],
        note="note",
    )
    for request, count in counts(planned).items():
        typer.echo(f"{request}: {count}")


def breakers(context: typer.Context, as_json: shown.AsJson = False) -> None:
    """List operations that start no new mutation."""
    database: Database = context.obj
    with database.transaction() as tx:
        rows = ledger.breakers(tx)
    columns = ("connector", "operation", "reason", "opened_by", "opened_at", "probe_at")
    found = [tuple(getattr(row, column) or "" for column in columns) for row in rows]
    if as_json:
        shown.as_json([dict(zip(columns, row, strict=True)) for row in found])
        return
    lists.listed(f"{len(found)} open", columns, found)


def breaker(
    context: typer.Context,
    switch: Annotated[Switch, typer.Argument(help="open: start none. close: go on.")],
    operation: Annotated[str, typer.Argument(help="connector.operation")],
    reason: shown.Reason = "",
    by: shown.By = "",
    as_json: shown.AsJson = False,
) -> None:
    """Stop new mutations of an operation, or let them go on."""
    connector, _, name = operation.partition(".")
    if not connector or not name:
        raise InvalidInputError(f"{operation!r} names no operation; expected connector.operation, such as mail.send.")
    known = shown.registry()
    if known.connectors and known.operation(connector, name) is None:
        operations = [f"{each.name}.{op}" for each in known.connectors.values() for op in type(each).operations()]
        raise InvalidInputError(
            f"Nobody knows the operation {operation!r}; known are: {', '.join(sorted(operations))}."
        )
    if not known.connectors:
        typer.echo(
            f"Without PIPELINE_WORKFLOWS nobody here knows whether {operation} exists: mind its spelling.", err=True
        )
    database: Database = context.obj
    changed = True
    with database.transaction() as tx:
        if switch is Switch.OPEN:
            verbs.open_(tx, (connector, name), shown.person(by, reason))
        else:
            changed = verbs.close(tx, (connector, name), shown.person(by, reason))
    if as_json:
        shown.as_json({"operation": operation, "act": switch, "is_changed": changed})
    else:
        shown.say(f"{operation}: {switch}" if changed else f"{operation} was not open")


def _kind(operation: Operation[Any]) -> str:
    return operation.grade if operation.is_mutation else "read"
