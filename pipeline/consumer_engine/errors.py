"""Errors of the engine and their three kinds. The names are those of the specification.

PipelineError
├── TransactionException            one item failed in one step; ``category`` is its kind
├── FetchException                  the source failed: the loop has ended
│   └── FetchTimeoutException       the source did not respond in time
├── ConsumerLoopTimeoutException    the loop's own time is up
└── AbandonedCallsException         too many calls still run after their time was up
"""

import copy
from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from pipeline.domain.errors import PipelineError
from pipeline.domain.failures import error_location

if TYPE_CHECKING:
    from pipeline.consumer_engine.lifecycle import LoopReport


class ExceptionType(StrEnum):
    """Kinds of failure. Only the task's own code can declare one as business."""

    BUSINESS = "business"  #: the item is wrong: another attempt would fail the same way
    SYSTEM = "system"  #: something around it is wrong: another attempt may succeed
    TIMEOUT = "timeout"  #: an attempt, or the item as a whole, took too long


class TransactionException(PipelineError):  # noqa: N818 - the specification's name
    """An item failed.

    A task raises it with ``ExceptionType.BUSINESS`` when another attempt would be no use.
    """

    def __init__(
        self,
        message: str,
        category: ExceptionType = ExceptionType.SYSTEM,
        transaction_id: str | None = None,
        cause: BaseException | None = None,
    ) -> None:
        self.category, self.transaction_id = ExceptionType(category), transaction_id
        super().__init__(message)
        self.__cause__ = cause

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that can be stored."""
        cause = None if self.__cause__ is None else error_message(self.__cause__)
        message, category = error_message(self), self.category.value
        return {"message": message, "category": category, "transaction_id": self.transaction_id, "cause": cause}


class FetchException(PipelineError):  # noqa: N818 - the specification's name
    """The source failed in all its attempts, or gave something else than items. The loop has ended."""

    category = ExceptionType.SYSTEM

    def __init__(self, message: str, report: "LoopReport | None" = None) -> None:
        self.report = report
        super().__init__(message)


class FetchTimeoutException(FetchException):
    """The source did not respond in time in all its attempts. The loop has ended."""

    category = ExceptionType.TIMEOUT


class ConsumerLoopTimeoutException(PipelineError):  # noqa: N818 - the specification's name
    """The time of the whole loop is up. Open items are left unacknowledged."""

    category = ExceptionType.TIMEOUT

    def __init__(self, message: str, report: "LoopReport | None" = None) -> None:
        self.report = report
        super().__init__(message)


class AbandonedCallsException(PipelineError):  # noqa: N818 - named like the others
    """Too many calls still run after their limits. Open items are left unacknowledged."""

    category = ExceptionType.TIMEOUT

    def __init__(self, message: str, report: "LoopReport | None" = None) -> None:
        self.report = report
        super().__init__(message)


def error_message(error: BaseException) -> str:
    """Return the message of an error, or its repr if it has none.

    The input that pydantic would show is left out, because it usually is the payload.
    """
    try:
        if isinstance(error, ValidationError):
            return "; ".join(_problems(error))
        return str(error) or repr(error)
    except Exception:  # noqa: BLE001 - the error is the task's, and so is its __str__
        return f"{type(error).__qualname__}, whose message cannot be read"


def _problems(error: ValidationError) -> Iterator[str]:
    yield f"{error.title} does not fit"
    for each in error.errors(include_url=False, include_input=False, include_context=False):
        yield f"{'.'.join(str(part) for part in each['loc']) or 'it'}: {each['msg']}"


def as_transaction_exception(error: BaseException, transaction_id: str | None) -> TransactionException:
    """Return the error as one of the three kinds, with its item and its cause.

    Python's ``TimeoutError``, which asyncio, sockets and tasks raise, is a timeout. A task's own exception is
    copied before the id is set: the task may raise the same object for two items at once.
    """
    if not isinstance(error, TransactionException):
        category = ExceptionType.TIMEOUT if isinstance(error, TimeoutError) else ExceptionType.SYSTEM
        return TransactionException(error_message(error), category, transaction_id, cause=error)
    if error.transaction_id == transaction_id:
        return error
    own = copy.copy(error)
    own.transaction_id = transaction_id
    own.__cause__ = error.__cause__
    return own.with_traceback(error.__traceback__)


def printable_id(transaction_id: str) -> str:
    """Return an id for a log line. Line breaks are escaped, so that it stays one line."""
    return transaction_id if transaction_id.isprintable() else repr(transaction_id)


def failure_description(failure: TransactionException) -> str:
    """Return the type, message and place of a failure: ``KeyError: 'customer' (imports.py:41)``."""
    cause = failure.__cause__
    is_wrapped = (
        type(failure) is TransactionException and cause is not None and error_message(cause) == error_message(failure)
    )
    raised: BaseException = cause if is_wrapped and cause is not None else failure
    kind = type(raised).__qualname__
    message = " ".join(error_message(raised).splitlines())
    if raised is not failure and not message.startswith(kind):
        message = f"{kind}: {message}"
    return f"{message}{error_location(raised)}"
