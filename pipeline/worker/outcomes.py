"""What follows when a call or a look ends: decided without I/O, from what came back.

The mutator asks ``judge`` and writes down what it says. A call that answered is believed. An error is
read by its operation. Where nobody knows, one look is taken at once, and after it the doubt stands.
"""

import logging
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any

from pipeline.connectors.error_table import ErrorMeaning, ErrorReading
from pipeline.connectors.sdk import Applied as Found
from pipeline.connectors.sdk import Connector, NotFound, Operation, Retry
from pipeline.consumer_engine.bounded import FinishedCall, TimedOutError
from pipeline.domain.errors import PayloadError
from pipeline.domain.failures import Failure, FailureKind, classify
from pipeline.domain.payloads import json_copy
from pipeline.domain.values import Limits

log = logging.getLogger(__name__)

_FAILURE_KINDS = {
    ErrorMeaning.REFUSED: FailureKind.LOGIC,
    ErrorMeaning.NOT_NOW: FailureKind.TRANSIENT,
    ErrorMeaning.DENIED: FailureKind.AUTH,
}
_UNKNOWN_READING = ErrorReading(meaning=ErrorMeaning.UNKNOWN)


class NextAction(StrEnum):
    """What the mutator does next with a mutation."""

    APPLIED = "applied"  #: it happened
    FAILED = "failed"  #: it did not happen: the outside system said so
    ABSENT = "absent"  #: it was looked for and not found
    RETRY = "again"  #: it did not happen this time: attempt it again after a pause
    RECONCILE = "look"  #: nobody knows: look once, at once
    DOUBT = "doubt"  #: nobody knows: the background asks, or a person


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDecision:
    """A step, and what it needs."""

    action: NextAction
    result: Any = None
    failure: Failure | None = None
    pause: timedelta = timedelta(0)

    @property
    def reason(self) -> str:
        return self.failure.message if self.failure else ""

    @property
    def has_response(self) -> bool:
        """Whether somebody must have answered: a refused connection, too, is known not to have happened this time."""
        return self.failure is None or self.failure.kind is not FailureKind.TRANSIENT


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFacts:
    """What is known of a mutation when its call or look has ended."""

    connector: Connector
    operation: Operation[Any]
    params: dict[str, Any]
    attempts: int
    time_left: timedelta  #: how long the cohort may still take
    is_reconcile: bool = False  #: what ended is a look, not the call
    is_overdue: bool = False  #: the call did not return by its deadline, and may still be at it
    doubt_reason: str = ""  #: why the call's own outcome is unknown


def decide(tried: CallFacts, finished: FinishedCall, *, jitter: float = 0.0) -> CallDecision:
    """What follows from how this call or look ended. An end that cannot be read is a doubt, and nobody else's."""
    try:
        return _after_reconcile(tried, finished) if tried.is_reconcile else _after_call(tried, finished, jitter)
    except Exception as error:
        log.exception("how %s.%s ended could not be judged", tried.connector.name, tried.operation.name)
        words = f"how it ended could not be judged ({type(error).__name__})"  # what the error says is not scrubbed
        return CallDecision(action=NextAction.DOUBT, failure=_unknown_outcome(tried, words, overdue=tried.is_overdue))


def _after_call(tried: CallFacts, finished: FinishedCall, chance: float) -> CallDecision:
    if finished.error is None:
        return CallDecision(action=NextAction.APPLIED, result=finished.value)
    reading = _UNKNOWN_READING if isinstance(finished.error, TimedOutError) else tried.operation.reading(finished.error)
    words = error_message(tried, finished.error)
    if reading.meaning is ErrorMeaning.UNKNOWN:
        failure = _unknown_outcome(tried, words, overdue=isinstance(finished.error, TimedOutError))
        return CallDecision(
            action=NextAction.RECONCILE if tried.operation.can_reconcile else NextAction.DOUBT, failure=failure
        )
    failure = Failure(
        kind=_FAILURE_KINDS[reading.meaning],
        message=words,
        error_type=type(finished.error).__qualname__,
        retry_after=reading.after or timedelta(0),
    )
    pause = max(failure.retry_after, tried.operation.retry.backoff.delay(tried.attempts, jitter=chance))
    fits = pause + tried.operation.timeout <= tried.time_left
    if reading.meaning is ErrorMeaning.NOT_NOW and tried.attempts < tried.operation.retry.max_attempts and fits:
        return CallDecision(action=NextAction.RETRY, failure=failure, pause=pause)
    return CallDecision(action=NextAction.FAILED, failure=failure)


def _after_reconcile(tried: CallFacts, finished: FinishedCall) -> CallDecision:
    if isinstance(finished.value, Found):
        return CallDecision(action=NextAction.APPLIED, result=finished.value.result)
    asked = str(finished.value.reason) if isinstance(finished.value, NotFound | Retry) else ""
    asked = redact(tried.connector, tried.operation, tried.params, asked)
    words = (
        f"{tried.doubt_reason}; a look says: {asked}" if tried.doubt_reason and asked else asked or tried.doubt_reason
    )
    failure = _unknown_outcome(tried, words, overdue=tried.is_overdue)
    absent = isinstance(finished.value, NotFound) and not tried.is_overdue
    return CallDecision(action=NextAction.ABSENT if absent else NextAction.DOUBT, failure=failure)


def _unknown_outcome(tried: CallFacts, words: str, *, overdue: bool) -> Failure:
    """Why nobody knows. A call that outlives its deadline gets as much time again before absence proves anything."""
    quiet = tried.operation.timeout if overdue else timedelta(0)
    return Failure(kind=FailureKind.TRANSIENT, message=words, error_type="UnknownOutcome", quiet_period=quiet)


def verdict_label(verdict: Any) -> str:
    """A verdict in one word; a look that failed, hung or said something else told nothing."""
    return _VERDICT_LABELS.get(type(verdict), "nothing")


_VERDICT_LABELS = {Found: "applied", NotFound: "not found", Retry: "retry"}


def storable_result(result: Any, limits: Limits, what: str) -> Any:
    """A result as it can be kept; one that cannot is described instead, because it happened all the same."""
    try:
        return json_copy(result, what="result", limit=limits.result)
    except PayloadError as error:
        problem = f"{error.problem}; expected {error.expected}"
    except Exception as error:  # noqa: BLE001 - an answer may be an object with code of its own
        problem = f"it cannot be read ({type(error).__name__})"
    log.warning("%s happened, and its result cannot be kept: %s", what, problem)
    return {"unstorable": problem}


def error_message(tried: CallFacts, error: BaseException) -> str:
    """What an error says, without credentials and without what the operation keeps from people."""
    return redact(tried.connector, tried.operation, tried.params, classify(error).message)


def redact(connector: Connector, operation: Operation[Any], params: dict[str, Any], text: str) -> str:
    """Words about an operation as they may be stored, logged and shown."""
    return operation.redact_text(connector.scrub(text), params)
