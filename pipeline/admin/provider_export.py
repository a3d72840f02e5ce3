"""Match a provider's export with unresolved mutations.

A row that matches a mutation means that it happened. A mutation without a row stays unresolved, unless the operator
declares the export complete: then it did not happen. The operator also says where a row has the result of its mutation.
"""

import csv
import os
import stat
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from pipeline.admin.given_results import GivenResult
from pipeline.admin.resolutions import MatchCandidate, MutationSummary, Resolution, ResolutionKind
from pipeline.domain.errors import InvalidInputError
from pipeline.domain.payloads import parsed_json
from pipeline.text import printable_text

MAX_LINE = 2**20  #: characters
MAX_COLUMNS = 1000
_MAX_NAMES = 20  #: columns that an error names


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportPreview:
    """What an import would do. Nothing is changed."""

    resolutions: tuple[Resolution, ...]
    not_in_export: tuple[MutationSummary, ...]  #: without a matching row
    ambiguous: tuple[MutationSummary, ...]  #: with several rows, or with a value that another mutation shares
    unmatched_rows: int  #: rows that match no unresolved mutation


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResults:
    """Where the rows of an export have the results of their mutations: exactly one of these."""

    column: str | None = None  #: holds the result; of a CSV file as JSON text
    external_id_column: str | None = None  #: holds the outside system's id, by which the connector fetches the result
    is_none: bool = False  #: the mutations have no result
    is_unchecked: bool = False

    def of(self, row: Mapping[str, Any]) -> GivenResult:
        """Return the result that a row gives."""
        if self.external_id_column is not None:
            value = str(_cell(row, self.external_id_column)).strip()
            return GivenResult(external_id=value, is_unchecked=self.is_unchecked)
        if self.column is None:
            return GivenResult(is_unchecked=self.is_unchecked)
        value = _cell(row, self.column)
        return GivenResult(value=_parsed(value, self.column), is_unchecked=self.is_unchecked)

    @property
    def is_given(self) -> bool:
        return self.is_none or self.column is not None or self.external_id_column is not None


_NOT_GIVEN = RowResults()


def preview(
    candidates: Sequence[MatchCandidate],
    rows: Iterable[Mapping[str, Any]],
    column: str,
    *,
    results: RowResults = _NOT_GIVEN,
    is_complete: bool = False,
) -> ImportPreview:
    """Pair rows, by one column, with ``Resolutions.match_candidates``. Only unambiguous pairs are resolved."""
    by_value: dict[str, list[MutationSummary]] = {}
    for item in candidates:
        by_value.setdefault(item.value, []).append(item.mutation)
    found, unmatched_rows = _by_column(rows, column, by_value)
    if is_complete and not (found or unmatched_rows):
        raise InvalidInputError("The export has no rows; expected at least one in a complete export.")
    shared = {item.value for item in candidates if item.is_shared}
    given: list[Resolution] = []
    unmatched: list[MutationSummary] = []
    ambiguous: list[MutationSummary] = []
    for value, about in by_value.items():
        matching = found.get(value, [])
        if len(about) > 1 or len(matching) > 1 or value in shared:
            ambiguous.extend(about)
        elif matching:
            (row,) = matching
            result = results.of(row) if results.is_given else None
            evidence = {"row": dict(row)}
            given.append(Resolution(mutation=about[0], kind=ResolutionKind.HAPPENED, result=result, evidence=evidence))
        elif is_complete:
            given.append(Resolution(mutation=about[0], kind=ResolutionKind.DID_NOT_HAPPEN))
        else:
            unmatched.extend(about)
    if is_complete and not any(item.kind is ResolutionKind.HAPPENED for item in given):
        raise InvalidInputError(
            "No row of the export matches an unresolved mutation. Probably the column is wrong. If none of them "
            "happened, resolve them with `pipeline resolve did_not_happen`."
        )
    return ImportPreview(
        resolutions=tuple(given),
        not_in_export=tuple(unmatched),
        ambiguous=tuple(ambiguous),
        unmatched_rows=unmatched_rows,
    )


def _cell(row: Mapping[str, Any], column: str) -> Any:
    if column not in row:
        raise InvalidInputError(f"A row has no column {column!r} for its result; its columns are: {_names(row)}.")
    return row[column]


