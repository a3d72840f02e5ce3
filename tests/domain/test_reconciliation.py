"""What the end of a call, or of a reconcile attempt, means: the truth table of the worker and of the reconciler."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from pipeline.domain.failures import FailureKind
from pipeline.domain.policies import Backoff, MutationRetryPolicy, ReconcilePolicy
from pipeline.domain.reconciliation import (
    Applied,
    CallEnd,
    CallError,
    CallFacts,
    DoubtFacts,
    ErrorMeaning,
    ErrorReading,
    NextAction,
    NotFound,
    NoVerdict,
    Retry,
    decide,
    monitor_delay,
    reconcile_delay,
)

SECOND, MINUTE = timedelta(seconds=1), timedelta(minutes=1)
HELD = CallFacts(
    timeout=5 * SECOND,
    retry=MutationRetryPolicy(max_attempts=3, backoff=Backoff(base=SECOND, multiplier=2, jitter=1.0)),
    can_reconcile=True,
    attempts=1,
    time_left=MINUTE,
)
OVERDUE, BLIND = replace(HELD, is_overdue=True), replace(HELD, can_reconcile=False)
BUDGET_LEFT, BUDGET_SPENT = (DoubtFacts(reconcile_attempts=n, max_attempts=5) for n in (4, 5))


def failed(meaning: ErrorMeaning, *, after: timedelta | None = None, is_overdue: bool = False) -> CallError:
    reading = ErrorReading(meaning=meaning, after=after)
    return CallError(reading=reading, reason="no", error_type="Refusal", is_overdue=is_overdue)


@pytest.mark.parametrize(
    ("end", "held", "overdue", "budget_left", "budget_spent"),
    [
        (Applied({"id": 1}), "APPLIED", "APPLIED", "APPLIED", "APPLIED"),
        (NotFound("gone"), "ABSENT", "DOUBT", "ABSENT", "ABSENT"),
        (Retry("later"), "DOUBT", "DOUBT", "POSTPONE", "ESCALATE"),
        (NoVerdict("broken"), "DOUBT", "DOUBT", "POSTPONE", "ESCALATE"),
        (failed(ErrorMeaning.REFUSED), "FAILED", "FAILED", "POSTPONE", "ESCALATE"),
        (failed(ErrorMeaning.DENIED), "FAILED", "FAILED", "POSTPONE", "ESCALATE"),
        (failed(ErrorMeaning.NOT_NOW), "RETRY", "RETRY", "POSTPONE", "ESCALATE"),
        (failed(ErrorMeaning.UNKNOWN), "RECONCILE", "RECONCILE", "POSTPONE", "ESCALATE"),
    ],
)
def test_the_next_action_follows_from_the_end_and_the_facts(
    end: CallEnd, held: str, overdue: str, budget_left: str, budget_spent: str
) -> None:
    found = [decide(end, facts).action.name for facts in (HELD, OVERDUE, BUDGET_LEFT, BUDGET_SPENT)]
    assert found == [held, overdue, budget_left, budget_spent]


def test_an_unknown_outcome_that_cannot_be_reconciled_is_in_doubt() -> None:
    assert decide(failed(ErrorMeaning.UNKNOWN), BLIND).action is NextAction.DOUBT


def test_only_an_applied_mutation_has_a_result() -> None:
    assert decide(Applied({"id": 1}), HELD).result == {"id": 1}
    assert decide(Applied({"id": 1}), HELD).reason == ""
    assert decide(NotFound("gone"), HELD).result is None


@pytest.mark.parametrize(
    ("meaning", "kind", "has_response"),
    [
        (ErrorMeaning.REFUSED, FailureKind.LOGIC, True),
        (ErrorMeaning.DENIED, FailureKind.AUTH, True),
        (ErrorMeaning.NOT_NOW, FailureKind.TRANSIENT, False),
    ],
)
def test_a_failure_has_the_kind_of_its_reading(meaning: ErrorMeaning, kind: FailureKind, has_response: bool) -> None:
    decision = decide(failed(meaning), replace(HELD, attempts=3))
    assert decision.action is NextAction.FAILED
    assert decision.failure is not None
    assert (decision.failure.kind, decision.failure.error_type) == (kind, "Refusal")
    assert decision.has_response is has_response
    assert decide(Applied(), HELD).has_response


@pytest.mark.parametrize(
    ("attempts", "time_left", "after", "action", "pause"),
    [
        (1, 6 * SECOND, None, NextAction.RETRY, SECOND),
        (2, 7 * SECOND, None, NextAction.RETRY, 2 * SECOND),
        (2, 7 * SECOND, SECOND, NextAction.RETRY, 2 * SECOND),
        (1, MINUTE, 30 * SECOND, NextAction.RETRY, 30 * SECOND),
        (1, 5 * SECOND, None, NextAction.FAILED, None),
        (3, MINUTE, None, NextAction.FAILED, None),
        (1, MINUTE, timedelta(hours=1), NextAction.FAILED, None),
    ],
)
def test_another_attempt_needs_budget_and_time(
    attempts: int, time_left: timedelta, after: timedelta | None, action: NextAction, pause: timedelta | None
) -> None:
    decision = decide(failed(ErrorMeaning.NOT_NOW, after=after), replace(HELD, attempts=attempts, time_left=time_left))
    assert (decision.action, decision.pause) == (action, pause)
    assert decision.failure is not None
    assert decision.failure.retry_after == (after or timedelta(0))


def test_jitter_lengthens_the_pause_before_another_attempt() -> None:
    assert decide(failed(ErrorMeaning.NOT_NOW), HELD, jitter=0.5).pause == 1.5 * SECOND


@pytest.mark.parametrize(
    ("end", "facts", "quiet_period", "error_type"),
    [
        (failed(ErrorMeaning.UNKNOWN), HELD, timedelta(0), "Refusal"),
        (failed(ErrorMeaning.UNKNOWN, is_overdue=True), HELD, HELD.timeout, "Refusal"),
        (NotFound(), HELD, timedelta(0), "UnknownOutcome"),
        (NotFound(), OVERDUE, HELD.timeout, "UnknownOutcome"),
        (Retry(), replace(OVERDUE, doubt_type="TimedOutError"), HELD.timeout, "TimedOutError"),
        (Retry(), BUDGET_LEFT, timedelta(0), "UnknownOutcome"),
    ],
)
def test_an_overdue_call_gets_its_timeout_again_as_quiet_period_and_keeps_the_class_of_its_error(
    end: CallEnd, facts: CallFacts | DoubtFacts, quiet_period: timedelta, error_type: str
) -> None:
    failure = decide(end, facts).failure
    assert failure is not None
    assert (failure.quiet_period, failure.error_type) == (quiet_period, error_type)


@pytest.mark.parametrize(
    ("end", "doubt_reason", "reason"),
    [
        (NotFound("gone"), "", "gone"),
        (NotFound("gone"), "timed out", "timed out; reconcile says: gone"),
        (Retry(""), "timed out", "timed out"),
        (NoVerdict("broken"), "timed out", "timed out"),
        (NoVerdict("broken"), "", ""),
    ],
)
def test_the_doubt_keeps_its_first_reason(end: CallEnd, doubt_reason: str, reason: str) -> None:
    assert decide(end, replace(HELD, doubt_reason=doubt_reason)).reason == reason


@pytest.mark.parametrize("end", [NotFound("why"), Retry("why"), NoVerdict("why")])
def test_in_the_background_the_reason_is_the_one_of_the_attempt(end: CallEnd) -> None:
    assert decide(end, BUDGET_LEFT).reason == decide(end, BUDGET_SPENT).reason == "why"


def test_in_the_background_only_a_retry_verdict_sets_another_pause() -> None:
    assert decide(Retry("later", MINUTE), BUDGET_LEFT).pause == MINUTE
    assert decide(Retry("later"), BUDGET_LEFT).pause is None
    assert decide(NoVerdict("broken"), BUDGET_LEFT).pause is None


def test_the_last_reconcile_attempt_gets_time_to_end() -> None:
    policy = ReconcilePolicy(max_attempts=2, backoff=Backoff(base=SECOND, jitter=1.0), immediate_timeout=MINUTE)
    assert reconcile_delay(policy, 1) == SECOND
    assert reconcile_delay(policy, 1, jitter=0.5) == 1.5 * SECOND
    assert reconcile_delay(policy, 2) == 2 * MINUTE
    slow = policy.model_copy(update={"backoff": Backoff(base=timedelta(minutes=5), jitter=0)})
    assert reconcile_delay(slow, 2) == timedelta(minutes=10)


@pytest.mark.parametrize(
    ("checks", "minutes", "expected"),
    [
        (0, 1, 50),
        (0, 15, 50),
        (1, 61, 23 * 60),
        (1, 15, 50),  # the first check died: its span is not used up
        (9, 61, 23 * 60),
        (2, 24 * 60 + 1, None),
        (9, 24 * 60 + 1, None),
    ],
)
def test_checks_for_a_late_effect_follow_the_spans(checks: int, minutes: int, expected: int | None) -> None:
    spans = (10 * MINUTE, 60 * MINUTE, 24 * 60 * MINUTE)
    resolved_at = datetime(2026, 1, 1, tzinfo=UTC)
    delay = monitor_delay(spans, resolved_at, checks, resolved_at + minutes * MINUTE)
    assert delay == (None if expected is None else expected * MINUTE)


def test_without_spans_nothing_is_monitored() -> None:
    assert monitor_delay((), datetime(2026, 1, 1, tzinfo=UTC), 0, datetime(2026, 1, 2, tzinfo=UTC)) is None
