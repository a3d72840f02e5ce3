"""How far apart attempts are, and which policies are refused."""

import math
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.domain.policies import Backoff, FailurePolicy, Policy, ReconcilePolicy, WakePolicy
from tests.support.rule import rule

DAY = timedelta(days=1)


@st.composite
def backoffs(draw: st.DrawFn) -> Backoff:
    base = draw(st.timedeltas(min_value=timedelta(0), max_value=DAY))
    return Backoff(
        base=base,
        multiplier=draw(st.floats(min_value=1, max_value=100)),
        cap=draw(st.timedeltas(min_value=base, max_value=30 * DAY)),
        jitter=draw(st.floats(min_value=0, max_value=1)),
    )


chances = st.floats(min_value=0, max_value=1, exclude_max=True)
attempts = st.integers(min_value=1, max_value=200)


@rule("R-12")
@pytest.mark.parametrize(
    ("attempt", "seconds"), [(1, 10), (2, 20), (3, 40), (4, 80), (5, 160), (6, 320), (7, 600), (8, 600), (10_000, 600)]
)
def test_reconciling_starts_ten_seconds_apart_doubles_and_stays_at_ten_minutes(attempt: int, seconds: int) -> None:
    assert ReconcilePolicy().backoff.delay(attempt) == timedelta(seconds=seconds)


@pytest.mark.parametrize(("attempt", "seconds"), [(1, 2), (2, 3), (3, 4.5), (4, 6.75), (5, 7)])
def test_a_pause_grows_by_its_multiplier_and_is_cut_at_its_cap(attempt: int, seconds: float) -> None:
    backoff = Backoff(base=timedelta(seconds=2), multiplier=1.5, cap=timedelta(seconds=7), jitter=0)
    assert backoff.delay(attempt) == timedelta(seconds=seconds)


def test_jitter_adds_its_share_of_the_pause() -> None:
    backoff = Backoff(base=timedelta(seconds=10), jitter=0.2)
    assert backoff.delay(1, jitter=0.5) == timedelta(seconds=11)
    assert backoff.delay(2, jitter=0.25) == timedelta(seconds=21)


@pytest.mark.parametrize("multiplier", [1.0, 1.0001, 2.0, 100.0])
@pytest.mark.parametrize("base", [timedelta(0), timedelta(microseconds=1), timedelta(days=1), timedelta(days=365)])
def test_no_attempt_number_overflows(base: timedelta, multiplier: float) -> None:
    cap = timedelta(days=365)
    backoff = Backoff(base=base, multiplier=multiplier, cap=cap)
    assert timedelta(0) <= backoff.delay(10_000, jitter=0.999) <= cap


def test_a_cap_beyond_a_year_is_refused_so_that_no_pause_overflows() -> None:
    with pytest.raises(ValidationError, match="less than or equal to 365 days"):
        Backoff(cap=timedelta(days=366))


def test_a_pause_of_nothing_stays_nothing() -> None:
    assert Backoff(base=timedelta(0), cap=DAY).delay(10_000, jitter=0.9) == timedelta(0)


@rule("R-12")
@given(backoffs(), attempts, chances)
def test_a_pause_is_between_its_base_and_its_cap_with_any_jitter(backoff: Backoff, attempt: int, chance: float) -> None:
    pause = backoff.delay(attempt, jitter=chance)
    assert backoff.base <= pause <= backoff.cap
    assert backoff.delay(attempt) <= backoff.cap


@given(backoffs(), attempts, chances)
def test_a_later_attempt_never_waits_less(backoff: Backoff, attempt: int, chance: float) -> None:
    assert backoff.delay(attempt + 1, jitter=chance) >= backoff.delay(attempt, jitter=chance)


@given(backoffs(), attempts, chances, chances)
def test_more_chance_never_waits_less(backoff: Backoff, attempt: int, one: float, other: float) -> None:
    assert backoff.delay(attempt, jitter=min(one, other)) <= backoff.delay(attempt, jitter=max(one, other))


@given(backoffs(), st.integers(min_value=1, max_value=100), st.integers(min_value=1, max_value=100))
def test_a_policy_survives_json_unchanged(backoff: Backoff, most: int, aside: int) -> None:
    policy = FailurePolicy(max_failures=most, quarantine_after=aside, backoff=backoff)
    assert FailurePolicy.model_validate(policy.model_dump(mode="json")) == policy
    assert FailurePolicy.model_validate_json(policy.model_dump_json()) == policy


@pytest.mark.parametrize("policy", [Backoff(), FailurePolicy(), ReconcilePolicy(), WakePolicy()])
def test_a_policy_survives_json_with_its_defaults(policy: Policy) -> None:
    assert type(policy).model_validate_json(policy.model_dump_json()) == policy


@pytest.mark.parametrize(
    ("policy", "wrong"),
    [
        (Backoff, {"base": timedelta(seconds=-1)}),
        (Backoff, {"cap": timedelta(seconds=-1), "base": timedelta(0)}),
        (Backoff, {"multiplier": 0.5}),
        (Backoff, {"multiplier": 101}),
        (Backoff, {"multiplier": math.nan}),
        (Backoff, {"multiplier": math.inf}),
        (Backoff, {"jitter": -0.1}),
        (Backoff, {"jitter": 1.1}),
        (Backoff, {"jitter": math.nan}),
        (Backoff, {"growth": 2}),
        (FailurePolicy, {"max_failures": 0}),
        (FailurePolicy, {"quarantine_after": 0}),
        (FailurePolicy, {"max_attempts": 5}),
        (ReconcilePolicy, {"max_attempts": 0}),
        (ReconcilePolicy, {"immediate_timeout": timedelta(0)}),
        (ReconcilePolicy, {"monitor_after": (timedelta(hours=1), timedelta(minutes=1))}),
        (ReconcilePolicy, {"monitor_after": (timedelta(hours=1), timedelta(hours=1))}),
        (ReconcilePolicy, {"monitor_after": (timedelta(0),)}),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused_by_the_name_of_its_field(
    policy: type[Policy], wrong: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        policy(**wrong)


def test_a_cap_below_its_base_is_refused_with_both() -> None:
    with pytest.raises(ValidationError, match=r"cap 0:00:01 is below base 0:00:02; expected cap >= base"):
        Backoff(base=timedelta(seconds=2), cap=timedelta(seconds=1))


@pytest.mark.parametrize("policy", [Backoff(), FailurePolicy(), ReconcilePolicy(), WakePolicy()])
def test_a_policy_is_frozen(policy: Policy) -> None:
    field = next(iter(type(policy).model_fields))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(policy, field, getattr(policy, field))


@pytest.mark.parametrize(
    "wrong",
    [
        {"soonest": timedelta(hours=2), "latest": timedelta(hours=1)},
        {"soonest": timedelta(seconds=-1)},
    ],
    ids=["latest before soonest", "soonest in the past"],
)
def test_a_wake_policy_that_makes_no_sense_is_refused(wrong: dict[str, timedelta]) -> None:
    with pytest.raises(ValidationError):
        WakePolicy(**wrong)
