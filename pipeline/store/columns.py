"""What the tables are made of: where they live, and short words for their columns and checks."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from sqlalchemy import CheckConstraint, Column, MetaData, Text, text
from sqlalchemy.dialects.postgresql import TIMESTAMP

SCHEMA = "pipeline"

metadata = MetaData(
    schema=SCHEMA,
    naming_convention={
        "pk": "%(table_name)s_pk",
        "fk": "%(table_name)s_%(column_0_name)s_fk",
        "uq": "%(table_name)s_%(column_0_N_name)s_once",
        "ck": "%(table_name)s_%(constraint_name)s",
    },
)


def one_of(column: str, members: type[StrEnum]) -> CheckConstraint:
    """The column holds a member of the enum and nothing else."""
    return CheckConstraint(f"{column} IN ({_quoted(members)})", name=f"{column}_known")


def _quoted(members: Iterable[StrEnum]) -> str:
    return ", ".join(f"'{member.value}'" for member in members)


def check(name: str, rule: str) -> CheckConstraint:
    """A sentence that must be true of every row."""
    return CheckConstraint(rule, name=name)


def instant(name: str, **kwargs: Any) -> Column[Any]:
    """A point in time, with its zone."""
    return Column(name, TIMESTAMP(timezone=True), **kwargs)


def now(name: str) -> Column[Any]:
    """The time at which the row came into being."""
    return instant(name, nullable=False, server_default=text("pipeline.clock()"))


def words(name: str, default: str | None = None, **kwargs: Any) -> Column[Any]:
    """Text that is always there."""
    server_default = None if default is None else text(f"'{default}'")
    return Column(name, Text, nullable=False, server_default=server_default, **kwargs)
