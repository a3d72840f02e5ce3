"""The token of a mutation's state, and what a changed state says."""

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from pipeline.domain.acts import state_changes, state_token
from pipeline.domain.errors import InvalidInputError

NOON = datetime(2026, 11, 18, 12, tzinfo=UTC)


@dataclass(frozen=True)
class Facts:
    status: str = "indeterminate"
    attempts: int = 1
    reconcile_attempts: int = 5
    request_hash: str = "abc"
    error: str | None = "no answer"
    approved_by: str | None = None
    approved_at: datetime | None = None
    resolved_by: str | None = None
    resolved_at: datetime | None = None
    found_late_at: datetime | None = None
    acknowledged_by: str | None = None


SEEN = Facts()

CHANGES: dict[str, dict[str, Any]] = {
    "status was indeterminate, is needs_reconcile": {"status": "needs_reconcile"},
    "attempts was 1, is 2": {"attempts": 2},
    "reconcile attempts was 5, is 0": {"reconcile_attempts": 0},
    "request changed, is abd": {"request_hash": "abd"},
    "error changed, is no answer; asked 5 times": {"error": "no answer; asked 5 times"},
    "error changed, is none": {"error": None},
    "approval changed, is ada 2026-11-18T12:00:00+00:00": {"approved_by": "ada", "approved_at": NOON},
    "resolution changed, is operator 2026-11-18T12:00:00+00:00": {"resolved_by": "operator", "resolved_at": NOON},
    "late effect changed, is 2026-11-18T12:00:00+00:00": {"found_late_at": NOON},
    "late effect changed, is ada": {"acknowledged_by": "ada"},
}


@pytest.mark.parametrize("text", CHANGES)
def test_each_fact_that_an_answer_is_formed_on_changes_the_token_and_is_named(text: str) -> None:
    now = replace(SEEN, **CHANGES[text])
    assert state_token(now) != state_token(SEEN)
    assert state_changes(state_token(SEEN), now) == (text,)


def test_an_unchanged_mutation_has_the_same_token_in_every_time_zone() -> None:
    done = replace(SEEN, status="applied", resolved_by="call", resolved_at=NOON)
    elsewhere = replace(done, resolved_at=NOON.astimezone(timezone(timedelta(hours=5))))
    assert state_token(done) == state_token(elsewhere)
    assert state_changes(state_token(done), elsewhere) == ()


def test_a_token_can_be_typed_in_a_shell_and_sent_as_a_header() -> None:
    assert set(state_token(SEEN)) <= set("abcdefghijklmnopqrstuvwxyz_.0123456789")
    assert state_token(SEEN).startswith("indeterminate.1.5.")


def test_a_token_that_lacks_its_end_is_another_state() -> None:
    assert state_changes("indeterminate", SEEN)[0] == "attempts was not given, is 1"


@pytest.mark.parametrize("token", ["", "gone", "W/abc", "indeterminate.1.5.a.b.c.d.e.f"])
def test_a_text_that_is_no_token_is_refused(token: str) -> None:
    with pytest.raises(InvalidInputError, match="is no state of a mutation"):
        state_changes(token, SEEN)
