"""The few shapes that generated pages are made of."""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TypeVar

State = TypeVar("State", bound=StrEnum)


def page(title: str, *parts: str) -> str:
    """A whole page that says it is generated; parts are separated by one empty line."""
    notice = "<!-- Written by `make docs` from the code. Edit the code, not this page. -->"
    return "\n\n".join((f"# {title}", notice, *(part.strip("\n") for part in parts))) + "\n"


def section(title: str, *parts: str) -> str:
    """A heading with what stands under it."""
    return "\n\n".join((f"## {title}", *parts))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells may hold anything, a pipe is escaped."""
    first, *rest = [f"| {' | '.join(_cell(cell) for cell in line)} |" for line in (head, *rows)]
    return "\n".join((first, "|" + "---|" * len(head), *rest))


def fold(rows: Iterable[Sequence[str]], column: int) -> list[list[str]]:
    """Make one row of rows that differ in one column only, in the order of the first of each."""
    found: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        found.setdefault((*row[:column], *row[column + 1 :]), []).append(row[column])
    return [[*rest[:column], " / ".join(cells), *rest[column:]] for rest, cells in found.items()]


def code(text: str) -> str:
    """Text as it is typed; nothing stays nothing."""
    return f"`{text}`" if text else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
