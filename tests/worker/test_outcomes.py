"""How the worker reads the end of a call or of a reconcile attempt, and what is decided then."""

from datetime import timedelta
from typing import Any

import pytest

from pipeline import Applied, AuthError, Backoff, Call, Connector, LogicError, NotFound, Retry, TransientError, mutation
from pipeline.consumer_engine.bounded import FinishedCall, TimedOutError
from pipeline.domain.failures import FailureKind
from pipeline.domain.policies import MutationRetryPolicy
from pipeline.domain.reconciliation import CallDecision, CallFacts, NextAction, decide
from pipeline.worker.outcomes import call_end, reconcile_end

RETRY = MutationRetryPolicy(max_attempts=3, backoff=Backoff(base=timedelta(seconds=1), jitter=0))


class Mail(Connector):
    """One operation that can be asked, and one that cannot."""

    name = "mail"

    @mutation(timeout=timedelta(seconds=5), retry=RETRY, redact=["to"])
    def send(self, call: Call, *, to: str) -> None:
        """Never called here."""

    @send.reconcile
    def find(self, call: Call, *, to: str) -> None:
        """Never called here."""

    @mutation(timeout=timedelta(seconds=5), retry=RETRY)
    def shout(self, call: Call) -> None:
        """Never called here."""


def after(
    error: BaseException | None = None,
    value: Any = None,
    *,
    operation: str = "send",
    is_reconcile: bool = False,
    params: dict[str, Any] | None = None,
    **known: Any,
) -> CallDecision:
    """The decision after a call or a reconcile attempt that ended like this."""
    declared = Mail.operations()[operation]
    read = reconcile_end if is_reconcile else call_end
    given = {"to": "ada@example.org"} if params is None else params
    end = read(Mail(), declared, given, FinishedCall("key", value=value, error=error))
    facts = {"attempts": 1, "time_left": timedelta(minutes=1), **known}
    return decide(
        end,
        CallFacts(timeout=declared.timeout, retry=declared.retry, can_reconcile=declared.can_reconcile, **facts),
    )


def test_a_call_that_returned_is_applied() -> None:
    assert after(value={"id": 1}) == CallDecision(action=NextAction.APPLIED, result={"id": 1})


@pytest.mark.parametrize(
    ("error", "kind"),
    [(LogicError("no"), FailureKind.LOGIC), (AuthError("who"), FailureKind.AUTH)],
)
def test_a_refusal_is_a_failure_of_its_kind(error: Exception, kind: FailureKind) -> None:
    judged = after(error)
    assert (judged.action, judged.failure and judged.failure.kind) == (NextAction.FAILED, kind)


def test_a_not_now_error_is_attempted_again_after_a_growing_pause() -> None:
    first, second = after(TransientError("busy")), after(TransientError("busy"), attempts=2)
    assert (first.action, first.pause) == (NextAction.RETRY, timedelta(seconds=1))
    assert (second.action, second.pause) == (NextAction.RETRY, timedelta(seconds=2))


def test_attempts_and_time_are_limited() -> None:
    assert after(TransientError("busy"), attempts=3).action is NextAction.FAILED
    assert after(TransientError("busy"), time_left=timedelta(seconds=5)).action is NextAction.FAILED
    assert after(TransientError("busy"), time_left=timedelta(seconds=6)).action is NextAction.RETRY


def test_a_longer_requested_pause_wins_and_is_kept_when_it_does_not_fit() -> None:
    asked = TransientError("busy", after=timedelta(seconds=30))
    assert after(asked).pause == timedelta(seconds=30)
    judged = after(TransientError("busy", after=timedelta(hours=1)))
    assert judged.action is NextAction.FAILED
    assert judged.failure is not None
    assert judged.failure.retry_after == timedelta(hours=1)


@pytest.mark.parametrize("error", [TimeoutError("slow"), TimedOutError("past its deadline"), SystemExit(1)])
def test_an_unknown_outcome_is_reconciled_once_where_a_reconcile_exists(error: BaseException) -> None:
    assert after(error).action is NextAction.RECONCILE
    assert after(error, operation="shout", params={}).action is NextAction.DOUBT


@pytest.mark.parametrize(
    ("value", "step"),
    [
        (Applied({"id": 1}), NextAction.APPLIED),
        (NotFound("no such mail"), NextAction.ABSENT),
        (Retry("later"), NextAction.DOUBT),
        ("nonsense", NextAction.DOUBT),
        (None, NextAction.DOUBT),
    ],
)
def test_a_reconcile_resolves_the_doubt_or_leaves_it(value: Any, step: NextAction) -> None:
    assert after(value=value, is_reconcile=True, doubt_reason="timed out").action is step


def test_a_reconcile_that_raised_leaves_the_doubt_with_its_first_reason() -> None:
    judged = after(RuntimeError("search is down"), is_reconcile=True, doubt_reason="timed out")
    assert (judged.action, judged.reason) == (NextAction.DOUBT, "timed out")


def test_a_reconcile_that_took_too_long_names_the_option_that_limits_it(caplog: pytest.LogCaptureFixture) -> None:
    after(TimedOutError("past its deadline"), is_reconcile=True)
    assert "past its deadline (immediate_timeout of the ReconcilePolicy)" in caplog.text


def test_not_finding_a_call_that_has_not_returned_proves_nothing() -> None:
    first = after(TimedOutError("past its deadline"))
    assert first.failure is not None
    assert first.reason.endswith("past its deadline (timeout of the mutation, 5 s)"), "the option to change is named"
    assert first.failure.quiet_period == timedelta(seconds=5), "as much time again as it had"
    looked = after(value=NotFound(), is_reconcile=True, is_overdue=True)
    assert (looked.action, looked.failure and looked.failure.quiet_period) == (NextAction.DOUBT, timedelta(seconds=5))


def test_the_reason_of_a_reconcile_is_cleaned_and_follows_the_first_reason() -> None:
    judged = after(value=Retry("search for ada@example.org is down"), is_reconcile=True, doubt_reason="timed out")
    assert judged.reason == "timed out; reconcile says: search for ••• is down"


def test_redacted_parameters_are_not_in_the_reason() -> None:
    assert after(LogicError("no mailbox for ada@example.org")).reason == "no mailbox for •••"


class _Unspeakable:
    """A reason that cannot be made text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("verdict", [NotFound(_Unspeakable()), Retry(_Unspeakable())])  # type: ignore[arg-type]
def test_a_verdict_that_cannot_be_read_leaves_the_doubt(verdict: NotFound | Retry) -> None:
    judged = after(value=verdict, is_reconcile=True, doubt_reason="timed out")
    assert (judged.action, judged.reason) == (NextAction.DOUBT, "timed out")


@pytest.mark.parametrize(("after", "expected"), [(5, timedelta(seconds=5)), ("soon", None), (-1, timedelta(0))])
def test_the_pause_of_a_verdict_is_bounded_before_it_is_used(after: Any, expected: timedelta | None) -> None:
    end = reconcile_end(Mail(), Mail.operations()["send"], {"to": "x"}, FinishedCall("key", value=Retry("", after)))
    assert end == Retry("", expected)


def test_a_call_whose_error_cannot_be_read_is_reconciled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Mail, text: str) -> str:
        raise RuntimeError(text)

    monkeypatch.setattr(Mail, "scrub", broken)
    judged = after(LogicError("no"))
    assert (judged.action, "could not be judged" in judged.reason) == (NextAction.RECONCILE, True)
