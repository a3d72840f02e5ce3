"""Print lists as plain columns, with whole ids and a long note beside or below each row.

The width is the terminal's. In a pipe it is COLUMNS, or unlimited. Nothing is cut. Only terminals get colour.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from textwrap import wrap
from typing import TypeVar

from rich.console import Console
from rich.text import Text

from pipeline.cli.common import printable

_GAP = "  "
_MIN_NOTE_WIDTH = 40
_UNLIMITED_WIDTH = 1_000_000
#: Style by the first word of a cell, in ``_STYLED_COLUMNS`` only, and of what waits for an operator.
KIND_STYLES = {
    "error": "red",
    "failed": "red",
    "broken": "bold red",
    "broken_invariant": "bold red",
    "crashed": "red",
    "overdue": "yellow",
    "gone": "yellow",
    "runs": "green",
    "indeterminate": "red",
    "late_effect": "bold red",
    "quarantined": "yellow",
    "paused": "yellow",
    "maintenance": "yellow",
    "needs_reconcile": "yellow",
    "active": "green",
    "committed": "dim",
    "applied": "green",
    "approval": "yellow",
    "blocked": "red",
    "breaker": "yellow",
    "consumed": "dim",
}
_STYLED_COLUMNS = frozenset({"status", "kind", "severity"})

Cells = Sequence[object]
T = TypeVar("T")


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Cells], notes: Iterable[str] = (), *, note: str = ""
) -> None:
    """Print rows under a title. ``notes``: a longer text per row, as last column where it fits, else below."""
    out = Console(highlight=False)
    for line in table_lines(
        [*columns],
        [[printable(cell) for cell in row] for row in rows],
        [printable(each) for each in notes],
        note,
        line_width(out),
    ):
        if line is None:
            out.print(title, style="bold", markup=False, soft_wrap=True)
        else:
            out.print(line, soft_wrap=True, markup=False)


def table_lines(
    columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str], note: str, width: int
) -> Iterator[Text | None]:
    """Yield the lines of a list; None stands for its title."""
    yield None
    if not rows:
        return
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    used = sum(widths) + len(_GAP) * len(widths)
    beside = any(notes) and width - used >= min(_MIN_NOTE_WIDTH, max(map(len, notes), default=0))
    yield _line([*columns, note] if beside else columns, widths, styled=False)
    for number, row in enumerate(rows):
        text = notes[number] if notes else ""
        if beside:
            first, *rest = wrap(text, width - used, break_long_words=False, break_on_hyphens=False) or [""]
            yield _line([*row, first], widths, columns=columns)
            yield from (Text(" " * used + each) for each in rest)
        else:
            yield _line(row, widths, columns=columns)
            below = wrap(text, max(width - 4, 20), break_long_words=False, break_on_hyphens=False)
            yield from (Text("    " + each, style="dim") for each in below)


def first_rows(found: Sequence[T], limit: int) -> tuple[list[T], bool]:
    """Cut a list that was read with one row too many; return also whether there are more."""
    return [*found[:limit]], len(found) > limit


def count_text(count: str, order: str, *, is_more: bool) -> str:
    """Format how many are listed: `50 events`, or `the newest 50 events; there are more`."""
    return f"the {order} {count}; there are more" if is_more else count


def print_fields(*pairs: tuple[str, object]) -> None:
    """Print names and values, one per line; skip empty values."""
    shown = [(name, printable(value, lines=True)) for name, value in pairs if value not in (None, "", ())]
    widest = max((len(name) for name, _ in shown), default=0)
    out = Console(highlight=False)
    for name, value in shown:
        text = Text(name.ljust(widest), style="dim") + Text(_GAP + value, style="default")
        out.print(text, soft_wrap=True)


def line_width(out: Console) -> int:
    """Return the width of a line: the terminal's, COLUMNS, or unlimited in a pipe."""
    return out.width if out.is_terminal or os.environ.get("COLUMNS") else _UNLIMITED_WIDTH


def _line(cells: Sequence[str], widths: Sequence[int], *, columns: Sequence[str] = (), styled: bool = True) -> Text:
    line = Text(style="" if styled else "bold")
    for number, cell in enumerate(cells):
        last = number == len(cells) - 1
        padded = cell if last or number >= len(widths) else cell.ljust(widths[number]) + _GAP
        named = number < len(columns) and columns[number] in _STYLED_COLUMNS
        line.append(padded, style=KIND_STYLES.get(cell.partition(":")[0].partition(",")[0], "") if named else "")
    line.rstrip()
    return line