def _names(row: Mapping[str, Any]) -> str:
    """Return the first columns of a row, for an error."""
    return ", ".join(printable_text(name, 100) for name in sorted(row)[:_MAX_NAMES]) or "none"


def _parsed(value: Any, column: str) -> Any:
    """Return a result from a cell. The text of a CSV file is JSON."""
    return parsed_json(value, what=f"The text of the column {column!r}") if isinstance(value, str) else value


def _by_column(
    rows: Iterable[Mapping[str, Any]], column: str, wanted: Collection[str]
) -> tuple[dict[str, list[Mapping[str, Any]]], int]:
    """Return the rows with a wanted value by that value, and how many others there are. Only two per value count."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    others = 0
    for number, row in enumerate(rows, start=1):
        if column not in row:
            raise InvalidInputError(f"Row {number} has no column {column!r}; its columns are: {_names(row)}.")
        value = str(row[column]).strip()
        if value not in wanted:
            others += 1
        elif len(matching := found.setdefault(value, [])) < 2:
            matching.append(row)
    return found, others


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Read the rows of a CSV file with a header, or of JSON lines, in UTF-8.

    A file that was changed meanwhile is refused: a row that is missing could mean that a mutation did not happen.
    """
    _check_suffix(path)
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a named pipe without a writer would wait for one
    except OSError as error:
        raise InvalidInputError(f"{path.name} cannot be opened: {error.strerror}.") from None
    before = os.fstat(opened)
    if not stat.S_ISREG(before.st_mode):
        os.close(opened)
        raise InvalidInputError(f"{path.name} is no regular file; expected an export, saved as a file.")
    with open(opened, newline="", encoding="utf-8-sig") as file:
        yield from rows_of(file, path.name)
        after = os.fstat(opened)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise InvalidInputError(
                f"{path.name} was changed while it was read. Nothing was changed; repeat this once it is complete."
            )


def rows_of(file: TextIO, name: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of an open export; the name says its format."""
    path = Path(name)
    _check_suffix(path)
    lines = _lines(file, path)
    try:
        yield from _read_csv(lines, path) if path.suffix.lower() == ".csv" else _read_json_lines(lines, path)
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path.name} is not in UTF-8 ({error.reason}); save it as UTF-8 first.") from None
    except csv.Error as error:
        raise InvalidInputError(f"{path.name} cannot be read as CSV: {error}.") from None


def _check_suffix(path: Path) -> None:
    if path.suffix.lower() not in (".csv", ".jsonl", ".ndjson"):
        raise InvalidInputError(f"{path.name} is neither .csv nor .jsonl; expected an export in one of these formats.")


def _lines(file: TextIO, path: Path) -> Iterator[str]:
    """Yield the lines of a file; refuse one that would fill the memory."""
    for number in count(1):
        line = file.readline(MAX_LINE + 1)
        if len(line) > MAX_LINE:
            raise InvalidInputError(f"Line {number} of {path.name} is longer than {MAX_LINE} characters.")
        if not line:
            return
        yield line


def _read_csv(lines: Iterator[str], path: Path) -> Iterator[dict[str, Any]]:
    reader = csv.reader(lines)
    names = [name.strip() for name in next(reader, ())]
    if len(names) > MAX_COLUMNS:
        raise InvalidInputError(f"{path.name} has {len(names)} columns; expected at most {MAX_COLUMNS}.")
    doubled = sorted(name for name, times in Counter(names).items() if times > 1)
    if doubled:
        raise InvalidInputError(f"{path.name} has the column {doubled[0]!r} twice; expected each name once.")
    for number, cells in enumerate(filter(None, reader), start=1):
        if len(cells) != len(names):
            raise InvalidInputError(f"Row {number} of {path.name} does not have {len(names)} cells, as the header has.")
        yield dict(zip(names, cells, strict=True))


def _read_json_lines(lines: Iterator[str], path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _json_object(line, number, path)


def _json_object(line: str, number: int, path: Path) -> dict[str, Any]:
    row = parsed_json(line, what=f"Line {number} of {path.name}")
    if not isinstance(row, dict):
        raise InvalidInputError(f"Line {number} of {path.name} is a {type(row).__name__}; expected an object.")
    return row
