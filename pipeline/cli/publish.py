"""``pipeline publish``: events from an argument, a file or standard input."""

import json
import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn

from pipeline.cli import shown
from pipeline.client.publishing import Receipt
from pipeline.client.publishing import publish as publish_in
from pipeline.domain.errors import InvalidInputError
from pipeline.store.database import Database
from pipeline.telemetry import contexts

_BATCH = 500


def publish(  # noqa: PLR0913 - options of a command
    context: typer.Context,
    workflow: Annotated[str, typer.Argument(help="Which workflow.")],
    topic: Annotated[str, typer.Argument(help="Which topic.")],
    payload: Annotated[
        str | None, typer.Argument(help="One payload as JSON. Without it, events come from --file.")
    ] = None,
    *,
    message_id: Annotated[str | None, typer.Option(help="What names this fact; needed with a payload.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="JSON lines, each with message_id and payload; - for standard input.")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Rewrite payloads that no run has seen.")] = False,
    as_json: shown.AsJson = False,
) -> None:
    """Publish events. A message id that is there already changes nothing."""
    if (payload is None) == (file is None):
        raise InvalidInputError("Give either one payload or --file; --file - reads standard input.")
    database: Database = context.obj
    if payload is not None:
        if message_id is None:
            raise InvalidInputError(
                "A payload needs --message-id: the name of the fact, the same whenever it is repeated."
            )
        rows = iter([{"topic": topic, "message_id": message_id, "payload": _json(payload, "the payload")}])
        _say(_all(database, workflow, rows, replace=replace, quiet=True), workflow, as_json=as_json)
        return
    assert file is not None
    if str(file) == "-":
        _say(_all(database, workflow, _lines(sys.stdin, topic), replace=replace), workflow, as_json=as_json)
        return
    with file.open(encoding="utf-8") as lines:
        _say(_all(database, workflow, _lines(lines, topic), replace=replace), workflow, as_json=as_json)


def _all(
    database: Database, workflow: str, rows: Iterator[dict[str, Any]], *, replace: bool, quiet: bool = False
) -> dict[str, int]:
    """Publish in batches, each in a transaction of its own; what was published before an error stays."""
    counts = dict.fromkeys(("new", "repeated", "replaced"), 0)
    columns = (SpinnerColumn(), TextColumn("{task.completed} events"))
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as progress:
        shown = progress.add_task("publishing", total=None)
        while batch := list(islice(rows, _BATCH)):
            with contexts.joined(os.environ.get("TRACEPARENT")), database.transaction() as tx:
                receipt: Receipt = publish_in(tx, workflow, batch, replace=replace)
            for name in counts:
                counts[name] += len(getattr(receipt, name))
            progress.advance(shown, len(batch))
    return counts


def _lines(lines: TextIO, topic: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            row = _json(line, f"line {number}")
            if not isinstance(row, dict):
                raise InvalidInputError(f"Line {number} is a {type(row).__name__}; expected an object with message_id.")
            yield {"topic": topic, **row}


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidInputError(f"{what.capitalize()} is no JSON: {error}.") from None


def _say(counts: dict[str, int], workflow: str, *, as_json: bool) -> None:
    """Ring for what is new, and say what became of it; that nobody heard is no part of the answer."""
    bell = shown.Bell()
    if counts["new"] or counts["replaced"]:
        bell.workflow(workflow)
    if as_json:
        shown.as_json({**counts, "is_rung": bell.heard})
        return
    typer.echo(", ".join(f"{count} {name}" for name, count in counts.items()))
    if bell.heard is False:
        typer.echo(bell.words(), err=True)
