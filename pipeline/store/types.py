"""Types that Postgres has and SQLAlchemy does not know."""

from typing import Any

from sqlalchemy.types import UserDefinedType


class _PostgresType(UserDefinedType[Any]):
    """A type Postgres has and SQLAlchemy does not; values travel as text."""

    cache_ok = True
    name = ""

    def get_col_spec(self, **_: Any) -> str:
        return self.name


class Xid8(_PostgresType):
    """A transaction id that never wraps."""

    name = "xid8"


class Snapshot(_PostgresType):
    """Which transactions were visible at one instant."""

    name = "pg_snapshot"
