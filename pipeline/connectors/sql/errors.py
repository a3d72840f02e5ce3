"""What a database error says about a transaction that was to be carried out.

Until COMMIT is sent every error is definite: what was done in the transaction goes away with it. At COMMIT
only the database's own refusal is; a connection that breaks there leaves the outcome unknown.
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
_RETRYABLE_CODES = frozenset({"40001", "40P01"})  #: the database chose another transaction over this one
_DENIED_CODES = frozenset({"42501", "28000", "28P01"})
_DENIED_PHRASES = ("authentication failed", "no password supplied", "no pg_hba.conf entry", "access denied")
_MISSING_TABLE_PHRASES = ("does not exist", "no such table", "doesn't exist")


class UnknownCommitError(Exception):
    """The database was asked for something final, and nobody knows yet how that ended."""


class ErrorText:
    """How errors of one operation are told: its name, and what must not be shown taken out."""

    def __init__(self, name: str, hidden: tuple[str, ...] = ()) -> None:
        self.name, self.hidden = name, hidden

    def describe(self, error: BaseException) -> str:
        """The database's own words. What is hidden is found where it stands by itself, so a short one spoils little."""
        words = _first_line(error)
        for value in self.hidden:
            words = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", HIDDEN, words)
        return f"{self.name}: {words}"


def error_before_commit(error: Exception, words: ErrorText) -> HandlerError:
    """What to raise when it was rolled back."""
    if isinstance(error, HandlerError):
        return error
    code, text, said = _sqlstate(error), words.describe(error), _first_line(error)
    if code in _DENIED_CODES or any(phrase in said.lower() for phrase in _DENIED_PHRASES):
        return AuthError(f"{text}. Nothing was done; check the connector's user and what it may do.")
    if TABLE_NAME in said and any(phrase in said for phrase in _MISSING_TABLE_PHRASES):
        return LogicError(f"{text}. Nothing was done; create the table with create_effects_table.")
    is_database = isinstance(error, DBAPIError) and not isinstance(error, _REFUSALS)
    if is_database or code in _RETRYABLE_CODES or isinstance(error, PoolTimeoutError):
        return TransientError(f"{text}. Nothing was done.")
    return LogicError(f"{text}. It was rolled back.")


def error_at_claim(error: Exception, words: ErrorText) -> Exception:
    """What to raise when the key could not be taken: somebody else may hold it, and may yet commit."""
    definite = error_before_commit(error, words)
    if not isinstance(definite, TransientError):
        return definite
    return UnknownCommitError(f"{words.describe(error)}. Another transaction may be carrying out the same call.")


def error_at_commit(error: Exception, words: ErrorText) -> Exception:
    """What to raise when COMMIT did not end well."""
    is_broken = isinstance(error, DBAPIError) and error.connection_invalidated
    if _sqlstate(error) in _RETRYABLE_CODES or (isinstance(error, _REFUSALS) and not is_broken):
        return error_before_commit(error, words)
    return UnknownCommitError(f"{words.describe(error)}. COMMIT was sent, and may or may not have been carried out.")


def _first_line(error: BaseException) -> str:
    """The kind of an error and its first line: what follows repeats values, and SQLAlchemy adds parameters."""
    own = getattr(error, "orig", None) or error
    first = next(iter(str(own).strip().splitlines()), "").partition("[SQL")[0].strip()
    return f"{type(own).__name__}: {first}".removesuffix(": ")


def _sqlstate(error: BaseException) -> str | None:
    """The five characters by which databases name errors, where the driver tells."""
    own = getattr(error, "orig", None)
    found = getattr(own, "pgcode", None) or getattr(own, "sqlstate", None)
    return found if isinstance(found, str) else None
