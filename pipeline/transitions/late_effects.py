"""What a look found of a mutation that was settled as not having happened: its own effect, or one that was done since.

Where a connector looks by something else than the key, what was rightly done again answers for what was not.
Nobody must be told to undo that, so what is known of both sides is kept apart from what is not.
"""

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

from pipeline.domain.ids import MutationId
from pipeline.domain.payloads import checked_json
from pipeline.domain.states import MutationStatus
from pipeline.domain.values import DEFAULT_LIMITS, Actor
from pipeline.store.database import Transaction
from pipeline.store.reads import ledger
from pipeline.store.rows import MutationRow, ReplacementRunRow
from pipeline.store.writes import mutations as mutation_store
from pipeline.transitions import audit

_MAY_HAVE_HAPPENED = {
    MutationStatus.IN_FLIGHT,
    MutationStatus.NEEDS_RECONCILE,
    MutationStatus.INDETERMINATE,
    MutationStatus.APPLIED,
}


def replacement_effect(tx: Transaction, row: MutationRow) -> ReplacementRunRow | None:
    """The later run for the same inputs whose effect may be taken for that of this mutation."""
    return _same_operation(row, ledger.replacement_run(tx, row.run_id, row.id))


def is_replacement_effect(replacement: ReplacementRunRow, found: Any) -> bool:
    """Whether what was found is the result of what was done again. Results without content are all alike."""
    has_content = found not in (None, True, False, {}, [], "") and not (
        isinstance(found, dict) and "unstorable" in found
    )
    return has_content and replacement.mutation_status == MutationStatus.APPLIED and bool(replacement.result == found)


def record_replacement_effect(
    tx: Transaction, row: MutationRow, replacement: ReplacementRunRow, found: Any, by: Actor
) -> None:
    """Keep that what was found is what was done again, by a look that finds it for any key."""
    why = (
        f"what was found is the effect of run {replacement.run_id}, which did it again; nothing shows "
        f"that it happened twice"
    )
    evidence = {**_replacement_fields(replacement), "found": found}
    kept = Actor(name=by.name, reason=why, evidence=evidence)
    audit.record(
        tx, kept, "mutation.replacement_effect_found", workflow=row.workflow, run_id=row.run_id, mutation_id=row.id
    )


def late_effect_evidence(tx: Transaction, row: MutationRow, found: Any, *, is_own: bool) -> dict[str, Any]:
    """Both sides of an alarm; ``is_own``: whether what was found is known to be this mutation's own effect."""
    other = ledger.replacement_run(tx, row.run_id, row.id)
    assert row.resolved_at is not None
    return {
        "resolved_by": row.resolved_by,
        "resolved_at": row.resolved_at.isoformat(),
        "found": found,
        "is_own_effect": is_own,
        "advice": _advice(row, other, is_own=is_own),
        **_replacement_fields(other),
    }


def _same_operation(row: MutationRow, other: ReplacementRunRow | None) -> ReplacementRunRow | None:
    if other is None or (other.connector, other.operation) != (row.connector, row.operation):
        return None
    return other if other.mutation_status in _MAY_HAVE_HAPPENED else None


def _replacement_fields(other: ReplacementRunRow | None) -> dict[str, Any]:
    return {
        "replacement_run": str(other.run_id) if other else None,
        "replacement_mutation": str(other.mutation_id) if other and other.mutation_id else None,
        "replacement_status": other.mutation_status if other else None,
        "replacement_result": other.result if other else None,
    }


def _advice(row: MutationRow, other: ReplacementRunRow | None, *, is_own: bool) -> str:
    """What a person has to know before undoing anything."""
    if other is None:
        return "nothing was done in its place"
    if _same_operation(row, other) is None:
        return f"run {other.run_id} took its inputs since, and did not do the same"
    if is_own:
        count = "there are" if other.mutation_status == MutationStatus.APPLIED else "there may be"
        return f"it is its own effect, and run {other.run_id} did the same again ({other.mutation_status}): {count} two"
    return (
        f"it may be the effect of run {other.run_id}, which did the same again ({other.mutation_status}): "
        "count them on the other side, and undo one only if there are two"
    )


def discount_monitor_check(tx: Transaction, mutation_id: MutationId) -> None:
    """A look of the watch came back and told nothing: it is not counted, and the one that is booked takes its place."""
    tx.execute(mutation_store.DISCOUNT_MONITOR_CHECK, id=mutation_id)


def stop_monitoring(tx: Transaction, row: MutationRow, reason: str) -> None:
    """End the watch of a mutation that nobody can look for any more, and keep why."""
    schedule_monitor_check(tx, MutationId(row.id), None)
    by = Actor(name="reconcile", reason=reason)
    audit.record(tx, by, "mutation.monitoring_stopped", workflow=row.workflow, run_id=row.run_id, mutation_id=row.id)


def begin_monitor_check(
    tx: Transaction, mutation_id: MutationId, retry_after: timedelta, *, is_counted: bool = True
) -> MutationRow | None:
    """Take the look that is due at a mutation settled on weak evidence, and book another in case it tells nothing."""
    return tx.first(mutation_store.BEGIN_MONITOR_CHECK, id=mutation_id, pause=retry_after, counts=is_counted)


def schedule_monitor_check(tx: Transaction, mutation_id: MutationId, next_after: timedelta | None) -> None:
    """It was not there. Look again after the next span, or no more."""
    tx.execute(mutation_store.SCHEDULE_MONITOR_CHECK, id=mutation_id, next=next_after)


def record_late_effect(
    tx: Transaction, mutation_id: MutationId, result: Any, by: Actor, *, is_own: bool = False
) -> MutationRow | None:
    """It was found, though it was settled as not having happened. Nothing is undone: people are told.

    The audit names both sides: what surfaced, and the run that owns the inputs now and may have done it again.
    ``is_own`` says whether it is known to be this mutation's effect, and not that of the other.
    """
    kept = checked_json(result, what=f"result of mutation {mutation_id}", limit=DEFAULT_LIMITS.result)
    row = tx.first(mutation_store.RECORD_LATE_EFFECT, id=mutation_id, result=json.dumps(kept))
    if row is None:
        return None
    evidence = late_effect_evidence(tx, row, kept, is_own=is_own)
    told = replace(by, reason=f"{by.reason}: {evidence['advice']}", evidence=evidence)
    audit.record(tx, told, "mutation.found_late", **audit.subject_of(row))
    replacement = evidence["replacement_run"]
    tx.log_on_commit(
        "mutation.found_late", run_id=row.run_id, mutation_id=row.id, workflow=row.workflow, replacement_run=replacement
    )
    return row
