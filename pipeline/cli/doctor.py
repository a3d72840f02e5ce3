"""``pipeline doctor``: the invariants of the tests, run on the database you have."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pipeline.store import invariants, migrate
from pipeline.store.database import Database
from pipeline.store.invariants import Finding, Severity


def doctor(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print findings as JSON.")] = False,
    recent: Annotated[int, typer.Option(min=1, help="How many of the newest runs to look back over.")] = 10_000,
) -> None:
    """Check every invariant. Exit code 1 when a promise does not hold; overdue work is shown and exits 0."""
    database: Database = context.obj
    migrate.require_current(database)
    with database.transaction() as tx:
        found = invariants.findings(tx, recent=recent)
    if as_json:
        typer.echo(json.dumps([finding.as_dict() for finding in found], indent=2))
    else:
        Console().print(_table(found) if found else f"All {len(invariants.INVARIANTS)} invariants hold.")
    if any(finding.severity is Severity.BROKEN for finding in found):
        raise typer.Exit(1)


def _table(found: list[Finding]) -> Table:
    table = Table(title=f"{len(found)} findings", show_lines=True)
    for column in ("severity", "invariant", "subject", "detail", "what to do"):
        table.add_column(column, overflow="fold")
    for finding in found:
        table.add_row(finding.severity, finding.invariant, finding.subject, finding.detail, finding.advice)
    return table
