"""How long nobody knew what became of a mutation, counted when somebody does."""

from typing import Any

from sqlalchemy import Row

from pipeline.store.database import Transaction


def certain(tx: Transaction, row: Row[Any], verdict: str) -> None:
    """A mutation is settled. One that was never in doubt tells nothing."""
    if row.doubted_at is not None:
        told = {"connector": row.connector, "operation": row.operation, "verdict": verdict}
        tx.count("pipeline.mutation.certainty", told, (row.resolved_at - row.doubted_at).total_seconds())
