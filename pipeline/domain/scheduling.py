"""Decide which handler is due, in which order, and how many runs start at once. Pure: no I/O.

The scheduler reads facts, asks these functions, and starts what they say. Time is an argument.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Self

from pipeline.domain.policies import WakePolicy
from pipeline.domain.workflows import DesiredStatus, HandlerKind


class HoldReason(StrEnum):
    """Why a workflow starts nothing right now."""

    PAUSED = "paused"
    BLOCKED = "blocked"
    MAINTENANCE = "maintenance"
    FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowFacts:
    """What the scheduler knows of a workflow, read under its lock."""

    desired: DesiredStatus
    maintenance: bool
    blocks: int
    concurrency: int
    active_runs: int  #: each takes a place
    has_waiting: bool = False  #: with concurrency 1: a run waits for approval or a retry, and nothing overtakes it

    @classmethod
    def of(cls, row: Any) -> Self:
        """The facts in a row that has them as columns."""
        return cls(
            desired=DesiredStatus(row.desired),
            maintenance=row.maintenance,
            blocks=row.blocks,
            concurrency=row.concurrency,
            active_runs=row.active_runs,
            has_waiting=row.has_waiting,
        )

    @property
    def free_capacity(self) -> int:
        return max(0, self.concurrency - self.active_runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerFacts:
    """What the scheduler knows of a handler."""

    kind: HandlerKind
    retry_at: datetime | None
    wake_at: datetime | None
    next_run_at: datetime | None
    has_unseen: bool  #: a pending event that the last empty prepare cannot have seen
    has_retry: bool  #: a stopped run waits for a retry
    turn: int = 0  #: its place among the handlers of its workflow by their last start; 0: it never started
    is_single: bool = False  #: its workflow has concurrency 1
    has_probe_run: bool = False  #: no worker took its runs, and one probe run is dispatched


class DueReason(StrEnum):
    """Why a handler is due."""

    RETRY = "retry"
    EVENTS = "events"
    WAKE = "wake"
    SLOT = "slot"


def hold_reason(facts: WorkflowFacts, *, is_retry: bool = False) -> HoldReason | None:
    """The first reason to start nothing, or None when the workflow may start a run.

    ``is_retry``: the run to start is the retry of one that waits.
    """
    if facts.desired is DesiredStatus.PAUSED:
        return HoldReason.PAUSED
    if facts.maintenance:
        return HoldReason.MAINTENANCE
    if facts.blocks:
        return HoldReason.BLOCKED
    if not facts.free_capacity or (facts.has_waiting and not is_retry):
        return HoldReason.FULL
    return None


def due_reason(facts: HandlerFacts, now: datetime) -> DueReason | None:
    """Why this handler should start a run now, or None.

    A backoff holds everything, and so does the one run that is tried of a handler whose runs no worker took. An
    empty prepare is not asked again until an event arrives that it cannot have seen, or the time it asked for has
    come: no busy loop, and nothing is missed.
    """
    if facts.has_probe_run or (facts.retry_at is not None and facts.retry_at > now):
        return None
    if facts.has_retry:
        return DueReason.RETRY
    if facts.kind is HandlerKind.PRODUCER:
        return DueReason.SLOT if facts.next_run_at is not None and facts.next_run_at <= now else None
    if facts.has_unseen:
        return DueReason.EVENTS
    if facts.wake_at is not None and facts.wake_at <= now:
        return DueReason.WAKE
    return None


_PRIORITY = {DueReason.RETRY: 0, DueReason.EVENTS: 1, DueReason.WAKE: 1, DueReason.SLOT: 2}


def priority(reason: DueReason, facts: HandlerFacts) -> tuple[bool, int, int]:
    """Sort key: the handler whose last start is longest ago first, whatever makes it due.

    A handler that starts goes behind all others. So each other handler starts at most once before a due one does. With
    concurrency 1 a retry goes first, since nothing else may start before it. The reason decides between handlers that
    never started.
    """
    is_overtaking = facts.is_single and reason is DueReason.RETRY
    return not is_overtaking, facts.turn, _PRIORITY[reason]


def clamp_wake_at(requested: datetime, now: datetime, policy: WakePolicy) -> datetime:
    """The time a prepare will really be called again: neither a busy loop nor a forgotten one."""
    return min(max(requested, now + policy.soonest), now + policy.latest)


def next_slot(slot: datetime, every: timedelta, now: datetime) -> datetime:
    """The first slot after now on the grid of ``slot``: slots missed meanwhile are one run, not many."""
    if every <= timedelta(0):
        raise ValueError(f"a schedule needs a pause between its slots, got every={every}")
    first = slot.astimezone(UTC)  # elapsed time: a wall clock would jump with summer time
    if first > now:
        return first
    return first + every * ((now - first) // every + 1)


def cohort_size(concurrency: int, *, per_run: timedelta, cohort_time: timedelta, max_size: int) -> int:
    """How many runs travel together, at most. There are fewer if less is pending: under light load one.

    Half the places: two processes share the work evenly, and none waits for one large cohort. At most a quarter
    of ``cohort_time`` of work: a slow handler gets small cohorts, so that it cannot hold many runs hostage.
    """
    by_time = max_size if per_run <= timedelta(0) else max(1, int(cohort_time / 4 / per_run))
    return max(1, min(-(-concurrency // 2), by_time, max_size))
