"""The ``pipeline`` command. Exit codes are stable, so that scripts and probes can rely on them."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from sqlalchemy.exc import DBAPIError

from pipeline.cli import (
    attention,
    chaos,
    connectors,
    consume,
    db,
    dev,
    doctor,
    ingest,
    metrics,
    mutations,
    publish,
    refused,
    runs,
    top,
    workflows,
)
from pipeline.config import Settings, SettingsError
from pipeline.dev import servers
from pipeline.domain.errors import PipelineError, SchemaError
from pipeline.store import migrate
from pipeline.store.database import Database, Transaction, is_away, passes
from pipeline.telemetry import setup

EXIT_BROKEN, EXIT_USAGE, EXIT_DATABASE, EXIT_INTERRUPTED = 1, 2, 3, 130
#: What each exit code means.
EXIT_CODES = {
    0: "done",
    EXIT_BROKEN: "the doctor found a broken promise, chaos found a disagreement, or some of many acts were refused",
    EXIT_USAGE: "wrong usage, a name or id that is not known, an act that is refused, or wrong settings",
    EXIT_DATABASE: "the database cannot be reached, or is not at the version this code needs",
    attention.EXIT_WAITING: "`pipeline attention --check`: something waits for a person",
    EXIT_INTERRUPTED: "interrupted with Ctrl-C",
}

app = typer.Typer(
    name="pipeline",
    help="Durable side effects on Celery: look after the database and the runs in it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(db.app, name="db")
app.add_typer(ingest.app, name="ingest")
app.add_typer(attention.quarantine, name="quarantine")
app.add_typer(refused.app, name="refused")
app.command("workflows")(workflows.workflows)
app.command("events")(runs.events)
app.command("runs")(runs.runs)
app.command("mutations")(mutations.mutations)
app.command("attention")(attention.attention)
app.command("trace")(attention.trace)
app.command("approve")(mutations.approve)
app.command("reject")(mutations.reject)
app.command("acknowledge")(mutations.acknowledge)
app.command("pause")(workflows.pause)
app.command("resume")(workflows.resume)
app.command("maintenance")(workflows.maintenance)
app.command("top")(top.top)
app.command("metrics")(metrics.metrics)
app.command("doctor")(doctor.doctor)
app.command("resolve")(mutations.resolve)
app.command("resolve-from")(mutations.resolve_from)
app.command("publish")(publish.publish)
app.command("connectors")(connectors.connectors)
app.command("plan")(connectors.plan)
app.command("breakers")(connectors.breakers)
app.command("breaker")(connectors.breaker)
app.command("chaos")(chaos.chaos)
app.command("consume")(consume.consume)
app.command("dev")(dev.dev)

DatabaseUrl = Annotated[
    str | None, typer.Option(envvar="PIPELINE_DATABASE_URL", help="Which database.", show_envvar=True)
]


@app.callback()
def connect(context: typer.Context, database_url: DatabaseUrl = None) -> None:
    """Every command finds its database in the context; nothing is connected before it is used."""
    if database_url:
        os.environ["PIPELINE_DATABASE_URL"] = database_url
    if context.invoked_subcommand != "dev":  # it starts the servers, or joins those that run
        _use_embedded()
    settings = Settings.load(os.environ)
    context.obj = _Current.unpooled(str(settings.database_url))
    setup.begin(settings.otlp_endpoint)
    context.call_on_close(setup.end)


class _Current(Database):
    """A database whose version is checked before it is first read or written."""

    is_checked = False

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        if not self.is_checked:
            migrate.require_current(self)
            self.is_checked = True
        with super().transaction() as tx:
            yield tx


def _use_embedded() -> None:
    """Without a URL, speak to the servers that `pipeline dev` runs in this folder, if it does."""
    missing = {name: server for name, server in servers.VARIABLES.items() if not os.environ.get(name, "").strip()}
    found = servers.status(Settings.load(os.environ).home) if missing else None
    if found is not None and set(found.urls) == set(missing.values()):  # else they belong to another installation
        os.environ.update({name: found.urls[server] for name, server in missing.items()})


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; an error we expect becomes a sentence and an exit code, never a traceback."""
    problem = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    try:
        app(args=None if arguments is None else list(arguments))
    except SettingsError as error:
        problem.print(str(error))
        sys.exit(EXIT_USAGE)
    except SchemaError as error:
        problem.print(str(error))
        sys.exit(EXIT_DATABASE)
    except DBAPIError as error:
        problem.print(_words(error))
        sys.exit(EXIT_DATABASE)
    except PipelineError as error:
        problem.print(str(error))
        sys.exit(EXIT_USAGE)


def _words(error: DBAPIError) -> str:
    said = str(error.orig).strip()
    if is_away(error):
        return (
            f"The database cannot be reached: {said}. "
            "Expected a running Postgres at PIPELINE_DATABASE_URL; start it, or correct the URL."
        )
    if passes(error):
        return f"The database gave up: {said}. What this command was about to write is not there; repeat it."
    return (
        f"The database refused: {said}. Expected the tables of `pipeline db upgrade` and a role "
        "that may use them; check the role's privileges, or migrate again."
    )
