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
from pipeline.domain.runs import RunStatus
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


def land(
    tx: Transaction,
    asked: Sequence[Held],
    landed: Sequence[T],
    *,
    key: Callable[[T], UUID],
    verb: str,
    needs: Sequence[str],
) -> Landing[T]:
    """Pair a cohort with what landed of it. The reasons cost a query only when something is missing."""
    there = {key(row) for row in landed}
    missing = [held for held in asked if held.run_id not in there]
    refused = _reasons(tx, missing, verb, needs) if missing else {}
    return Landing(landed=tuple(landed), refused=refused)


def _reasons(tx: Transaction, missing: Sequence[Held], verb: str, needs: Sequence[str]) -> dict[UUID, PipelineError]:
    rows = {row.id: row for row in views.runs(tx, [held.run_id for held in missing])}
    return {held.run_id: _reason(held, rows.get(held.run_id), verb, needs) for held in missing}


def _reason(held: Held, row: Row[Any] | None, verb: str, needs: Sequence[str]) -> PipelineError:
    """Not there, not ours any more, or ours but not in a phase that has this move."""
    if row is None:
        return UnknownError("run", held.run_id, hint="Nothing was changed.")
    found = f"{row.phase}, {row.status}"
    if row.fence != held.fence or row.status != RunStatus.ACTIVE:
        return StaleWriteError(
            "run", held.run_id, asked=verb, held=f"fence {held.fence}", found=f"fence {row.fence}, {found}"
        )
    return IllegalTransitionError("run", held.run_id, asked=verb, found=found, allowed=needs)
