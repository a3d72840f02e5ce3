"""The ``pipeline`` command. Exit codes are stable, so that scripts and probes can rely on them.

0 done, 1 the doctor found something broken, 2 wrong usage or settings, 3 the database cannot be
reached or is not at the version this code needs.
"""

import os
import sys
from typing import Annotated

import typer
from rich.console import Console
from sqlalchemy.exc import DBAPIError, OperationalError

from pipeline.cli import chaos, connectors, consume, db, doctor, ingest, mutations, publish
from pipeline.config import Settings, SettingsError
from pipeline.domain.errors import PipelineError, SchemaError
from pipeline.store.database import Database

EXIT_BROKEN, EXIT_USAGE, EXIT_DATABASE = 1, 2, 3

app = typer.Typer(
    name="pipeline",
    help="Durable side effects on Celery: look after the database and the runs in it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(db.app, name="db")
app.add_typer(ingest.app, name="ingest")
app.command("doctor")(doctor.doctor)
app.command("mutations")(mutations.mutations)
app.command("resolve")(mutations.resolve)
app.command("resolve-from")(mutations.resolve_from)
app.command("publish")(publish.publish)
app.command("connectors")(connectors.connectors)
app.command("plan")(connectors.plan)
app.command("breakers")(connectors.breakers)
app.command("breaker")(connectors.breaker)
app.command("chaos")(chaos.chaos)
app.command("consume")(consume.consume)

DatabaseUrl = Annotated[
    str | None, typer.Option(envvar="PIPELINE_DATABASE_URL", help="Which database.", show_envvar=True)
]


@app.callback()
def connect(context: typer.Context, database_url: DatabaseUrl = None) -> None:
    """Every command finds its database in the context; nothing is connected before it is used."""
    environ = dict(os.environ)
    if database_url:
        environ["PIPELINE_DATABASE_URL"] = database_url
    context.obj = Database.unpooled(str(Settings.load(environ).database_url))


def main() -> None:
    """Run a command; an error we expect becomes a sentence and an exit code, never a traceback."""
    problem = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    try:
        app()
    except SettingsError as error:
        problem.print(str(error))
        sys.exit(EXIT_USAGE)
    except SchemaError as error:
        problem.print(str(error))
        sys.exit(EXIT_DATABASE)
    except OperationalError as error:
        problem.print(
            f"The database cannot be reached: {str(error.orig).strip()}. "
            "Expected a running Postgres at PIPELINE_DATABASE_URL; start it, or correct the URL."
        )
        sys.exit(EXIT_DATABASE)
    except DBAPIError as error:
        problem.print(
            f"The database refused: {str(error.orig).strip()}. Expected the tables of `pipeline db upgrade` and a role "
            "that may use them; check the role's privileges, or migrate again."
        )
        sys.exit(EXIT_DATABASE)
    except PipelineError as error:
        problem.print(str(error))
        sys.exit(EXIT_USAGE)
