"""What became of a cohort: the rows that landed, and for each of the others the reason.

A worker goes on with what landed and drops the rest. A caller with a single row asks for ``only()``
and gets the row or the error.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from uuid import UUID

from sqlalchemy import Row

from pipeline.domain.errors import IllegalTransitionError, PipelineError, StaleWriteError, UnknownError
from pipeline.domain.runs import Phase, RunStatus
from pipeline.domain.values import Held
from pipeline.store import views
from pipeline.store.database import Transaction

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing(Generic[T]):
    """The answer of every set-based verb."""

    landed: tuple[T, ...]
    refused: Mapping[UUID, PipelineError] = field(default_factory=dict)

    def only(self) -> T:
        """The one row a cohort of one is about; raises why there is none."""
        for error in self.refused.values():
            raise error
        (row,) = self.landed
        return row


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A move as an error names it: the verb, the phases it starts from, and what else it needs.

    ``explain`` says why a row that is held in the right phase was refused all the same.
    """

    verb: str
    phases: Sequence[Phase]
    also: str = ""
    explain: Callable[[Row[Any]], PipelineError] | None = None

    @property
    def needs(self) -> list[str]:
        return [f"{phase}{self.also}" for phase in self.phases]


def land(
    tx: Transaction,
    asked: Sequence[Held],
    landed: Sequence[T],
    *,
    key: Callable[[T], UUID],
    move: Move,
) -> Landing[T]:
    """Pair a cohort with what landed of it. The reasons cost a query only when something is missing."""
    there = {key(row) for row in landed}
    missing = [held for held in asked if held.run_id not in there]
    found = {row.id: row for row in views.runs(tx, [held.run_id for held in missing])} if missing else {}
    refused: dict[UUID, PipelineError] = {held.run_id: _reason(held, found.get(held.run_id), move) for held in missing}
    return Landing(landed=tuple(landed), refused=refused)


def _reason(held: Held, row: Row[Any] | None, move: Move) -> PipelineError:
    """Not there; not ours any more (held by another, stopped, done, lapsed); or ours, but without this move."""
    if row is None:
        return UnknownError("run", held.run_id, hint="Nothing was changed.")
    ours = row.fence == held.fence and row.status == RunStatus.ACTIVE
    if ours and row.phase in move.phases and move.explain:
        return move.explain(row)
    state = f"{row.phase}, {row.status}"
    if ours and row.is_leased:
        return IllegalTransitionError("run", held.run_id, asked=move.verb, found=state, allowed=move.needs)
    lease = "leased" if row.is_leased else "not leased"
    found = f"fence {row.fence}, {state}, {lease}"
    return StaleWriteError("run", held.run_id, asked=move.verb, held=f"fence {held.fence}", found=found)
