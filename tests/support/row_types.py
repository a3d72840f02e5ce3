"""Compares rows with the types that statements name for them.

A row type is a description that no interpreter checks. The tests do: every row that a typed statement returns must
have each attribute of its type, with a value of the annotated type. A wrong type fails in the test that runs the
statement.
"""

import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated, Any, NewType, Union, get_args, get_origin, get_type_hints

from pipeline.store.connections import PooledConnection
from pipeline.store.database import Statement, Transaction

_MAX_ROWS = 5  #: of each result that are compared; the others come from the same columns


class RowTypeError(AssertionError):
    """A statement returned what its row type does not say."""


@functools.cache
def fields_of(row_type: Any) -> Mapping[str, Any]:
    """Return the attributes of a row type, those of its bases included."""
    return get_type_hints(row_type, include_extras=True)


def fits(value: object, hint: Any) -> bool:
    """Whether a value is what an annotation says."""
    return _check_of(hint)(value)


@functools.cache
def _check_of(hint: Any) -> Callable[[object], bool]:
    """Return the check of an annotation. It runs for nearly every value of a statement, so it is made only once."""
    if hint is Any:
        return lambda value: True
    if isinstance(hint, NewType):
        return _check_of(hint.__supertype__)
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        kinds = [extra for extra in args[1:] if isinstance(extra, type) and issubclass(extra, StrEnum)]
        known, check = [set(kind) for kind in kinds], _check_of(args[0])
        return lambda value: check(value) and all(value in each for each in known)
    if origin in (Union, types.UnionType):
        checks = [_check_of(each) for each in args]
        return lambda value: any(check(value) for check in checks)
    if origin is list:
        of_each = _check_of(args[0])
        return lambda value: isinstance(value, list) and all(map(of_each, value))
    expected = type(None) if hint is None else hint
    return lambda value: type(value) is expected


@functools.cache
def _checks_of(row_type: Any) -> Sequence[tuple[str, Any, Callable[[object], bool]]]:
    """Return each attribute of a row type with its annotation and its check."""
    return [(name, hint, _check_of(hint)) for name, hint in fields_of(row_type).items()]


def check_columns(statement: Statement[Any], columns: Sequence[str]) -> None:
    """Fail if a result lacks a column of its row type, or has one of another name in its place."""
    row_type = statement.row_type()
    missing = [name for name in fields_of(row_type) if name not in columns] if columns and row_type is not Any else []
    if missing:
        raise RowTypeError(f"{row_type.__name__} has {missing}; the columns are {list(columns)}, of\n{statement.text}")


def check_rows(statement: Statement[Any], rows: Sequence[Any]) -> None:
    """Fail if a value of a row is not what the row type says."""
    row_type = statement.row_type()
    for row in () if row_type is Any else rows[:_MAX_ROWS]:
        for name, hint, check in _checks_of(row_type):
            value = getattr(row, name)
            if not check(value):
                raise RowTypeError(f"{row_type.__name__}.{name} is {value!r}; expected {hint}, of\n{statement.text}")


def columns_of(connection: PooledConnection, statement: Statement[Any]) -> Sequence[str]:
    """Return the columns of a prepared statement; none if this connection prepares nothing."""
    prepared = connection._session.prepared.get(statement.text)
    return () if prepared is None or prepared.make_row is None else prepared.make_row.__self__._fields  # type: ignore[attr-defined]


@contextmanager
def checked() -> Iterator[None]:
    """Check all that typed statements return in this process."""
    plain_all = Transaction.all

    def checked_all(self: Transaction, statement: Statement[Any], /, **params: Any) -> Sequence[Any]:
        rows = plain_all(self, statement, **params)
        if isinstance(statement, Statement) and isinstance(self.connection, PooledConnection):
            check_columns(statement, columns_of(self.connection, statement))
            check_rows(statement, rows)
        return rows

    Transaction.all = checked_all  # type: ignore[method-assign]
    try:
        yield
    finally:
        Transaction.all = plain_all  # type: ignore[method-assign]
