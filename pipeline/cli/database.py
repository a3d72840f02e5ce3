"""Commands ``pipeline db`` and ``pipeline doctor``: migrate the schema, check the invariants."""

import os
from typing import Annotated

import typer

from pipeline.admin import system
from pipeline.cli import common, tables
from pipeline.cli.commands import CommandGroup
from pipeline.config import Settings
from pipeline.domain.errors import quantity
from pipeline.store import migrate
from pipeline.store.database import Database
from pipeline.store.reads import invariants
from pipeline.store.reads.invariants import Finding, Severity
from pipeline.store.reads.listings import keys_in_use
from pipeline.store.roles import roles_sql
from pipeline.store.schema import SCHEMA

app = CommandGroup(help="Migrate the schema of the database.", no_args_is_help=True)


@app.command()
def upgrade(context: typer.Context, as_json: common.AsJson = False) -> None:
    """Migrate to the newest version. Safe to repeat, and to run in several places at once."""
    database: Database = context.obj
    version = migrate.upgrade(database)
    if as_json:
        common.print_json({"version": version})
    else:
        typer.echo(f"The database is at schema version {version}.")


@app.command()
def current(context: typer.Context, as_json: common.AsJson = False) -> None:
    """Print the version of the database. Exit code 3 if this code needs another one."""
    database: Database = context.obj
    migrate.require_current(database)
    if as_json:
        common.print_json({"version": migrate.expected_version()})
    else:
        typer.echo(f"The database is at schema version {migrate.expected_version()}, as this code needs.")


@app.command()
def sql(
    since: Annotated[
        str | None, typer.Option(help="The version that the database is at; by default a new one.", show_default=False)
    ] = None,
) -> None:
    """Print the SQL of the migrations, for an administrator who runs it. Connects to nothing."""
    typer.echo(migrate.upgrade_sql(since), nl=False)


@app.command()
def roles(
    prefix: Annotated[str, typer.Option(help="What the names of the roles begin with.")] = SCHEMA,
) -> None:
    """Print the SQL that makes the roles owner, worker, publisher, operator and viewer. Connects to nothing.

    A superuser runs it after each migration. It gives each role what this version needs, and takes the rest away.
    """
    typer.echo(roles_sql(prefix), nl=False)


@app.command()
def keys(context: typer.Context, as_json: common.AsJson = False) -> None:
    """Print which keys of codecs have encrypted stored values. A key that is not listed can be removed.

    It reads whole tables, as a role that may read all of them, such as the owner.
    """
    database: Database = context.obj
    migrate.require_current(database)
    with database.transaction() as tx:
        found = keys_in_use(tx)
    if as_json:
        common.print_json([row._asdict() for row in found])  # type: ignore[attr-defined]
    elif found:
        cells = [(row.key_id, f"{row.table_name}.{row.column_name}", str(row.uses)) for row in found]
        tables.print_table("Keys in use", ("key", "column", "values"), cells)
    else:
        typer.echo("No stored value is encrypted.")


def doctor(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print findings as JSON.")] = False,
    recent: Annotated[int, typer.Option(min=1, help="How many of the newest runs and acts to check.")] = 10_000,
    head: Annotated[
        str | None, typer.Option(help="A head of the audit that `pipeline audit --head` printed before.")
    ] = None,
) -> None:
    """Check every invariant, and that commits are durable.

    Exit code 1 if one is broken; overdue work is listed and exits 0.
    """
    database: Database = context.obj
    migrate.require_current(database)
    allowed = Settings.load(os.environ).allowed_unsafe_settings
    found = system.findings(database, recent=recent, allowed_unsafe_settings=allowed, noted_head=head)
    if as_json:
        common.print_json(found)
    elif found:
        _print_findings(found)
    else:
        typer.echo(f"All {len(invariants.INVARIANTS)} invariants hold, and commits are durable.")
    if any(finding.severity is Severity.BROKEN for finding in found):
        raise typer.Exit(1)


def _print_findings(found: list[Finding]) -> None:
    """Print each finding with its detail and advice; subjects hold ids and are never wrapped."""
    tables.print_table(
        quantity(len(found), "finding"),
        ("severity", "subject", "invariant"),
        [(finding.severity, finding.subject, finding.invariant) for finding in found],
        [f"{finding.detail}. {finding.advice}" for finding in found],
        note="detail and advice",
    )
