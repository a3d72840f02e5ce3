"""Bringing a database to the version this code was written for, and refusing to run on one it does not fit.

The migrations ship inside the package, so an installed wheel can migrate without a checkout. Two
migrations at once are one after the other: an advisory lock lets the second find nothing to do.
Alembic is imported by whoever migrates; every other process only looks which version it finds.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, text

from pipeline.domain.errors import SchemaVersionError
from pipeline.store.database import Database
from pipeline.store.schema import SCHEMA

if TYPE_CHECKING:
    from alembic.config import Config

_ONE_AT_A_TIME = text("SELECT pg_advisory_xact_lock(hashtext('pipeline.migrations'))")
#: A migration waits for whoever works with its tables, unless its role or PGOPTIONS say otherwise.
_RESET_LOCK_TIMEOUT = text("SET LOCAL lock_timeout TO DEFAULT")
#: A statement planned while its table was empty stays a sequential scan until the next ANALYZE.
_ANALYZE = text("ANALYZE")
_IS_MIGRATED = text(f"SELECT to_regclass('{SCHEMA}.alembic_version') IS NOT NULL")
_VERSION = text(f"SELECT version_num FROM {SCHEMA}.alembic_version")
_OLDEST_COMPATIBLE_CODE = text("SELECT pipeline.oldest_compatible_code()")


def upgrade(db: Database, revision: str = "head") -> str:
    """Migrate forward and return the version the database is at."""
    from alembic import command

    with db.engine.begin() as connection:
        connection.execute(_RESET_LOCK_TIMEOUT)
        connection.execute(_ONE_AT_A_TIME)
        command.upgrade(_config(connection), revision)
        connection.execute(_ANALYZE)
        return current_version(connection) or ""


def downgrade(db: Database, revision: str) -> None:
    """Migrate backward, for development; production rolls forward."""
    from alembic import command

    with db.engine.begin() as connection:
        connection.execute(_RESET_LOCK_TIMEOUT)
        connection.execute(_ONE_AT_A_TIME)
        command.downgrade(_config(connection), revision)


def current_version(connection: Connection) -> str | None:
    """The version the database is at, or None when it was never migrated."""
    return connection.scalar(_VERSION) if connection.scalar(_IS_MIGRATED) else None


def expected_version() -> str:
    """The version this code was written for."""
    return max(path.name.partition("_")[0] for path in (migrations_path() / "versions").glob("*_*.py"))


def require_current(db: Database) -> None:
    """Refuse to work on a database that is older than this code, or newer and no longer meant for it.

    A release that only adds to the schema is rolled out while workers of the one before go on, and are restarted.
    """
    with db.engine.connect() as connection:
        found = current_version(connection)
        if found == expected_version():
            return
        is_newer = found is not None and found > expected_version()  # versions are numbers with leading zeros
        if is_newer and connection.scalar(_OLDEST_COMPATIBLE_CODE) <= expected_version():
            return
    raise SchemaVersionError(found, expected_version(), is_newer=is_newer)


def migrations_path() -> Path:
    """Where the migrations are: beside the modules in a wheel, beside the package in a checkout."""
    package = Path(__file__).parent.parent
    shipped = package / "migrations"
    return shipped if shipped.is_dir() else package.parent / "migrations"


def _config(connection: Connection) -> "Config":
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(migrations_path()).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config
