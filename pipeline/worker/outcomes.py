"""Turn what a connector returned or raised into values that ``domain.reconciliation`` decides about.

Reading an error, calling ``str`` on a reason and copying a result run code of the connector. So each function here
may meet any exception, and every text is redacted before it is stored, logged or shown.
"""

import logging
from decimal import Decimal
from typing import Any

from pipeline.connectors.error_table import bounded_pause
from pipeline.connectors.sdk import Call, Connector, Operation
from pipeline.consumer_engine.bounded import FinishedCall, TimedOutError
from pipeline.domain.codec import private_text
from pipeline.domain.errors import LogicError, PayloadError
from pipeline.domain.failures import classify
from pipeline.domain.payloads import json_copy
from pipeline.domain.reconciliation import (
    Applied,
    CallEnd,
    CallError,
    ErrorMeaning,
    ErrorReading,
    NotFound,
    NoVerdict,
    Retry,
)
from pipeline.domain.values import Limits

log = logging.getLogger(__name__)

#: What sets the limit of a reconcile attempt, and of a fetch.
RECONCILE_OPTION = "immediate_timeout of the ReconcilePolicy"
_UNKNOWN_READING = ErrorReading(meaning=ErrorMeaning.UNKNOWN)
_VERDICT_LABELS: dict[type, str] = {Applied: "applied", NotFound: "not found", Retry: "retry"}


def call_end(
    connector: Connector,
    operation: Operation[Any],
    params: dict[str, Any],
    finished: FinishedCall,
    *,
    is_private: bool = False,
) -> CallEnd:
    """Read how a call ended. An end that cannot be read leaves the outcome unknown.

    ``is_private``: the workflow is encrypted, and what the outside system says is not kept.
    """
    error = finished.error
    if error is None:
        return Applied(finished.value)
    is_overdue = isinstance(error, TimedOutError)
    try:
        reading = _UNKNOWN_READING if is_overdue else operation.reading(error)
        reason = error_message(connector, operation, params, error)
        if is_overdue:
            reason += f" (timeout of the mutation, {operation.timeout.total_seconds():g} s)"
        if is_private and not is_overdue:
            reason = private_text(type(error).__qualname__)
    except Exception as unread:
        log.exception("the end of %s.%s could not be classified", connector.name, operation.name)
        reading, reason = _UNKNOWN_READING, _unreadable(unread)
    return CallError(reading=reading, reason=reason, error_type=type(error).__qualname__, is_overdue=is_overdue)


def reconcile_end(
    connector: Connector,
    operation: Operation[Any],
    params: dict[str, Any],
    finished: FinishedCall,
    *,
    is_private: bool = False,
) -> Applied | NotFound | Retry | NoVerdict:
    """Read how a reconcile attempt ended. One that failed, hung or returned something else gave no verdict."""
    name = f"{connector.name}.{operation.name}.reconcile"
    keep = (lambda _: private_text("")) if is_private else lambda text: text
    try:
        if finished.error is not None:
            reason = error_message(connector, operation, params, finished.error)
            if isinstance(finished.error, TimedOutError) and RECONCILE_OPTION not in reason:
                reason += f" ({RECONCILE_OPTION})"
            reason = private_text(type(finished.error).__qualname__) if is_private else reason
        else:
            verdict = finished.value
            match verdict:
                case Applied():
                    return verdict
                case NotFound():
                    return NotFound(keep(redact(connector, operation, params, str(verdict.reason))))
                case Retry():
                    reason = keep(redact(connector, operation, params, str(verdict.reason)))
                    return Retry(reason, bounded_pause(verdict.after))
            reason = f"it returned a {type(verdict).__name__}; expected Applied, NotFound or Retry"
    except Exception as unread:
        log.exception("the end of %s could not be classified", name)
        return NoVerdict(_unreadable(unread))
    log.warning("%s gave no verdict: %s", name, reason)
    return NoVerdict(reason)


def _unreadable(error: Exception) -> str:
    return f"how it ended could not be judged ({type(error).__name__})"  # the error's own text is not redacted


def verdict_label(verdict: CallEnd) -> str:
    """A verdict in one word, for metrics and spans."""
    return _VERDICT_LABELS.get(type(verdict), "no verdict")


def storable_result(result: Any, limits: Limits, what: str) -> Any:
    """A result as it can be stored. One that cannot is described instead: the effect happened all the same."""
    try:
        return json_copy(result, what="result", limit=limits.result)
    except PayloadError as error:
        problem = f"{error.problem}; expected {error.expected}"
    except Exception as error:  # noqa: BLE001 - the result may be an object with code of its own
        problem = f"it cannot be read ({type(error).__name__})"
    log.warning("%s happened, and its result cannot be kept: %s", what, problem)
    return {"unstorable": problem}


def reported_cost(call: Call, what: str) -> Decimal | None:
    """What a call has reported as its cost. A wrong amount is logged and not counted: the outcome stands."""
    try:
        return call.cost
    except LogicError as error:
        log.error("the cost of %s is not counted: %s", what, error)
        return None


def error_message(connector: Connector, operation: Operation[Any], params: dict[str, Any], error: BaseException) -> str:
    """The message of an error, redacted."""
    return redact(connector, operation, params, classify(error).message)


def redact(connector: Connector, operation: Operation[Any], params: dict[str, Any], text: str) -> str:
    """Text about an operation without credentials and without the parameters that the operation redacts."""
    return operation.redaction.text(connector.scrub(text), params)
