"""Decide what the end of a call, or of a reconcile attempt, means for its mutation. Pure: no I/O.

The worker decides with ``CallFacts`` while it still holds the run. The reconciler decides with ``DoubtFacts``
in the background. Nothing else in the project decides what an error reading or a verdict means.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from pipeline.domain.failures import Failure, FailureKind
from pipeline.domain.policies import MutationRetryPolicy, ReconcilePolicy
from pipeline.domain.states import Evidence


class ErrorMeaning(StrEnum):
    """What is known of a call that ended with an error."""

    REFUSED = "refused"  #: it did not happen, and the same request would be refused again
    NOT_NOW = "not now"  #: it did not happen, and may be attempted again
    DENIED = "denied"  #: it did not happen, and an operator must give access
    UNKNOWN = "unknown"  #: it may or may not have happened


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReading:
    """The meaning of an error, and how long the outside system asks to wait."""

    meaning: ErrorMeaning
    after: timedelta | None = None


@dataclass(frozen=True, slots=True)
class Applied:
    """Verdict: it happened, with this result."""

    result: Any = None


@dataclass(frozen=True, slots=True)
class NotFound:
    """Verdict: the outside system was asked and does not have it."""

    reason: str = "not found"


@dataclass(frozen=True, slots=True)
class Retry:
    """Verdict: not known yet. Reconcile again, after ``after`` if that is longer than the usual pause."""

    reason: str = ""
    after: timedelta | None = None


#: What a reconcile attempt says about a mutation.
Verdict = Applied | NotFound | Retry


@dataclass(frozen=True, slots=True)
class NoVerdict:
    """Stands for the verdict of a reconcile attempt that failed, hung or returned something else."""

    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallError:
    """A call that ended with an error, or did not return by its deadline."""

    reading: ErrorReading
    reason: str
    error_type: str
    is_overdue: bool = False  #: it did not return by its deadline, and may still have its effect


#: How a call or a reconcile attempt ended. A call that returned is ``Applied``.
CallEnd = Applied | NotFound | Retry | NoVerdict | CallError


#: So often a request is repeated under one honoured key after it was not found. A provider that keeps its own error
#: under the key would answer with that error for ever; so an operator decides then.
MAX_ABSENCES = 19


class NextAction(StrEnum):
    """What the worker or the reconciler does next with a mutation."""

    APPLIED = "applied"  #: record that it happened
    FAILED = "failed"  #: record that it did not happen: the outside system refused it
    ABSENT = "absent"  #: record that it did not happen: it was not found. Refused in the quiet period
    RETRY = "retry"  #: it did not happen this time: attempt it again after a pause
    RECONCILE = "reconcile"  #: the outcome is unknown: reconcile once, at once
    DOUBT = "doubt"  #: the outcome is unknown: the run stops in doubt
    POSTPONE = "postpone"  #: still in doubt: reconcile again later
    ESCALATE = "escalate"  #: still in doubt with no attempt left: an operator resolves it


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDecision:
    """The next action, and the values it needs."""

    action: NextAction
    result: Any = None
    failure: Failure | None = None
    pause: timedelta | None = None  #: None: the pause of the policy

    @property
    def reason(self) -> str:
        return self.failure.message if self.failure else ""

    @property
    def evidence(self) -> Evidence:
        """The evidence that it did not happen, of the actions ``FAILED`` and ``ABSENT``.

        Only a refusal of the request itself lets a repeat have a new key. "Not now" and "not allowed" say nothing
        about the request, and an earlier one with the same key may have been carried out.
        """
        if self.action is NextAction.ABSENT:
            return Evidence.ABSENCE
        is_refusal = self.failure is not None and self.failure.kind is FailureKind.LOGIC
        return Evidence.REFUSED if is_refusal else Evidence.DEFINITE

    @property
    def has_response(self) -> bool:
        """Whether the outside system must have answered. A refused connection is known, but no response."""
        return self.failure is None or self.failure.kind is not FailureKind.TRANSIENT


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFacts:
    """What the worker knows of a mutation when its call, or the reconcile attempt right after it, ended."""

    timeout: timedelta
    retry: MutationRetryPolicy
    can_reconcile: bool
    attempts: int
    time_left: timedelta  #: how long the cohort may still take
    is_overdue: bool = False  #: the call did not return by its deadline, and may still have its effect
    doubt_reason: str = ""  #: why the outcome of the call itself is unknown
    doubt_type: str = ""  #: the class of the error that left it unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class DoubtFacts:
    """What the reconciler knows of a mutation in doubt when a reconcile attempt ended."""

    reconcile_attempts: int  #: with the one that ended
    max_attempts: int
    earlier_absences: int = 0  #: how often a request with the same honoured key was not found before


_FAILURE_KINDS = {
    ErrorMeaning.REFUSED: FailureKind.LOGIC,
    ErrorMeaning.NOT_NOW: FailureKind.TRANSIENT,
    ErrorMeaning.DENIED: FailureKind.AUTH,
}


def decide(end: CallEnd, facts: CallFacts | DoubtFacts, *, jitter: float = 0.0) -> CallDecision:
    """Decide what follows when a call or a reconcile attempt ended like this.

    - ``Applied`` is believed, always.
    - ``NotFound`` means absent. It proves nothing about a call that has not returned.
    - An error of the call counts as it was read.
    - Everything else leaves the doubt: the worker stops the run, the reconciler tries again until its budget is spent.
    """
    if isinstance(end, Applied):
        return CallDecision(action=NextAction.APPLIED, result=end.result)
    if isinstance(facts, DoubtFacts):
        return _in_background(end, facts)
    if isinstance(end, CallError):
        return _after_error(end, facts, jitter)
    return _after_immediate_reconcile(end, facts)


def _in_background(end: NotFound | Retry | NoVerdict | CallError, facts: DoubtFacts) -> CallDecision:
    failure = _unknown_outcome(end.reason)
    if isinstance(end, NotFound) and facts.earlier_absences >= MAX_ABSENCES:
        reason = f"not found for the {MAX_ABSENCES + 1}th time: the outside system may keep its own error under the key"
        return CallDecision(action=NextAction.ESCALATE, failure=_unknown_outcome(reason))
    if isinstance(end, NotFound):
        return CallDecision(action=NextAction.ABSENT, failure=failure)
    if facts.reconcile_attempts >= facts.max_attempts:
        return CallDecision(action=NextAction.ESCALATE, failure=failure)
    return CallDecision(
        action=NextAction.POSTPONE, failure=failure, pause=end.after if isinstance(end, Retry) else None
    )


def _after_error(end: CallError, facts: CallFacts, jitter: float) -> CallDecision:
    meaning = end.reading.meaning
    if meaning is ErrorMeaning.UNKNOWN:
        action = NextAction.RECONCILE if facts.can_reconcile else NextAction.DOUBT
        quiet = facts.timeout if end.is_overdue else timedelta(0)
        return CallDecision(action=action, failure=_unknown_outcome(end.reason, quiet, end.error_type))
    failure = Failure(
        kind=_FAILURE_KINDS[meaning],
        message=end.reason,
        error_type=end.error_type,
        retry_after=end.reading.after or timedelta(0),
    )
    pause = max(failure.retry_after, facts.retry.backoff.delay(facts.attempts, jitter=jitter))
    fits = pause + facts.timeout <= facts.time_left
    if meaning is ErrorMeaning.NOT_NOW and facts.attempts < facts.retry.max_attempts and fits:
        return CallDecision(action=NextAction.RETRY, failure=failure, pause=pause)
    return CallDecision(action=NextAction.FAILED, failure=failure)


def _after_immediate_reconcile(end: NotFound | Retry | NoVerdict, facts: CallFacts) -> CallDecision:
    """Decide after the one reconcile attempt that follows an unknown outcome at once."""
    reason = "" if isinstance(end, NoVerdict) else end.reason
    if facts.doubt_reason:
        reason = f"{facts.doubt_reason}; reconcile says: {reason}" if reason else facts.doubt_reason
    failure = _unknown_outcome(reason, facts.timeout if facts.is_overdue else timedelta(0), facts.doubt_type)
    is_absent = isinstance(end, NotFound) and not facts.is_overdue
    return CallDecision(action=NextAction.ABSENT if is_absent else NextAction.DOUBT, failure=failure)


def _unknown_outcome(reason: str, quiet_period: timedelta = timedelta(0), error_type: str = "") -> Failure:
    """Say why the outcome is unknown. An overdue call gets its timeout again before absence proves anything."""
    error_type = error_type or "UnknownOutcome"
    return Failure(kind=FailureKind.TRANSIENT, message=reason, error_type=error_type, quiet_period=quiet_period)


def reconcile_delay(policy: ReconcilePolicy, number: int, *, jitter: float = 0.0) -> timedelta:
    """The pause before the reconcile attempt after attempt ``number``. The last attempt gets time to end first."""
    delay = policy.backoff.delay(number, jitter=jitter)
    return delay if number < policy.max_attempts else max(delay, policy.immediate_timeout * 2)


def monitor_delay(
    monitor_after: Sequence[timedelta], resolved_at: datetime, checks: int, now: datetime
) -> timedelta | None:
    """The pause before the next check for a late effect. None: the last span has passed.

    ``checks`` counts the checks begun. A check that took its worker down does not use a span up.
    """
    passed = sum(resolved_at + span <= now for span in monitor_after)
    place = min(checks, max(passed - 1, 0))
    return monitor_after[place + 1] - monitor_after[place] if place + 1 < len(monitor_after) else None
