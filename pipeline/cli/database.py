"""Commands ``pipeline db`` and ``pipeline doctor``: migrate the schema, check the invariants."""

from typing import Annotated

import typer

from pipeline.cli import common, tables
from pipeline.domain.errors import quantity
from pipeline.store import migrate
from pipeline.store.database import Database
from pipeline.store.reads import invariants
from pipeline.store.reads.invariants import Finding, Severity

app = typer.Typer(help="Look after the schema.", no_args_is_help=True)


@app.command()
def upgrade(context: typer.Context, as_json: common.AsJson = False) -> None:
    """Migrate to the newest version. Safe to run again and from several places at once."""
    database: Database = context.obj
    version = migrate.upgrade(database)
    if as_json:
        common.print_json({"version": version})
    else:
        typer.echo(f"The database is at schema version {version}.")


@app.command()
def current(context: typer.Context, as_json: common.AsJson = False) -> None:
    """Say which version the database is at. Exit code 3 when it is not the one this code needs."""
    database: Database = context.obj
    migrate.require_current(database)
    if as_json:
        common.print_json({"version": migrate.expected_version()})
    else:
        typer.echo(f"The database is at schema version {migrate.expected_version()}, as this code needs.")


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
