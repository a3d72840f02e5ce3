"""Classify a database error by when it happened in the transaction.

Before COMMIT every error is definite: the transaction is rolled back. At COMMIT only a refusal of the database is
definite. A connection that breaks at COMMIT leaves the outcome unknown.
"""

import re

from sqlalchemy.exc import (
    DataError,
    DBAPIError,
    IntegrityError,
    InternalError,
    NotSupportedError,
    ProgrammingError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from pipeline.connectors.sdk import HIDDEN
from pipeline.connectors.sql.effects import TABLE_NAME
from pipeline.domain.errors import AuthError, HandlerError, LogicError, TransientError

_REFUSALS = (DataError, IntegrityError, InternalError, NotSupportedError, ProgrammingError)
_RETRYABLE_CODES = frozenset({"40001", "40P01"})  #: a serialization failure or a deadlock
_DENIED_CODES = frozenset({"42501", "28000", "28P01"})
_DENIED_PHRASES = ("authentication failed", "no password supplied", "no pg_hba.conf entry", "access denied")
_MISSING_TABLE_PHRASES = ("does not exist", "no such table", "doesn't exist")


class UnknownCommitError(Exception):
    """A transaction may or may not have been committed."""


class ErrorText:
    """Describes errors of one operation: with its name, and without values that must be hidden."""

    def __init__(self, name: str, hidden: tuple[str, ...] = ()) -> None:
        self.name, self.hidden = name, hidden

    def describe(self, error: BaseException) -> str:
        """Return the database's message. Hidden values are replaced where they are whole tokens."""
        message = _first_line(error)
        for value in self.hidden:
            message = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", HIDDEN, message)
        return f"{self.name}: {message}"


def error_before_commit(error: Exception, texts: ErrorText) -> HandlerError:
    """Return the error for a transaction that was rolled back."""
    if isinstance(error, HandlerError):
        return error
    code, text, message = _sqlstate(error), texts.describe(error), _first_line(error)
    if code in _DENIED_CODES or any(phrase in message.lower() for phrase in _DENIED_PHRASES):
        return AuthError(f"{text}. Nothing was done; check the connector's user and what it may do.")
    if TABLE_NAME in message and any(phrase in message for phrase in _MISSING_TABLE_PHRASES):
        return LogicError(f"{text}. Nothing was done; create the table with create_effects_table.")
    is_database = isinstance(error, DBAPIError) and not isinstance(error, _REFUSALS)
    if is_database or code in _RETRYABLE_CODES or isinstance(error, PoolTimeoutError):
        return TransientError(f"{text}. Nothing was done.")
    return LogicError(f"{text}. It was rolled back.")


def error_at_claim(error: Exception, texts: ErrorText) -> Exception:
    """Return the error for a key that could not be claimed. Another transaction may hold it and may still commit."""
    definite = error_before_commit(error, texts)
    if not isinstance(definite, TransientError):
        return definite
    return UnknownCommitError(f"{texts.describe(error)}. Another transaction may be carrying out the same call.")


def error_at_commit(error: Exception, texts: ErrorText) -> Exception:
    """Return the error for a COMMIT that failed."""
    is_broken = isinstance(error, DBAPIError) and error.connection_invalidated
    if _sqlstate(error) in _RETRYABLE_CODES or (isinstance(error, _REFUSALS) and not is_broken):
        return error_before_commit(error, texts)
    return UnknownCommitError(f"{texts.describe(error)}. COMMIT was sent, and may or may not have been carried out.")


def _first_line(error: BaseException) -> str:
    """Return the type of an error and its first line. Later lines repeat values, and SQLAlchemy adds parameters."""
    own = getattr(error, "orig", None) or error
    first = next(iter(str(own).strip().splitlines()), "").partition("[SQL")[0].strip()
    return f"{type(own).__name__}: {first}".removesuffix(": ")


def _sqlstate(error: BaseException) -> str | None:
    """Return the SQLSTATE of an error, if the driver has it."""
    own = getattr(error, "orig", None)
    found = getattr(own, "pgcode", None) or getattr(own, "sqlstate", None)
    return found if isinstance(found, str) else None
