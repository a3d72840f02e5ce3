"""What a look found of a mutation that was settled as not having happened: its own effect, or one that was done since.

Where a connector looks by something else than the key, what was rightly done again answers for what was not.
Nobody must be told to undo that, so what is known of both sides is kept apart from what is not.
"""

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

from sqlalchemy import Row

from pipeline.domain.ids import MutationId
from pipeline.domain.payloads import checked_json
from pipeline.domain.states import MutationStatus
from pipeline.domain.values import DEFAULT_LIMITS, Person
from pipeline.store.database import Transaction
from pipeline.store.reads import ledger
from pipeline.store.writes import mutations as mutation_store
from pipeline.transitions import audit

_MAYBE = {
    MutationStatus.IN_FLIGHT,
    MutationStatus.NEEDS_RECONCILE,
    MutationStatus.INDETERMINATE,
    MutationStatus.APPLIED,
}


def done_again(tx: Transaction, row: Row[Any]) -> Row[Any] | None:
    """The later run for the same inputs whose effect may be taken for that of this mutation."""
    return _alike(row, ledger.instead(tx, row.run_id, row.id))


def is_the_other(again: Row[Any], found: Any) -> bool:
    """Whether what was found is the result of what was done again. Results without content are all alike."""
    has_content = found not in (None, True, False, {}, [], "") and not (
        isinstance(found, dict) and "unstorable" in found
    )
    return has_content and again.mutation_status == MutationStatus.APPLIED and bool(again.result == found)


def not_surfaced(tx: Transaction, row: Row[Any], again: Row[Any], found: Any, by: Person) -> None:
    """Keep that what was found is what was done again, by a look that finds it for any key."""
    why = (
        f"what was found is the effect of run {again.run_id}, which did it again; nothing shows that it happened twice"
    )
    evidence = {**_other_side(again), "found": found}
    kept = Person(name=by.name, reason=why, evidence=evidence)
    audit.record(tx, kept, "mutation.not_surfaced", workflow=row.workflow, run_id=row.run_id, mutation_id=row.id)


def sides(tx: Transaction, row: Row[Any], found: Any, *, is_own: bool) -> dict[str, Any]:
    """Both sides of an alarm; ``is_own``: whether what was found is known to be this mutation's own effect."""
    other = ledger.instead(tx, row.run_id, row.id)
    return {
        "settled_by": row.resolved_by,
        "settled_at": row.resolved_at.isoformat(),
        "surfaced": found,
        "is_surely_its_own": is_own,
        "means": _meaning(row, other, is_own=is_own),
        **_other_side(other),
    }


def _alike(row: Row[Any], other: Row[Any] | None) -> Row[Any] | None:
    if other is None or (other.connector, other.operation) != (row.connector, row.operation):
        return None
    return other if other.mutation_status in _MAYBE else None


def _other_side(other: Row[Any] | None) -> dict[str, Any]:
    return {
        "instead_run": str(other.run_id) if other else None,
        "instead_mutation": str(other.mutation_id) if other and other.mutation_id else None,
        "instead_status": other.mutation_status if other else None,
        "instead_result": other.result if other else None,
    }


def _meaning(row: Row[Any], other: Row[Any] | None, *, is_own: bool) -> str:
    """What a person has to know before undoing anything."""
    if other is None:
        return "nothing was done in its place"
    if _alike(row, other) is None:
        return f"run {other.run_id} took its inputs since, and did not do the same"
    if is_own:
        count = "there are" if other.mutation_status == MutationStatus.APPLIED else "there may be"
        return f"it is its own effect, and run {other.run_id} did the same again ({other.mutation_status}): {count} two"
    return (
        f"it may be the effect of run {other.run_id}, which did the same again ({other.mutation_status}): "
        "count them on the other side, and undo one only if there are two"
    )


def untold(tx: Transaction, mutation_id: MutationId) -> None:
    """A look of the watch came back and told nothing: it is not counted, and the one that is booked takes its place."""
    tx.run(mutation_store.UNTOLD, id=mutation_id)


def unwatch(tx: Transaction, row: Row[Any], why: str) -> None:
    """End the watch of a mutation that nobody can look for any more, and keep why."""
    watched(tx, MutationId(row.id), None)
    by = Person(name="reconcile", reason=why)
    audit.record(tx, by, "mutation.unwatched", workflow=row.workflow, run_id=row.run_id, mutation_id=row.id)


def watch(tx: Transaction, mutation_id: MutationId, pause: timedelta, *, counts: bool = True) -> Row[Any] | None:
    """Take the look that is due at a mutation settled on weak evidence, and book another in case it tells nothing."""
    return tx.first(mutation_store.WATCH, id=mutation_id, pause=pause, counts=counts)


def watched(tx: Transaction, mutation_id: MutationId, following: timedelta | None) -> None:
    """It was not there. Look again after the next span, or no more."""
    tx.run(mutation_store.WATCHED, id=mutation_id, next=following)


def surface(
    tx: Transaction, mutation_id: MutationId, result: Any, by: Person, *, is_own: bool = False
) -> Row[Any] | None:
    """It was found, though it was settled as not having happened. Nothing is undone: people are told.

    The audit names both sides: what surfaced, and the run that owns the inputs now and may have done it again.
    ``is_own`` says whether it is known to be this mutation's effect, and not that of the other.
    """
    kept = checked_json(result, what=f"result of mutation {mutation_id}", limit=DEFAULT_LIMITS.result)
    row = tx.first(mutation_store.SURFACE, id=mutation_id, result=json.dumps(kept))
    if row is None:
        return None
    evidence = sides(tx, row, kept, is_own=is_own)
    told = replace(by, reason=f"{by.reason}: {evidence['means']}", evidence=evidence)
    audit.record(tx, told, "mutation.surfaced", **audit.subject_of(row))
    instead = evidence["instead_run"]
    tx.announce("mutation.surfaced", run_id=row.run_id, mutation_id=row.id, workflow=row.workflow, instead=instead)
    return row
