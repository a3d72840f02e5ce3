"""Define the ``pipeline`` command. Exit codes are stable: scripts and probes rely on them."""

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from typing import Annotated, Any, TextIO, cast

import typer
from rich.console import Console
from sqlalchemy.exc import DBAPIError

from pipeline.config import EXIT_ATTENTION, Settings, SettingsError
from pipeline.domain.errors import PipelineError, SchemaVersionError
from pipeline.embedded import servers
from pipeline.store import migrate
from pipeline.store.database import Database, Transaction, describe_error, is_disconnected, is_read_only, is_transient
from pipeline.telemetry.tracing import export

EXIT_BROKEN, EXIT_USAGE, EXIT_DATABASE, EXIT_INTERRUPTED = 1, 2, 3, 130
EXIT_BROKEN_PIPE = 141  #: what a shell reports of a program that SIGPIPE ended
#: What each exit code means.
EXIT_CODES = {
    0: "done",
    EXIT_BROKEN: "the doctor found a broken invariant, chaos or bench found a disagreement, some of many acts were "
    "refused, or there was more to act on than fits into one command",
    EXIT_USAGE: "wrong usage, an unknown name or id, a refused act, or wrong settings",
    EXIT_DATABASE: "the database is unreachable, or not at the version this code needs",
    EXIT_ATTENTION: "`pipeline attention --check`: something waits for an operator",
    EXIT_INTERRUPTED: "interrupted with Ctrl-C",
    EXIT_BROKEN_PIPE: "the reader of the output left, as `head` does; what the command did is done",
}

#: Module and attribute of each command. Only the called command is imported, so that it starts fast.
COMMANDS = {
    "db": "database:app",
    "ingest": "ingest:app",
    "quarantine": "quarantine:app",
    "dead-letters": "dead_letters:app",
    "workflows": "workflows:workflows",
    "events": "runs:events",
    "runs": "runs:runs",
    "mutations": "mutations:mutations",
    "attention": "attention:attention",
    "trace": "attention:trace",
    "approve": "mutations:approve",
    "reject": "mutations:reject",
    "acknowledge": "mutations:acknowledge",
    "pause": "workflows:pause",
    "resume": "workflows:resume",
    "maintenance": "workflows:maintenance",
    "top": "top:top",
    "metrics": "metrics:metrics",
    "doctor": "database:doctor",
    "resolve": "mutations:resolve",
    "resolve-from": "mutations:resolve_from",
    "publish": "publish:publish",
    "connectors": "connectors:connectors",
    "plan": "connectors:plan",
    "breakers": "connectors:breakers",
    "breaker": "connectors:breaker",
    "chaos": "chaos:chaos",
    "bench": "bench:bench",
    "consume": "consume:consume",
    "dev": "dev:dev",
}

#: Commands that run until they are stopped, and report by their log.
_LOGGING_COMMANDS = frozenset({"bench", "chaos", "consume", "dev", "ingest", "metrics"})

DatabaseUrl = Annotated[
    str | None, typer.Option(envvar="PIPELINE_DATABASE_URL", help="URL of the database.", show_envvar=True)
]


def build_app(names: Iterable[str] = tuple(COMMANDS)) -> typer.Typer:
    """Build the ``pipeline`` command with these subcommands; by default with all."""
    app = typer.Typer(
        name="pipeline",
        help="Durable side effects on Celery: operate the database and the runs in it.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(set_up)
    for name in names:
        module, _, attribute = COMMANDS[name].partition(":")
        found = getattr(import_module(f"pipeline.cli.{module}"), attribute)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name)
        else:
            app.command(name)(found)
    return app


def set_up(context: typer.Context, database_url: DatabaseUrl = None) -> None:
    """Put the database into the context; it connects on first use."""
    if database_url:
        os.environ["PIPELINE_DATABASE_URL"] = database_url
    if context.invoked_subcommand != "dev":  # dev starts the servers, or joins running ones
        _use_embedded_servers()
    if context.invoked_subcommand not in _LOGGING_COMMANDS:
        _mute_log()
    settings = Settings.load(os.environ)
    context.obj = _CheckedDatabase.connect_unpooled(str(settings.database_url))
    export.start(settings.otlp_endpoint)
    context.call_on_close(export.stop)


def _mute_log() -> None:
    """Keep log lines off the terminal: a command prints its own report."""
    logger = logging.getLogger("pipeline")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())


class _CheckedDatabase(Database):
    """Check the schema version before the first transaction."""

    is_checked = False

    @contextmanager
    def transaction(self, *, is_autocommit: bool = False) -> Iterator[Transaction]:
        if not self.is_checked:
            migrate.require_current(self)
            self.is_checked = True
        with super().transaction(is_autocommit=is_autocommit) as tx:
            yield tx


class BrokenPipeGuard:
    """Wrap standard output, and exit quietly when its reader leaves, as `head` does.

    SIGPIPE stays ignored: it would also end a process whose server closed the connection.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._exit_on_broken_pipe():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._exit_on_broken_pipe():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _exit_on_broken_pipe(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, self._stream.fileno())  # Python flushes the rest of the buffer there at exit
            os.close(devnull)
            raise SystemExit(EXIT_BROKEN_PIPE) from None


def _use_embedded_servers() -> None:
    """Without a URL, use the servers that `pipeline dev` runs in this folder, if any."""
    missing = {name: server for name, server in servers.URL_VARIABLES.items() if not os.environ.get(name, "").strip()}
    found = servers.status(Settings.load(os.environ).home) if missing else None
    if found is not None and set(found.urls) == set(missing.values()):  # else they belong to another installation
        os.environ.update({name: found.urls[server] for name, server in missing.items()})


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; turn an expected error into a sentence and an exit code, without traceback."""
    problem = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    given = sys.argv[1:] if arguments is None else [*arguments]
    command = next((argument for argument in given if not argument.startswith("-")), "")
    try:
        with redirect_stdout(cast(TextIO, BrokenPipeGuard(sys.stdout))):
            # help, completion and misspelt commands need all of them
            build_app([command] if command in COMMANDS else COMMANDS)(args=given)
    except SettingsError as error:
        problem.print(str(error))
        sys.exit(EXIT_USAGE)
    except SchemaVersionError as error:
        problem.print(str(error))
        sys.exit(EXIT_DATABASE)
    except DBAPIError as error:
        problem.print(_describe_database_error(error))
        sys.exit(EXIT_DATABASE)
    except PipelineError as error:
        problem.print(str(error))
        sys.exit(EXIT_USAGE)


def _describe_database_error(error: DBAPIError) -> str:
    message = describe_error(error)
    if is_disconnected(error):
        return (
            f"The database cannot be reached: {message}. "
            "Expected a running Postgres at PIPELINE_DATABASE_URL; start it, or correct the URL."
        )
    if is_read_only(error):
        return (
            f"The database refused: {message}. Nothing was changed: acts need the primary, this is a replica. "
            "Expected the primary's address in PIPELINE_DATABASE_URL; reads work here too."
        )
    if is_transient(error):
        return f"The database gave up: {message}. This command wrote nothing; repeat it."
    return (
        f"The database refused: {message}. Expected the tables of `pipeline db upgrade` and a role "
        "that may use them; check the role's privileges, or migrate again."
    )
