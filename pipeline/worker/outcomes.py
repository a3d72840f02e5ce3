"""What follows when a call or a look ends: decided without I/O, from what came back.

The mutator asks ``judge`` and writes down what it says. A call that answered is believed. An error is
read by its operation. Where nobody knows, one look is taken at once, and after it the doubt stands.
"""

import logging
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any

from pipeline.connectors.error_table import Outcome, Reading
from pipeline.connectors.sdk import Applied as Found
from pipeline.connectors.sdk import Connector, NotFound, Operation, Retry
from pipeline.consumer_engine.calls import Finished
from pipeline.consumer_engine.steps import TimedOutError
from pipeline.domain.errors import PayloadError
from pipeline.domain.failures import Failure, FailureKind, classify
from pipeline.domain.payloads import kept_json
from pipeline.domain.values import Limits

log = logging.getLogger(__name__)

_KINDS = {
    Outcome.REFUSED: FailureKind.LOGIC,
    Outcome.NOT_NOW: FailureKind.TRANSIENT,
    Outcome.DENIED: FailureKind.AUTH,
}
_UNKNOWN = Reading(outcome=Outcome.UNKNOWN)


class Step(StrEnum):
    """What the mutator does next with a mutation."""

    APPLIED = "applied"  #: it happened
    FAILED = "failed"  #: it did not happen: the outside system said so
    ABSENT = "absent"  #: it was looked for and not found
    AGAIN = "again"  #: it did not happen this time: attempt it again after a pause
    LOOK = "look"  #: nobody knows: look once, at once
    DOUBT = "doubt"  #: nobody knows: the background asks, or a person


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A step, and what it needs."""

    step: Step
    result: Any = None
    failure: Failure | None = None
    pause: timedelta = timedelta(0)

    @property
    def reason(self) -> str:
        return self.failure.message if self.failure else ""

    @property
    def is_answered(self) -> bool:
        """Whether somebody must have answered: a refused connection, too, is known not to have happened this time."""
        return self.failure is None or self.failure.kind is not FailureKind.TRANSIENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What is known of a mutation when its call or look has ended."""

    connector: Connector
    operation: Operation[Any]
    params: dict[str, Any]
    attempts: int
    left: timedelta  #: how long the cohort may still take
    looked: bool = False  #: what ended is a look, not the call
    overdue: bool = False  #: the call did not return by its deadline, and may still be at it
    doubt: str = ""  #: why the call's own outcome is unknown


def judge(tried: Tried, finished: Finished, *, chance: float = 0.0) -> Judged:
    """What follows from how this call or look ended. An end that cannot be read is a doubt, and nobody else's."""
    try:
        return _after_look(tried, finished) if tried.looked else _after_call(tried, finished, chance)
    except Exception as error:
        log.exception("how %s.%s ended could not be judged", tried.connector.name, tried.operation.name)
        words = f"how it ended could not be judged ({type(error).__name__})"  # what the error says is not scrubbed
        return Judged(step=Step.DOUBT, failure=_doubt(tried, words, overdue=tried.overdue))


def _after_call(tried: Tried, finished: Finished, chance: float) -> Judged:
    if finished.error is None:
        return Judged(step=Step.APPLIED, result=finished.value)
    reading = _UNKNOWN if isinstance(finished.error, TimedOutError) else tried.operation.reading(finished.error)
    words = said(tried, finished.error)
    if reading.outcome is Outcome.UNKNOWN:
        failure = _doubt(tried, words, overdue=isinstance(finished.error, TimedOutError))
        return Judged(step=Step.LOOK if tried.operation.can_reconcile else Step.DOUBT, failure=failure)
    failure = Failure(
        kind=_KINDS[reading.outcome],
        message=words,
        error_type=type(finished.error).__qualname__,
        wait=reading.after or timedelta(0),
    )
    pause = max(failure.wait, tried.operation.retry.backoff.delay(tried.attempts, chance=chance))
    fits = pause + tried.operation.timeout <= tried.left
    if reading.outcome is Outcome.NOT_NOW and tried.attempts < tried.operation.retry.max_attempts and fits:
        return Judged(step=Step.AGAIN, failure=failure, pause=pause)
    return Judged(step=Step.FAILED, failure=failure)


def _after_look(tried: Tried, finished: Finished) -> Judged:
    if isinstance(finished.value, Found):
        return Judged(step=Step.APPLIED, result=finished.value.result)
    asked = str(finished.value.reason) if isinstance(finished.value, NotFound | Retry) else ""
    asked = clean(tried.connector, tried.operation, tried.params, asked)
    words = f"{tried.doubt}; a look says: {asked}" if tried.doubt and asked else asked or tried.doubt
    failure = _doubt(tried, words, overdue=tried.overdue)
    absent = isinstance(finished.value, NotFound) and not tried.overdue
    return Judged(step=Step.ABSENT if absent else Step.DOUBT, failure=failure)


def _doubt(tried: Tried, words: str, *, overdue: bool) -> Failure:
    """Why nobody knows. A call that outlives its deadline gets as much time again before absence proves anything."""
    quiet = tried.operation.timeout if overdue else timedelta(0)
    return Failure(kind=FailureKind.TRANSIENT, message=words, error_type="UnknownOutcome", quiet=quiet)


def told(verdict: Any) -> str:
    """A verdict in one word; a look that failed, hung or said something else told nothing."""
    return _WORDS.get(type(verdict), "nothing")


_WORDS = {Found: "applied", NotFound: "not found", Retry: "retry"}


def storable(result: Any, limits: Limits, what: str) -> Any:
    """A result as it can be kept; one that cannot is described instead, because it happened all the same."""
    try:
        return kept_json(result, what="result", limit=limits.result)
    except PayloadError as error:
        problem = f"{error.problem}; expected {error.expected}"
    except Exception as error:  # noqa: BLE001 - an answer may be an object with code of its own
        problem = f"it cannot be read ({type(error).__name__})"
    log.warning("%s happened, and its result cannot be kept: %s", what, problem)
    return {"unstorable": problem}


def said(tried: Tried, error: BaseException) -> str:
    """What an error says, without credentials and without what the operation keeps from people."""
    return clean(tried.connector, tried.operation, tried.params, classify(error).message)


def clean(connector: Connector, operation: Operation[Any], params: dict[str, Any], text: str) -> str:
    """Words about an operation as they may be stored, logged and shown."""
    return operation.cleaned(connector.scrubbed(text), params)
