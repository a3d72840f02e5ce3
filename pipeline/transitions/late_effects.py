"""Late effects: a mutation was resolved as failed, and a later check finds its effect, or that of a replacement run.

A replacement run that sent the same request under the same key has no effect of its own, if the outside system
honours keys: what is found is the one effect of both.

If a connector reconciles by a business field instead of the idempotency key, it may find the effect of the
replacement run. No operator must be asked to undo that one. So the evidence separates what is known of both runs
from what is not.
"""

import json
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from pipeline.domain import idempotency
from pipeline.domain.codec import seal
from pipeline.domain.idempotency import SentKey
from pipeline.domain.payloads import checked_json
from pipeline.domain.states import MutationId, MutationStatus
from pipeline.domain.values import DEFAULT_LIMITS, Actor
from pipeline.store.database import Transaction
from pipeline.store.reads import ledger, work
from pipeline.store.rows import ReplacementRunRow
from pipeline.store.schema import MutationRow
from pipeline.store.writes import mutations as mutation_store
from pipeline.transitions import audit
from pipeline.transitions.mutations import log_mutation

_MAY_HAVE_HAPPENED = {
    MutationStatus.IN_FLIGHT,
    MutationStatus.NEEDS_RECONCILE,
    MutationStatus.INDETERMINATE,
    MutationStatus.APPLIED,
}


def replacement_effect(tx: Transaction, row: MutationRow) -> ReplacementRunRow | None:
    """The later run for the same inputs whose effect may be taken for that of this mutation."""
    return _same_operation(row, ledger.replacement_run(tx, row.run_id, row.id))


def is_one_effect(row: MutationRow, replacement: ReplacementRunRow) -> bool:
    """Whether the mutation and that of the replacement run can only have had one effect together."""
    sent = SentKey(key=row.idempotency_key, keyed=row.keyed, expires_at=row.key_expires_at)
    return idempotency.is_one_effect(sent, replacement.idempotency_key, replacement.sent_at)


def is_replacement_effect(replacement: ReplacementRunRow, found: Any) -> bool:
    """Whether what was found is the result of what was done again. Results without content are all alike."""
    has_content = found not in (None, True, False, {}, [], "") and not (
        isinstance(found, dict) and "unstorable" in found
    )
    return has_content and replacement.mutation_status == MutationStatus.APPLIED and bool(replacement.result == found)


def record_replacement_effect(
    tx: Transaction, row: MutationRow, replacement: ReplacementRunRow, found: Any, by: Actor
) -> None:
    """Record that a check found the effect of the replacement run: the two share a key, or it is found for any key."""
    if is_one_effect(row, replacement):
        why = f"run {replacement.run_id} sent it again under the same key, so it happened once"
    else:
        why = (
            f"what was found is the effect of run {replacement.run_id}, which did it again; nothing shows "
            f"that it happened twice"
        )
    evidence = {**_replacement_fields(replacement), "found": found}
    kept = replace(by, reason=why, evidence=evidence)
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
    """Return what an operator has to know before undoing anything."""
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
    """Do not count a check that ended without a verdict: the booked one takes its place."""
    tx.execute(mutation_store.DISCOUNT_MONITOR_CHECK, id=mutation_id)


def stop_monitoring(tx: Transaction, row: MutationRow, reason: str) -> None:
    """End the monitoring of a mutation that no code can check any more, and record why."""
    schedule_monitor_check(tx, MutationId(row.id), None)
    by = Actor(name="reconcile", reason=reason)
    audit.record(tx, by, "mutation.monitoring_stopped", workflow=row.workflow, run_id=row.run_id, mutation_id=row.id)


def begin_monitor_check(
    tx: Transaction,
    mutation_id: MutationId,
    retry_after: timedelta,
    *,
    is_counted: bool = True,
    deferred_until: datetime | None = None,
) -> MutationRow | None:
    """Begin the check that is due or was deferred, and book another in case it gives no verdict."""
    return tx.first(
        mutation_store.BEGIN_MONITOR_CHECK,
        id=mutation_id,
        pause=retry_after,
        counts=is_counted,
        deferred_until=deferred_until,
    )


def schedule_monitor_check(tx: Transaction, mutation_id: MutationId, next_after: timedelta | None) -> None:
    """Book the next check after an absence, or end the monitoring."""
    tx.execute(mutation_store.SCHEDULE_MONITOR_CHECK, id=mutation_id, next=next_after)


def record_late_effect(
    tx: Transaction, mutation_id: MutationId, result: Any, by: Actor, *, is_own: bool = False
) -> MutationRow | None:
    """Record an effect that was found after its mutation was resolved as failed. Nothing is undone.

    The audit names both sides: what was found, and the run that owns the inputs now and may have repeated the effect.
    ``is_own`` says whether it is known to be this mutation's effect, and not that of the other. If the other was sent
    under the same key and the key was honoured, there is one effect: that is recorded, and no alarm is raised.
    """
    kept = checked_json(result, what=f"result of mutation {mutation_id}", limit=DEFAULT_LIMITS.result)
    stored = _sealed_result(tx, mutation_id, kept)
    if _is_found_as_repeated(tx, mutation_id, kept, by):
        return None
    row = tx.first(mutation_store.RECORD_LATE_EFFECT, id=mutation_id, result=json.dumps(stored))
    if row is None:
        return None
    evidence = late_effect_evidence(tx, row, kept, is_own=is_own)
    signed = replace(by, reason=f"{by.reason}: {evidence['advice']}", evidence=evidence)
    audit.record(tx, signed, "mutation.found_late", **audit.subject_of(row))
    replacement = evidence["replacement_run"]
    log_mutation(tx, "mutation.found_late", row, replacement_run=replacement)
    return row


def _sealed_result(tx: Transaction, mutation_id: MutationId, result: Any) -> Any:
    rows = () if tx.codecs is None or result is None else work.mutations(tx, [mutation_id])
    codec = tx.codecs.writer(tx, rows[0].workflow) if tx.codecs is not None and rows else None
    return result if codec is None else seal(codec, result, "result", mutation_id)


def _is_found_as_repeated(tx: Transaction, mutation_id: MutationId, found: Any, by: Actor) -> bool:
    """Whether the effect is also that of the replacement run. Then that is recorded, and monitoring ends."""
    for row in work.mutations(tx, [mutation_id]):
        replacement = replacement_effect(tx, row) if row.status == MutationStatus.FAILED else None
        if replacement is not None and is_one_effect(row, replacement):
            record_replacement_effect(tx, row, replacement, found, by)
            schedule_monitor_check(tx, mutation_id, None)
            return True
    return False
