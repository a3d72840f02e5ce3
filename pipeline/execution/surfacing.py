"""What a look found of a mutation that was settled as not having happened: its own effect, or one that was done since.

Where a connector looks by something else than the key, what was rightly done again answers for what was not.
Nobody must be told to undo that, so what is known of both sides is kept apart from what is not.
"""

from typing import Any

from sqlalchemy import Row

from pipeline.domain.mutations import MutationStatus
from pipeline.domain.values import Person
from pipeline.execution import audit
from pipeline.store import ledger
from pipeline.store.database import Transaction

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
