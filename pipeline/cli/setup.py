"""Set a command up and run it: settings, database, log and traces. An expected error is a sentence and an exit code."""

import gc
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import typer
from rich.console import Console
from sqlalchemy.exc import DBAPIError

from pipeline.admin import problem_types
from pipeline.config import Settings, SettingsError
from pipeline.domain.errors import PipelineError
from pipeline.embedded import servers
from pipeline.store import migrate
from pipeline.store.codecs import default_codecs
from pipeline.store.database import (
    Database,
    Transaction,
    describe_error,
    is_disconnected,
    is_full,
    is_read_only,
    is_transient,
)
from pipeline.telemetry import logs, spans_export

#: Commands that run until they are stopped, and report by their log.
_LOGGING_COMMANDS = frozenset({"api", "bench", "chaos", "consume", "dev", "ingest", "metrics"})


def run(app: typer.Typer, arguments: Sequence[str]) -> None:
    """Run a command; turn an expected error into a sentence and an exit code."""
    problem = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    gc.enable()  # off while the command was imported
    try:
        app(args=[*arguments], prog_name="pipeline")
    except (DBAPIError, SettingsError, PipelineError) as error:
        problem.print(_describe_database_error(error) if isinstance(error, DBAPIError) else str(error))
        sys.exit(problem_types.exit_code(error))


def prepare_context(context: typer.Context, database_url: str | None) -> None:
    """Put the database into the context; it connects on first use."""
    if database_url:
        os.environ["PIPELINE_DATABASE_URL"] = database_url
    if context.invoked_subcommand != "dev":  # dev starts the servers, or joins running ones
        _use_embedded_servers()
    if context.invoked_subcommand not in _LOGGING_COMMANDS:
        _mute_log()
    settings = Settings.load(os.environ)
    context.obj = _CheckedDatabase.connect_unpooled(str(settings.database_url))
    context.obj.codecs = default_codecs(settings)
    spans_export.start(settings.otlp_endpoint)
    context.call_on_close(spans_export.stop)


def log_to_stderr(settings: Settings) -> None:
    """Log to standard error in the format and level of the settings, for a command that keeps running."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logs.set_format([handler], settings.log_format)
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logs.set_level(settings.log_level)


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


def _use_embedded_servers() -> None:
    """Without a URL, use the servers that `pipeline dev` runs in this folder, if any."""
    missing = {name: server for name, server in servers.URL_VARIABLES.items() if not os.environ.get(name, "").strip()}
    found = servers.status(Settings.load(os.environ).home) if missing else None
    if found is not None and set(found.urls) == set(missing.values()):  # else they belong to another installation
        os.environ.update({name: found.urls[server] for name, server in missing.items()})


def _describe_database_error(error: DBAPIError) -> str:
    message = describe_error(error)
    if is_full(error):
        return f"The database took no connection: {message}. This command wrote nothing; repeat it afterwards."
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
