"""Who may start, who is due, in which order, and how many at once."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.domain.policies import WakePolicy
from pipeline.domain.scheduling import (
    DueReason,
    HandlerFacts,
    HoldReason,
    WorkflowFacts,
    clamp_wake_at,
    cohort_size,
    due_reason,
    hold_reason,
    next_slot,
    priority,
)
from pipeline.domain.workflows import DesiredStatus, HandlerKind

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
PAST, FUTURE = NOW - SECOND, NOW + SECOND

FREE = WorkflowFacts(desired=DesiredStatus.ACTIVE, maintenance=False, blocks=0, concurrency=2, active_runs=1)
IDLE = HandlerFacts(
    kind=HandlerKind.CONSUMER,
    retry_at=None,
    wake_at=None,
    next_run_at=None,
    has_unseen=False,
    has_retry=False,
)
PRODUCER = replace(IDLE, kind=HandlerKind.PRODUCER)

instants = st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001 - made aware by timezones=
spans = st.timedeltas(timedelta(microseconds=1), timedelta(days=40))
counts = st.integers(min_value=0, max_value=1000)


def test_a_workflow_with_room_may_start_a_run() -> None:
    assert hold_reason(FREE) is None


@pytest.mark.parametrize(
    ("facts", "held"),
    [
        (replace(FREE, desired=DesiredStatus.PAUSED), HoldReason.PAUSED),
        (replace(FREE, maintenance=True), HoldReason.MAINTENANCE),
        (replace(FREE, blocks=1), HoldReason.BLOCKED),
        (replace(FREE, active_runs=2), HoldReason.FULL),
        (replace(FREE, active_runs=3), HoldReason.FULL),
    ],
)
def test_each_reason_alone_holds_a_workflow(facts: WorkflowFacts, held: HoldReason) -> None:
    assert hold_reason(facts) is held


def test_the_reason_that_an_operator_can_change_is_named_first() -> None:
    facts = WorkflowFacts(desired=DesiredStatus.PAUSED, maintenance=True, blocks=3, concurrency=1, active_runs=1)
    seen = [hold_reason(facts)]
    lifts: list[dict[str, Any]] = [
        {"desired": DesiredStatus.ACTIVE},
        {"maintenance": False},
        {"blocks": 0},
        {"active_runs": 0},
    ]
    for lift in lifts:
        facts = replace(facts, **lift)
        seen.append(hold_reason(facts))
    assert seen == [HoldReason.PAUSED, HoldReason.MAINTENANCE, HoldReason.BLOCKED, HoldReason.FULL, None]


@given(counts, counts)
def test_free_concurrency_is_never_negative(concurrency: int, in_the_air: int) -> None:
    facts = replace(FREE, concurrency=concurrency, active_runs=in_the_air)
    assert facts.free_capacity == (concurrency - in_the_air if concurrency > in_the_air else 0)
    assert (hold_reason(facts) is HoldReason.FULL) == (facts.free_capacity == 0)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (IDLE, None),
        (replace(IDLE, turn=1), None),
        (replace(IDLE, has_unseen=True), DueReason.EVENTS),
        (replace(IDLE, wake_at=FUTURE), None),
        (replace(IDLE, wake_at=NOW), DueReason.WAKE),
        (replace(IDLE, wake_at=PAST), DueReason.WAKE),
        (replace(IDLE, wake_at=PAST, has_unseen=True), DueReason.EVENTS),
        (replace(IDLE, next_run_at=PAST), None),
        (replace(IDLE, has_retry=True), DueReason.RETRY),
        (replace(IDLE, has_retry=True, has_unseen=True, wake_at=PAST), DueReason.RETRY),
        (replace(IDLE, has_unseen=True, retry_at=PAST), DueReason.EVENTS),
        (replace(IDLE, has_unseen=True, retry_at=NOW), DueReason.EVENTS),
        (PRODUCER, None),
        (replace(PRODUCER, next_run_at=FUTURE), None),
        (replace(PRODUCER, next_run_at=NOW), DueReason.SLOT),
        (replace(PRODUCER, next_run_at=PAST), DueReason.SLOT),
        (replace(PRODUCER, has_unseen=True, wake_at=PAST), None),
        (replace(PRODUCER, has_retry=True), DueReason.RETRY),
    ],
)
def test_a_handler_is_due_for_its_first_reason(facts: HandlerFacts, reason: DueReason | None) -> None:
    assert due_reason(facts, NOW) is reason


@pytest.mark.parametrize("kind", HandlerKind)
def test_a_backoff_holds_everything_until_it_is_over(kind: HandlerKind) -> None:
    everything = replace(IDLE, kind=kind, has_retry=True, has_unseen=True, wake_at=PAST, next_run_at=PAST)
    assert due_reason(replace(everything, retry_at=FUTURE), NOW) is None
    assert due_reason(replace(everything, retry_at=NOW), NOW) is not None


def test_handlers_take_turns_whatever_makes_them_due() -> None:
    queue = [
        ("retry that started last", DueReason.RETRY, replace(IDLE, turn=4)),
        ("slot", DueReason.SLOT, replace(PRODUCER, turn=2)),
        ("wake", DueReason.WAKE, replace(IDLE, turn=1)),
        ("slot that never started", DueReason.SLOT, PRODUCER),
        ("events", DueReason.EVENTS, replace(IDLE, turn=3)),
        ("events that never started", DueReason.EVENTS, IDLE),
    ]
    queue.sort(key=lambda item: priority(item[1], item[2]))
    assert [name for name, _, _ in queue] == [
        "events that never started",
        "slot that never started",
        "wake",
        "slot",
        "events",
        "retry that started last",
    ]


@pytest.mark.parametrize("reason", DueReason)
@pytest.mark.parametrize("is_single", [True, False])
def test_only_a_retry_with_concurrency_one_overtakes(reason: DueReason, is_single: bool) -> None:
    last = replace(IDLE, turn=9, is_single=is_single)
    waiting = replace(IDLE, turn=1, is_single=is_single)
    is_first = priority(reason, last) < priority(DueReason.EVENTS, waiting)
    assert is_first == (is_single and reason is DueReason.RETRY)


def test_while_a_run_waits_in_the_only_place_nothing_but_its_retry_starts() -> None:
    waiting = replace(FREE, concurrency=1, active_runs=0, has_waiting=True)
    assert hold_reason(waiting) is HoldReason.FULL
    assert hold_reason(waiting, is_retry=True) is None


due_reasons = st.sampled_from(DueReason)
#: In each pass: why each of five handlers is due, if it is, and whether it can start.
passes = st.lists(st.lists(st.tuples(st.none() | due_reasons, st.booleans()), min_size=5, max_size=5), max_size=40)


@given(passes, st.integers(0, 4), due_reasons)
def test_a_due_handler_waits_at_most_until_each_other_has_started_once(
    passes: list[list[tuple[DueReason | None, bool]]], waiting: int, reason: DueReason
) -> None:
    """A pass tries the due handlers in order until one starts. Each that was tried goes behind the others."""
    turns: list[int] = []
    overtook: list[int] = []
    for facts in passes:
        due = {n: (why, can_start) for n, (why, can_start) in enumerate(facts) if why is not None}
        due[waiting] = (reason, True)
        turn_of = {n: turns.index(n) + 1 if n in turns else 0 for n in due}
        for n in sorted(due, key=lambda n: (priority(due[n][0], replace(IDLE, turn=turn_of[n])), n)):
            turns = [*(other for other in turns if other != n), n]
            if due[n][1]:
                overtook = [] if n == waiting else [*overtook, n]
                break
        assert len(overtook) == len(set(overtook))


@pytest.mark.parametrize(
    ("asked", "given_"),
    [
        (timedelta(days=-400), timedelta(seconds=30)),
        (timedelta(0), timedelta(seconds=30)),
        (timedelta(seconds=30), timedelta(seconds=30)),
        (timedelta(minutes=5), timedelta(minutes=5)),
        (timedelta(hours=24), timedelta(hours=24)),
        (timedelta(days=400), timedelta(hours=24)),
    ],
)
def test_a_wake_up_is_neither_a_busy_loop_nor_forgotten(asked: timedelta, given_: timedelta) -> None:
    assert clamp_wake_at(NOW + asked, NOW, WakePolicy()) == NOW + given_


@given(instants, instants)
def test_a_wake_up_is_always_within_the_policy(asked: datetime, now: datetime) -> None:
    at = clamp_wake_at(asked, now, WakePolicy())
    assert timedelta(seconds=30) <= at - now <= timedelta(hours=24)
    assert at == asked or not timedelta(seconds=30) <= asked - now <= timedelta(hours=24)


@given(instants, spans, instants)
def test_the_next_slot_is_the_first_on_the_grid_after_now(slot: datetime, every: timedelta, now: datetime) -> None:
    following = next_slot(slot, every, now)
    assert following > now
    assert (following - slot) % every == timedelta(0)
    assert following == slot or following - every <= now


def test_slots_missed_meanwhile_are_one_run() -> None:
    hour = timedelta(hours=1)
    assert next_slot(NOW - 100.5 * hour, hour, NOW) == NOW + 0.5 * hour
    assert next_slot(NOW, hour, NOW) == NOW + hour
    assert next_slot(FUTURE, hour, NOW) == FUTURE


def test_the_next_slot_is_after_now_on_the_night_the_clocks_change() -> None:
    slot = datetime(2024, 3, 31, tzinfo=ZoneInfo("Europe/Berlin"))
    now = datetime(2024, 3, 31, 10, 30, tzinfo=UTC)
    assert next_slot(slot, timedelta(hours=1), now) > now


@pytest.mark.parametrize(
    ("concurrency", "per_run", "size"),
    [
        (1, 0.0, 1),
        (2, 0.0, 1),
        (65, 0.0, 33),
        (500, 0.0, 100),
        (500, 0.5, 30),
        (500, 15.0, 1),
        (500, 3600.0, 1),
    ],
    ids=[
        "one place",
        "one for each process",
        "half the places",
        "no more than the most",
        "a quarter of the lease",
        "one fills the quarter",
        "slower than the lease",
    ],
)
def test_a_cohort_follows_the_places_and_the_handlers_speed(concurrency: int, per_run: float, size: int) -> None:
    lease = timedelta(seconds=60)
    assert cohort_size(concurrency, per_run=timedelta(seconds=per_run), cohort_time=lease, max_size=100) == size


@given(st.integers(min_value=1), spans, spans, st.integers(min_value=1, max_value=200))
def test_a_cohort_is_never_larger_than_any_bound_and_never_starves(
    concurrency: int, per_run: timedelta, lease: timedelta, most: int
) -> None:
    size = cohort_size(concurrency, per_run=per_run, cohort_time=lease, max_size=most)
    assert 1 <= size <= min(-(-concurrency // 2), most)
    assert size <= 1 or size * per_run <= lease / 4 + timedelta(microseconds=size)


@pytest.mark.parametrize("every", [timedelta(0), timedelta(seconds=-1)])
def test_a_schedule_without_a_pause_between_its_slots_is_refused(every: timedelta) -> None:
    with pytest.raises(ValueError, match="needs a pause between its slots"):
        next_slot(NOW, every, NOW)
