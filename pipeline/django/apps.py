"""Set the app up in a Django project: the database of the settings, checks, and the migration of our schema."""

import os
from typing import Any

from django.apps import AppConfig
from django.core.checks import Tags, register
from django.db.models.signals import post_migrate

from pipeline.django import checks
from pipeline.django.project import database_alias, database_url
from pipeline.domain.errors import SchemaVersionError
from pipeline.store import migrate
from pipeline.store.database import Database


class PipelineConfig(AppConfig):  # type: ignore[misc]  # Django ships no types
    """The app ``pipeline.django``."""

    name = "pipeline.django"
    label = "pipeline"
    verbose_name = "Pipeline"
    derived_url = ""  #: the URL of the database that was taken from DATABASES

    def ready(self) -> None:
        """Let workers, commands and the console use the database of the project, unless they are given another."""
        url = database_url(database_alias())
        if url is not None and not os.environ.get("PIPELINE_DATABASE_URL", "").strip():
            self.derived_url = os.environ["PIPELINE_DATABASE_URL"] = url
        register(checks.check_database_settings, "pipeline")
        register(checks.check_worker_settings, "pipeline")
        register(checks.check_schema, Tags.database)
        post_migrate.connect(_upgrade_schema, sender=self)


def _upgrade_schema(using: str, verbosity: int = 0, stdout: Any = None, **_: Any) -> None:
    """Migrate our schema with the project's own, also in a test database."""
    url = database_url(using) if using == database_alias() else None
    if url is None:
        return
    db = Database.connect_unpooled(url.replace("postgresql:", "postgresql+psycopg2:", 1))
    try:
        migrate.require_current(db)
    except SchemaVersionError as error:
        if error.is_newer:
            raise
        version = migrate.upgrade(db)
        if verbosity and stdout is not None:
            stdout.write(f"  Pipeline: the database {using!r} is at schema version {version}.")
