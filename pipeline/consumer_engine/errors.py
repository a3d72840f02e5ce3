"""What goes wrong in the engine, and the three kinds of it.

PipelineError
├── TransactionException            one item failed in one step; ``category`` says of which kind
├── FetchException                  nothing can be fetched: the loop has ended
│   └── FetchTimeoutException       because the source did not answer in time
├── ConsumerLoopTimeoutException    the loop's own time is up
└── LeftBehindException             too many calls did not end when their time was up

The names are those of the specification.
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
    """The kinds of failure. Only the task's own code can say that one is business."""

    BUSINESS = "business"  #: the item is wrong: another attempt would fail the same way
    SYSTEM = "system"  #: something around it is wrong: another attempt may succeed
    TIMEOUT = "timeout"  #: an attempt, or the item as a whole, took too long


class TransactionException(PipelineError):  # noqa: N818 - the specification's name
    """An item failed. Raised by a task with ``ExceptionType.BUSINESS`` to say that trying again is no use."""

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
        """What can be stored about it."""
        cause = None if self.__cause__ is None else error_message(self.__cause__)
        message, category = error_message(self), self.category.value
        return {"message": message, "category": category, "transaction_id": self.transaction_id, "cause": cause}


class FetchException(PipelineError):  # noqa: N818 - the specification's name
    """The source failed and its attempts are spent, or it gave something that is no item. The loop has ended."""

    category = ExceptionType.SYSTEM

    def __init__(self, message: str, report: "LoopReport | None" = None) -> None:
        self.report = report
        super().__init__(message)


class FetchTimeoutException(FetchException):
    """The source did not answer in time and its attempts are spent. The loop has ended."""

    category = ExceptionType.TIMEOUT


class ConsumerLoopTimeoutException(PipelineError):  # noqa: N818 - the specification's name
    """The time of the whole loop is up. What was being worked on is left, unacknowledged."""

    category = ExceptionType.TIMEOUT

    def __init__(self, message: str, report: "LoopReport | None" = None) -> None:
        self.report = report
        super().__init__(message)


class AbandonedCallsException(PipelineError):  # noqa: N818 - named like the others
    """Too many calls outlived their limits and still run. What was being worked on is left, unacknowledged."""

    category = ExceptionType.TIMEOUT

    def __init__(self, message: str, report: "LoopReport | None" = None) -> None:
        self.report = report
        super().__init__(message)


def error_message(error: BaseException) -> str:
    """What an error says; its type when it says nothing. What pydantic shows of the input is left out: it is
    the payload as a rule."""
    try:
        if isinstance(error, ValidationError):
            return "; ".join(_problems(error))
        return str(error) or repr(error)
    except Exception:  # noqa: BLE001 - the error is the task's, and so is its __str__
        return f"{type(error).__qualname__}, which cannot say what happened"


def _problems(error: ValidationError) -> Iterator[str]:
    yield f"{error.title} does not fit"
    for each in error.errors(include_url=False, include_input=False, include_context=False):
        yield f"{'.'.join(str(part) for part in each['loc']) or 'it'}: {each['msg']}"


def as_transaction_exception(error: BaseException, transaction_id: str | None) -> TransactionException:
    """The error as one of the three kinds, with the item it is about and what it came from.

    What a task raised itself is copied before the id is put in, because nothing keeps a task from
    raising the same object for two items at once.
    """
    if not isinstance(error, TransactionException):
        return TransactionException(error_message(error), ExceptionType.SYSTEM, transaction_id, cause=error)
    if error.transaction_id == transaction_id:
        return error
    own = copy.copy(error)
    own.transaction_id = transaction_id
    own.__cause__ = error.__cause__
    return own.with_traceback(error.__traceback__)


def printable_id(transaction_id: str) -> str:
    """An id as it can stand in a log: one with line breaks in it must not look like a line of its own."""
    return transaction_id if transaction_id.isprintable() else repr(transaction_id)


def failure_description(failure: TransactionException) -> str:
    """What failed, of which type, and where: ``KeyError: 'customer' (imports.py:41)``."""
    cause = failure.__cause__
    is_wrapped = (
        type(failure) is TransactionException and cause is not None and error_message(cause) == error_message(failure)
    )
    raised: BaseException = cause if is_wrapped and cause is not None else failure
    kind = type(raised).__qualname__
    words = " ".join(error_message(raised).splitlines())
    told = words if raised is failure or words.startswith(kind) else f"{kind}: {words}"
    return f"{told}{error_location(raised)}"
