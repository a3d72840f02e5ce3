"""What became of a cohort: the rows that landed, and for each of the others the reason.

A worker continues with the updated runs and drops the others. A caller with a single row asks for ``only()``
and gets the row or the error.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from uuid import UUID

from pipeline.domain.errors import (
    IllegalTransitionError,
    NotFoundError,
    PipelineError,
    ReservationError,
    StaleWriteError,
)
from pipeline.domain.states import DeliveryStatus, Phase, RunStatus
from pipeline.domain.values import PreparedRun, RunLease
from pipeline.store.database import Transaction
from pipeline.store.reads import work
from pipeline.store.rows import LeasedRunRow, RefusedInputRow
from pipeline.store.schema import RunRow

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult(Generic[T_co]):
    """The answer of every set-based verb."""

    updated: tuple[T_co, ...]
    refused: Mapping[UUID, PipelineError] = field(default_factory=dict)

    def only(self) -> T_co:
        """The one row a cohort of one is about; raises why there is none."""
        for error in self.refused.values():
            raise error
        (row,) = self.updated
        return row


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """A move as an error names it: the verb, the phases it starts from, and what else it needs.

    ``explain`` says why a row that is held in the right phase was refused all the same.
    """

    verb: str
    phases: Sequence[Phase]
    condition: str = ""
    explain: Callable[[LeasedRunRow], PipelineError] | None = None

    @property
    def needs(self) -> list[str]:
        return [f"{phase}{self.condition}" for phase in self.phases]


def match_results(
    tx: Transaction,
    leases: Sequence[RunLease],
    updated: Sequence[T],
    *,
    key: Callable[[T], UUID],
    transition: Transition,
) -> BatchResult[T]:
    """Pair a cohort with what landed of it. The reasons cost a query only when something is missing."""
    there = {key(row) for row in updated}
    missing = [held for held in leases if held.run_id not in there]
    found = {row.id: row for row in work.runs(tx, [held.run_id for held in missing])} if missing else {}
    refused: dict[UUID, PipelineError] = {
        held.run_id: _refusal(held, found.get(held.run_id), transition) for held in missing
    }
    return BatchResult(updated=tuple(updated), refused=refused)


def _refusal(held: RunLease, row: LeasedRunRow | None, move: Transition) -> PipelineError:
    """Not there; not ours any more (held by another, stopped, done, lapsed); or ours, but without this move."""
    if row is None:
        return NotFoundError("run", held.run_id, hint="Nothing was changed.")
    ours = row.fence == held.fence and row.status == RunStatus.ACTIVE
    if ours and row.phase in move.phases and move.explain:
        return move.explain(row)
    state = f"{row.phase}, {row.status}"
    if ours and row.is_leased:
        return IllegalTransitionError("run", held.run_id, verb=move.verb, found=state, allowed=move.needs)
    lease = "leased" if row.is_leased else "not leased"
    found = f"fence {row.fence}, {state}, {lease}"
    return StaleWriteError("run", held.run_id, verb=move.verb, expected=f"fence {held.fence}", found=found)


def requested_events(item: PreparedRun) -> tuple[list[int], list[str]]:
    """The events that a prepare wants to reserve, each with its topic. An event that is named twice counts once."""
    topic_of = {int(event): r.topic for r in item.reservations for event in r.ids}
    return list(topic_of), list(topic_of.values())


def reservation_error(tx: Transaction, run: RunRow, item: PreparedRun) -> PipelineError:
    """Read again what could not be reserved, and explain it event by event.

    A run that is refused although it asks for nothing is no consumer's run.
    """
    events, topics = requested_events(item)
    if not events:
        return IllegalTransitionError(
            "run", run.id, verb="finish_prepare", found=f"{run.phase}, of a producer", allowed=["of a consumer"]
        )
    rows = work.refused_inputs(tx, run.handler_id, events, topics)
    reasons: dict[int, str] = {row.event_id: why for row in rows if (why := _refusal_reason(row, run))}
    moved_on = all(row.found_topic == row.topic and row.status is not None for row in rows)
    return ReservationError(run.id, reasons or dict.fromkeys(events, "another run took it just now"), is_race=moved_on)


def _refusal_reason(row: RefusedInputRow, run: RunRow) -> str | None:
    """The first of these that is true of an event, or None when it can be reserved now."""
    reasons = (
        (row.found_topic is None, "there is no such event"),
        (row.found_topic != row.topic, f"it is on topic {row.found_topic!r}, not {row.topic!r}"),
        (row.status is None, "this consumer has no delivery of it"),
        (row.status != DeliveryStatus.PENDING, f"it is {row.status}"),
        (row.offered_to not in (None, run.id), "it was offered to another run"),
        (row.offered_to is None and run.offered is not None, "it is not in the slice this run was offered"),
    )
    return next((reason for holds, reason in reasons if holds), None)
