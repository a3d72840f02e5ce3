"""System checks of Django: what is missing or contradictory, each in a sentence that says what to do."""

import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from django.apps import apps
from django.core.checks import CheckMessage, Error, Warning
from django.db import connections
from django.db.backends.postgresql.psycopg_any import IsolationLevel
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError

from pipeline.config import Settings, SettingsError, database_url_of
from pipeline.django.project import autodiscover, database_alias, database_url
from pipeline.domain.errors import PipelineError, SchemaVersionError
from pipeline.store import migrate
from pipeline.store.database import Database, describe_error
from pipeline.workflows.registry import Registry

_ALIAS = "PIPELINE_DATABASE_ALIAS"


def check_database_settings(**_: Any) -> list[CheckMessage]:
    """Check that events can be published in the database of the settings."""
    return list(_database_problems(database_alias()))


def check_worker_settings(**_: Any) -> list[CheckMessage]:
    """Check the settings and the workflows with which workers of this project would run."""
    try:
        return list(_worker_problems())
    except SettingsError as error:
        return [Error(problem, hint="Change or unset the variable.", id="pipeline.E004") for problem in error.problems]


def check_schema(databases: Sequence[str] | None = None, **_: Any) -> list[CheckMessage]:
    """Check that our schema is at the version of this code. A warning: `migrate` itself runs this check first."""
    alias = database_alias()
    url = database_url(alias) if alias in (databases or ()) else None
    if url is None:
        return []
    try:
        migrate.require_current(Database.connect_unpooled(database_url_of(url)))
    except SchemaVersionError as error:
        hint = None if error.is_newer else "Run `python manage.py migrate`, or `python manage.py pipeline db upgrade`."
        return [Warning(str(error), hint=hint, id="pipeline.W002")]
    except DBAPIError as error:
        what = f"The schema of Pipeline in the database {alias!r} cannot be checked: {describe_error(error)}"
        return [Warning(what, hint=f"Check DATABASES[{alias!r}] and its server.", id="pipeline.W003")]
    return []


def _database_problems(alias: str) -> Iterator[CheckMessage]:
    if alias not in connections:
        yield Error(
            f"{_ALIAS} is {alias!r}, which DATABASES does not have.",
            hint=f"Set it to one of: {', '.join(sorted(connections))}.",
            id="pipeline.E001",
        )
        return
    if connections[alias].vendor != "postgresql":
        yield Error(
            f"The database {alias!r} is of kind {connections[alias].vendor}; Pipeline publishes in Postgres only.",
            hint=f"Set {_ALIAS} to a database with the engine django.db.backends.postgresql.",
            id="pipeline.E002",
        )
        return
    level = connections[alias].settings_dict["OPTIONS"].get("isolation_level")
    if level in (IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE):
        yield Error(
            f"The database {alias!r} has the isolation level {IsolationLevel(level).name}; publish refuses it.",
            hint="Remove isolation_level from its OPTIONS: READ COMMITTED is the default.",
            id="pipeline.E003",
        )
    ours, theirs = os.environ.get("PIPELINE_DATABASE_URL", ""), database_url(alias)
    is_derived = ours == apps.get_app_config("pipeline").derived_url  # a test runner has renamed the other since
    if ours and theirs and not is_derived and _place(ours) != _place(theirs):
        yield Warning(
            f"PIPELINE_DATABASE_URL is not the database {alias!r}: workers would not find what this project publishes.",
            hint="Unset it; then it is taken from DATABASES. Silence this warning if both lead to one database.",
            id="pipeline.W001",
        )


def _place(url: str) -> tuple[object, ...]:
    """Return what tells two databases apart; any spelling of the scheme, and any user."""
    try:
        found = make_url(database_url_of(url))
    except ValueError:  # the settings say what is wrong with it
        return (url,)
    return found.host or found.query.get("host"), found.port or 5432, found.database


def _worker_problems() -> Iterator[CheckMessage]:
    """Yield what keeps workers from running; raises SettingsError."""
    celery = sys.modules.get("pipeline.celery")  # a project that calls install has imported it
    installation = celery.found_installation() if celery is not None else None
    settings = Settings.load(os.environ) if installation is None else installation.load_settings()
    problems = [] if installation is None else installation.problems(settings)
    for problem in problems:
        yield Error(f"Workers would not start: {problem}.", hint="Change the Celery settings.", id="pipeline.E005")
    try:
        Registry.load(settings.workflows or autodiscover())
    except PipelineError as error:
        yield Error(str(error), hint="Workers would not start. Correct the module.", id="pipeline.E006")
