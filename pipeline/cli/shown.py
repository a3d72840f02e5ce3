"""What several commands need: the registry, a person, tables and JSON."""

import getpass
import json
import os
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipeline.config import Settings
from pipeline.domain.errors import InvalidInputError
from pipeline.domain.values import Person
from pipeline.runtime.registry import Registry

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Reason = Annotated[str, typer.Option("--reason", "-m", help="Why; it is kept in the audit.")]
By = Annotated[str, typer.Option("--by", help="Who; by default the user of this shell.", show_default=False)]


def registry() -> Registry:
    """What PIPELINE_WORKFLOWS names. Modules are found in the current folder too, as `celery` finds them."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return Registry.load(Settings.load(os.environ).workflows)


def person(by: str, reason: str) -> Person:
    """Who acts, and why."""
    return Person(name=by or getpass.getuser(), reason=reason)


def uuid(value: str, what: str = "mutation") -> UUID:
    """An id as people type it."""
    try:
        return UUID(value)
    except ValueError:
        raise InvalidInputError(f"{value!r} is not the id of a {what}; expected a UUID as the lists show it.") from None


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table whose cells fold instead of being cut."""
    made = Table(title=title, title_justify="left")
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*(escape(str(cell)) for cell in row))
    Console().print(made)


def as_json(value: Any) -> None:
    """Print a value for a program to read."""
    typer.echo(json.dumps(value, indent=2, default=_plain))


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return str(value)
