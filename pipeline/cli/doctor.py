"""``pipeline doctor``: the invariants of the tests, run on the database you have."""

from typing import Annotated

import typer

from pipeline.cli import common, tables
from pipeline.domain.errors import quantity
from pipeline.store import migrate
from pipeline.store.database import Database
from pipeline.store.reads import invariants
from pipeline.store.reads.invariants import Finding, Severity


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
        common.print_json(found)
    elif found:
        _print_findings(found)
    else:
        typer.echo(f"All {len(invariants.INVARIANTS)} invariants hold.")
    if any(finding.severity is Severity.BROKEN for finding in found):
        raise typer.Exit(1)


def _print_findings(found: list[Finding]) -> None:
    """Subjects hold ids, so they are never folded; what is wrong and what to do stands with each of them."""
    tables.print_table(
        quantity(len(found), "finding"),
        ("severity", "subject", "invariant"),
        [(finding.severity, finding.subject, finding.invariant) for finding in found],
        [f"{finding.detail}. {finding.advice}" for finding in found],
        note="what it is, and what to do",
    )
