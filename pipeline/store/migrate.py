"""Migrate a database to the version of this code, and refuse to run on a database that does not fit.

The migrations ship inside the package, so an installed wheel can migrate without a checkout. An advisory lock makes a
second migration wait for the first; it then finds nothing to do. Only a process that migrates imports Alembic. Every
other process reads the version of the database and compares.
"""

from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, text

from pipeline.domain.errors import InvalidInputError, SchemaVersionError, UnsupportedSchemaError
from pipeline.store.database import Database
from pipeline.store.schema import SCHEMA

if TYPE_CHECKING:
    from alembic.config import Config

_ONE_AT_A_TIME = text("SELECT pg_advisory_xact_lock(hashtext('pipeline.migrations'))")
#: A migration waits for transactions that hold its tables, unless its role or PGOPTIONS set another timeout.
_RESET_LOCK_TIMEOUT = text("SET LOCAL lock_timeout TO DEFAULT")
#: A statement planned while its table was empty stays a sequential scan until the next ANALYZE.
_ANALYZE = text("ANALYZE")
_IS_MIGRATED = text(f"SELECT to_regclass('{SCHEMA}.alembic_version') IS NOT NULL")
_VERSION = text(f"SELECT version_num FROM {SCHEMA}.alembic_version")
#: Whether the schema holds a table, a view, a sequence or a function besides Alembic's table and its index.
_HAS_OBJECTS = text(f"""
SELECT EXISTS (SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
               WHERE n.nspname = '{SCHEMA}' AND c.relname NOT LIKE 'alembic_version%')
  OR EXISTS (SELECT FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = '{SCHEMA}')
""")
_OLDEST_COMPATIBLE_CODE = text("SELECT pipeline.oldest_compatible_code()")


def upgrade(db: Database, revision: str = "head") -> str:
    """Migrate forward and return the version the database is at."""
    from alembic import command

    with db.engine.begin() as connection:
        connection.execute(_RESET_LOCK_TIMEOUT)
        connection.execute(_ONE_AT_A_TIME)
        _require_upgradable(connection)
        command.upgrade(_config(connection), revision)
        connection.execute(_ANALYZE)
        return current_version(connection) or ""


def upgrade_sql(since: str | None = None) -> str:
    """Return the SQL that migrates from this version to the newest, for an administrator to run; None: from nothing."""
    from alembic import command

    known = _versions()
    if since is not None and since not in known:
        raise InvalidInputError(f"There is no schema version {since!r}; expected one of {', '.join(known)}, or none.")
    config = _config(None)
    config.output_buffer = written = StringIO()
    command.upgrade(config, f"{since}:head" if since else "head", sql=True)
    return written.getvalue()


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
    return _versions()[-1]


def require_current(db: Database) -> None:
    """Refuse to work on a database that is older than this code, or newer and no longer compatible with it.

    A deployment that only adds to the schema is rolled out while workers of the one before still run and restart.
    """
    with db.engine.connect() as connection:
        require_version(connection)


def require_version(connection: Connection) -> None:
    """Refuse the database of a connection for the reasons of ``require_current``."""
    expected = expected_version()
    found = current_version(connection)
    if found == expected:
        return
    is_newer = found is not None and found > expected  # versions are numbers with leading zeros
    if is_newer and connection.scalar(_OLDEST_COMPATIBLE_CODE) <= expected:
        return
    if not is_newer:
        _require_upgradable(connection)
    raise SchemaVersionError(found, expected, is_newer=is_newer)


def _require_upgradable(connection: Connection) -> None:
    """Refuse a database from which no migration leads here.

    - It is at a version from before the first release: those migrations are gone.
    - Its schema has objects and no version: other code, or a broken restore, made them.
    - It is at a version that this code does not know: newer code migrated it.
    """
    versions, found = _versions(), current_version(connection)
    if found is None:
        if connection.scalar(_HAS_OBJECTS):
            raise UnsupportedSchemaError(None, versions[0], SCHEMA)
    elif found < versions[0]:
        raise UnsupportedSchemaError(found, versions[0], SCHEMA)
    elif found > versions[-1]:
        raise SchemaVersionError(found, versions[-1], is_newer=True)


def migrations_path() -> Path:
    """Where the migrations are: beside the modules in a wheel, beside the package in a checkout."""
    package = Path(__file__).parent.parent
    shipped = package / "migrations"
    return shipped if shipped.is_dir() else package.parent / "migrations"


def _versions() -> list[str]:
    """The versions of the migrations, oldest first."""
    return sorted(path.name.partition("_")[0] for path in (migrations_path() / "versions").glob("*_*.py"))


def _config(connection: Connection | None) -> "Config":
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(migrations_path()).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config
