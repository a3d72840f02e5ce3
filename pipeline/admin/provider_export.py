"""Match a provider's export with unresolved mutations.

A row that matches a mutation means that it happened. A mutation without a row stays unresolved, unless the operator
declares the export complete: then it did not happen. The operator also says where a row has the result of its mutation.
"""

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from pipeline.admin.given_results import GivenResult
from pipeline.admin.resolutions import MatchCandidate, MutationSummary, Resolution, ResolutionKind
from pipeline.domain.errors import InvalidInputError
from pipeline.domain.payloads import parsed_json


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
    found = _by_column(rows, column)
    if is_complete and not found:
        raise InvalidInputError("The export has no rows; expected at least one in a complete export.")
    by_value: dict[str, list[MutationSummary]] = {}
    for item in candidates:
        by_value.setdefault(item.value, []).append(item.mutation)
    shared = {item.value for item in candidates if item.is_shared}
    given: list[Resolution] = []
    unmatched: list[MutationSummary] = []
    ambiguous: list[MutationSummary] = []
    for value, about in by_value.items():
        matching = found.pop(value, [])
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
        unmatched_rows=sum(len(rows) for rows in found.values()),
    )


def _cell(row: Mapping[str, Any], column: str) -> Any:
    if column not in row:
        known = ", ".join(sorted(row)) or "none"
        raise InvalidInputError(f"A row has no column {column!r} for its result; its columns are: {known}.")
    return row[column]


def _parsed(value: Any, column: str) -> Any:
    """Return a result from a cell. The text of a CSV file is JSON."""
    return parsed_json(value, what=f"The text of the column {column!r}") if isinstance(value, str) else value


def _by_column(rows: Iterable[Mapping[str, Any]], column: str) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for number, row in enumerate(rows, start=1):
        if column not in row:
            known = ", ".join(sorted(row)) or "none"
            raise InvalidInputError(f"Row {number} has no column {column!r}; its columns are: {known}.")
        found.setdefault(str(row[column]).strip(), []).append(row)
    return found


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Read the rows of a CSV file with a header, or of JSON lines, in UTF-8."""
    _check_suffix(path)
    with path.open(newline="", encoding="utf-8-sig") as file:
        yield from rows_of(file, path.name)


def rows_of(file: TextIO, name: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of an open export; the name says its format."""
    path = Path(name)
    _check_suffix(path)
    try:
        yield from _read_csv(file, path) if path.suffix == ".csv" else _read_json_lines(file, path)
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path.name} is not in UTF-8 ({error.reason}); save it as UTF-8 first.") from None
    except csv.Error as error:
        raise InvalidInputError(f"{path.name} cannot be read as CSV: {error}.") from None


def _check_suffix(path: Path) -> None:
    if path.suffix not in (".csv", ".jsonl", ".ndjson"):
        raise InvalidInputError(f"{path.name} is neither .csv nor .jsonl; expected an export in one of these formats.")


def _read_csv(file: TextIO, path: Path) -> Iterator[dict[str, Any]]:
    reader = csv.DictReader(file)
    names = [name.strip() for name in reader.fieldnames or ()]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise InvalidInputError(f"{path.name} has the column {doubled[0]!r} twice; expected each name once.")
    reader.fieldnames = names
    for number, row in enumerate(reader, start=1):
        if None in row or None in row.values():
            raise InvalidInputError(f"Row {number} of {path.name} does not have {len(names)} cells, as the header has.")
        yield dict(row)


def _read_json_lines(file: TextIO, path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            yield _json_object(line, number, path)


def _json_object(line: str, number: int, path: Path) -> dict[str, Any]:
    row = parsed_json(line, what=f"Line {number} of {path.name}")
    if not isinstance(row, dict):
        raise InvalidInputError(f"Line {number} of {path.name} is a {type(row).__name__}; expected an object.")
    return row
