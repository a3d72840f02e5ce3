"""Answers out of a provider's own records: an export that lists what happened, matched with what is asked.

A row that matches a question says that it happened. What is not in the export is not answered, unless
the caller says that the export is complete: then absence means that it did not happen.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.client.desk import Answer, Given, Question
from pipeline.domain.errors import InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """What an import would do. Nothing has been changed by it."""

    given: tuple[Given, ...]
    unanswered: tuple[Question, ...]  #: questions that no row speaks of
    ambiguous: tuple[Question, ...]  #: questions that several rows speak of, or that share what they are matched by
    unmatched: int  #: rows that speak of no question


def preview(
    asked: Sequence[tuple[str, Question]], rows: Iterable[Mapping[str, Any]], column: str, *, complete: bool = False
) -> Preview:
    """Pair rows, by a column of theirs, with questions from ``Desk.asked_by``. Only clear pairs are answered."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for number, row in enumerate(rows, start=1):
        if column not in row:
            known = ", ".join(sorted(row)) or "none"
            raise InvalidInputError(f"Row {number} has no column {column!r}; its columns are: {known}.")
        found.setdefault(str(row[column]), []).append(row)
    by_value: dict[str, list[Question]] = {}
    for value, question in asked:
        by_value.setdefault(value, []).append(question)
    given: list[Given] = []
    unanswered: list[Question] = []
    ambiguous: list[Question] = []
    for value, about in by_value.items():
        matching = found.pop(value, [])
        if len(about) > 1 or len(matching) > 1:
            ambiguous.extend(about)
        elif matching:
            given.append(Given(question=about[0], answer=Answer.HAPPENED, result={"export": dict(matching[0])}))
        elif complete:
            given.append(Given(question=about[0], answer=Answer.DID_NOT_HAPPEN))
        else:
            unanswered.extend(about)
    unmatched = sum(len(rows) for rows in found.values())
    return Preview(given=tuple(given), unanswered=tuple(unanswered), ambiguous=tuple(ambiguous), unmatched=unmatched)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a CSV file with a header, or of a file of JSON lines, by its suffix."""
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8-sig") as file:
            yield from csv.DictReader(file)
        return
    if path.suffix not in (".jsonl", ".ndjson"):
        raise InvalidInputError(f"{path.name} is neither .csv nor .jsonl; expected an export in one of these formats.")
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _object(line, number, path)


def _object(line: str, number: int, path: Path) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InvalidInputError(f"Line {number} of {path.name} is no JSON: {error}.") from None
    if not isinstance(row, dict):
        raise InvalidInputError(f"Line {number} of {path.name} is a {type(row).__name__}; expected an object.")
    return row
