"""The key of a request is made of its inputs and of the ledger alone."""

from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest

from pipeline.domain.failures import Failure, FailureKind
from pipeline.domain.idempotency import SentKey, effect_id, idempotency_key, is_one_effect
from pipeline.domain.reconciliation import (
    MAX_ABSENCES,
    CallDecision,
    DoubtFacts,
    NextAction,
    NotFound,
    decide,
)
from pipeline.domain.states import Evidence

HANDLER = UUID("0199c0de-0000-7000-8000-000000000001")
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def test_an_effect_is_the_same_whatever_the_order_of_its_inputs() -> None:
    one = effect_id(HANDLER, [["paid", "1"], ["paid", "2"]], "h")
    assert one == effect_id(HANDLER, [["paid", "2"], ["paid", "1"]], "h")
    assert idempotency_key(one, 2) == f"{one}:2"


def test_another_handler_input_topic_or_request_is_another_effect() -> None:
    effects = {
        effect_id(HANDLER, [["paid", "1"]], "h"),
        effect_id(uuid4(), [["paid", "1"]], "h"),
        effect_id(HANDLER, [["paid", "2"]], "h"),
        effect_id(HANDLER, [["sent", "1"]], "h"),
        effect_id(HANDLER, [["paid", "1"], ["paid", "2"]], "h"),
        effect_id(HANDLER, [["paid", "1"]], "other"),
    }
    assert len(effects) == 6


@pytest.mark.parametrize(
    ("sent", "key", "at", "expected"),
    [
        (SentKey(key="k", keyed=True, expires_at=None), "k", NOON, True),
        (SentKey(key="k", keyed=True, expires_at=NOON), "k", NOON - timedelta(seconds=1), True),
        (SentKey(key="k", keyed=True, expires_at=NOON), "k", NOON, False),
        (SentKey(key="k", keyed=False, expires_at=None), "k", NOON, False),
        (SentKey(key="k", keyed=True, expires_at=None), "other", NOON, False),
        (SentKey(key="k", keyed=True, expires_at=None), "k", None, False),
    ],
)
def test_two_requests_have_one_effect_only_if_the_key_was_honoured_for_both(
    sent: SentKey, key: str, at: datetime | None, expected: bool
) -> None:
    assert is_one_effect(sent, key, at) is expected


@pytest.mark.parametrize(
    ("action", "kind", "expected"),
    [
        (NextAction.ABSENT, FailureKind.TRANSIENT, Evidence.ABSENCE),
        (NextAction.FAILED, FailureKind.LOGIC, Evidence.REFUSED),
        (NextAction.FAILED, FailureKind.TRANSIENT, Evidence.DEFINITE),
        (NextAction.FAILED, FailureKind.AUTH, Evidence.DEFINITE),
    ],
)
def test_only_a_refusal_of_the_request_is_evidence_that_uses_its_key_up(
    action: NextAction, kind: FailureKind, expected: Evidence
) -> None:
    assert CallDecision(action=action, failure=Failure(kind=kind, message="no")).evidence is expected


def test_a_request_that_is_never_found_under_its_key_goes_to_an_operator() -> None:
    facts = DoubtFacts(reconcile_attempts=1, max_attempts=5, earlier_absences=MAX_ABSENCES - 1)
    assert decide(NotFound(), facts).action is NextAction.ABSENT
    facts = DoubtFacts(reconcile_attempts=1, max_attempts=5, earlier_absences=MAX_ABSENCES)
    assert decide(NotFound(), facts).action is NextAction.ESCALATE
