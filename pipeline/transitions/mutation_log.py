"""Log and measure what becomes of mutations."""

from typing import Any

from pipeline.store.database import Transaction
from pipeline.store.schema import MutationRow


def log_mutation(tx: Transaction, name: str, row: MutationRow, **more: Any) -> None:
    """Queue the line of a mutation: what it calls, for which input, and how long the call took."""
    known = row.resolved_at or row.doubted_at
    if row.message_ids:
        more = {"message_id": row.message_ids[0], "inputs": row.message_count, **more}
    if row.sent_at is not None and known is not None:
        more["duration"] = round((known - row.sent_at).total_seconds(), 3)
    tx.log_on_commit(
        name,
        run_id=row.run_id,
        mutation_id=row.id,
        workflow=row.workflow,
        operation=f"{row.connector}.{row.operation}",
        **more,
    )


def record_time_to_resolution(tx: Transaction, row: MutationRow, verdict: str) -> None:
    """Count how long a mutation was in doubt, if it was."""
    if row.doubted_at is not None:
        assert row.resolved_at is not None
        labels = {"connector": row.connector, "operation": row.operation, "verdict": verdict}
        tx.count_on_commit(
            "pipeline.mutation.time_to_resolution", labels, (row.resolved_at - row.doubted_at).total_seconds()
        )
