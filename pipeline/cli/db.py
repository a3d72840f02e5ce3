"""``pipeline db``: bring the database to the version this code was written for."""

import typer

from pipeline.cli import common
from pipeline.store import migrate
from pipeline.store.database import Database

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
